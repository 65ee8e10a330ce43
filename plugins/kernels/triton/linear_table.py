"""Launch shapes that were measured, by card and matrix; printed by `benchmarks/gpu/linear.py`. Each row holds up to so many
tokens; beyond a matrix's last row torch's library is used.

(9, 0): one NVIDIA H200, torch 2.11, triton 3.6. The matrices are Llama-3.1-8B's and SmolLM2-135M's.
"""

from __future__ import annotations

from .linear_shapes import Capability, Dot, Early, Matvec, Row

_NOTHING, _LINES, _BULK = Early.NOTHING, Early.LINES, Early.BULK


def _dot(
    block_t: int, block_n: int, block_k: int, segments: int, warps: int, stages: int, early: Early, early_bytes: int
) -> Dot:
    """Weights as the left operand."""
    return Dot(block_t, block_n, block_k, segments, True, warps, stages, True, early, early_bytes)


def _dot_x(
    block_t: int, block_n: int, block_k: int, segments: int, warps: int, stages: int, early: Early, early_bytes: int
) -> Dot:
    """Tokens as the left operand."""
    return Dot(block_t, block_n, block_k, segments, True, warps, stages, False, early, early_bytes)


TABLE: dict[Capability, dict[tuple[int, int], tuple[Row, ...]]] = {
    (9, 0): {
        (6144, 4096): (
            (1, Matvec(block_n=2, block_k=4096, warps=8)),
            (4, _dot(16, 64, 128, 4, 4, 3, _LINES, 256)),
            (8, _dot(16, 64, 256, 1, 4, 5, _LINES, 512)),
            (16, _dot(16, 64, 256, 1, 4, 5, _LINES, 1024)),
            (32, _dot(32, 64, 256, 1, 4, 4, _LINES, 512)),
            (64, _dot(64, 64, 256, 1, 4, 3, _LINES, 256)),
        ),
        (4096, 4096): (
            (1, Matvec(block_n=16, block_k=1024, warps=8)),
            (4, _dot(16, 64, 128, 2, 4, 5, _LINES, 512)),
            (8, _dot(16, 64, 256, 2, 4, 5, _LINES, 512)),
            (16, _dot(16, 64, 256, 2, 4, 5, _LINES, 512)),
            (32, _dot(32, 64, 256, 2, 4, 4, _LINES, 512)),
            (64, _dot(64, 64, 256, 2, 4, 3, _LINES, 256)),
        ),
        (28672, 4096): (
            (1, Matvec(block_n=2, block_k=4096, warps=8)),
            (4, _dot(16, 64, 128, 1, 4, 5, _LINES, 256)),
            (8, _dot(16, 64, 128, 1, 4, 5, _LINES, 256)),
            (16, _dot(16, 64, 128, 1, 4, 5, _NOTHING, 512)),
            (32, _dot(32, 64, 128, 1, 4, 4, _LINES, 256)),
            (64, _dot(64, 64, 128, 1, 4, 3, _LINES, 256)),
            (128, _dot_x(128, 128, 64, 1, 4, 3, _LINES, 256)),
        ),
        (4096, 14336): (
            (1, Matvec(block_n=8, block_k=2048, warps=8)),
            (4, _dot(16, 64, 128, 2, 4, 5, _NOTHING, 512)),
            (8, _dot(16, 64, 128, 4, 4, 4, _LINES, 512)),
            (16, _dot(16, 64, 128, 4, 4, 4, _LINES, 512)),
            (32, _dot(32, 64, 256, 2, 4, 4, _LINES, 512)),
            (64, _dot(64, 64, 256, 2, 4, 3, _LINES, 256)),
        ),
        (128256, 4096): (
            (1, Matvec(block_n=2, block_k=4096, warps=8)),
            (4, _dot(16, 64, 128, 1, 4, 3, _LINES, 256)),
            (8, _dot(16, 64, 128, 1, 4, 3, _LINES, 512)),
            (16, _dot(16, 64, 128, 1, 4, 3, _LINES, 256)),
            (32, _dot(32, 64, 128, 1, 4, 3, _LINES, 512)),
            (64, _dot(64, 128, 128, 1, 8, 4, _LINES, 512)),
            (128, _dot_x(128, 128, 64, 1, 4, 3, _BULK, 512)),
        ),
        (960, 576): (
            (1, Matvec(block_n=16, block_k=1024, warps=8)),
            (4, _dot_x(16, 32, 64, 1, 4, 6, _BULK, 2048)),
            (8, _dot_x(16, 32, 64, 1, 4, 6, _BULK, 2048)),
            (16, _dot_x(16, 32, 64, 1, 4, 6, _BULK, 2048)),
            (32, _dot(16, 64, 64, 1, 4, 6, _BULK, 2048)),
            (64, _dot(32, 64, 64, 1, 4, 6, _LINES, 1024)),
            (128, _dot_x(64, 32, 64, 1, 4, 6, _LINES, 2048)),
        ),
        (576, 576): (
            (1, Matvec(block_n=8, block_k=1024, warps=4)),
            (4, _dot(16, 64, 64, 1, 4, 6, _BULK, 2048)),
            (8, _dot_x(16, 32, 64, 1, 4, 6, _BULK, 2048)),
            (16, _dot_x(16, 32, 64, 1, 4, 6, _BULK, 2048)),
            (32, _dot(16, 64, 64, 1, 4, 6, _BULK, 2048)),
            (64, _dot_x(64, 32, 64, 1, 4, 6, _LINES, 2048)),
            (128, _dot(16, 64, 64, 1, 4, 6, _LINES, 1024)),
        ),
        (3072, 576): (
            (1, Matvec(block_n=4, block_k=1024, warps=4)),
            (4, _dot(16, 64, 64, 1, 4, 6, _BULK, 2048)),
            (8, _dot(16, 64, 64, 1, 4, 6, _BULK, 2048)),
            (16, _dot(16, 64, 64, 1, 4, 6, _BULK, 2048)),
            (32, _dot(16, 64, 64, 1, 4, 6, _LINES, 1024)),
            (64, _dot(32, 64, 64, 1, 4, 6, _BULK, 512)),
            (128, _dot(64, 64, 64, 1, 4, 6, _LINES, 256)),
        ),
        (576, 1536): (
            (1, Matvec(block_n=8, block_k=2048, warps=8)),
            (4, Matvec(block_n=1, block_k=2048, warps=2)),
            (8, _dot_x(16, 16, 256, 1, 2, 4, _BULK, 2048)),
            (16, _dot_x(16, 16, 256, 3, 2, 4, _BULK, 512)),
            (32, _dot(32, 64, 256, 1, 4, 4, _LINES, 512)),
            (64, _dot(32, 64, 64, 1, 4, 6, _LINES, 2048)),
            (128, _dot(16, 64, 64, 1, 4, 6, _LINES, 1024)),
        ),
        (49152, 576): (
            (1, _dot(16, 128, 64, 1, 4, 6, _LINES, 256)),
            (4, _dot(16, 128, 64, 1, 4, 6, _LINES, 256)),
            (8, _dot(16, 128, 64, 1, 4, 6, _LINES, 256)),
            (16, _dot(16, 128, 64, 1, 4, 6, _LINES, 256)),
            (32, _dot(32, 128, 64, 1, 4, 5, _BULK, 512)),
            (64, _dot_x(64, 128, 64, 1, 4, 4, _BULK, 512)),
        ),
    }
}
