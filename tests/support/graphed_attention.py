"""One captured step of an attention backend, replayed over steps of other lengths, other rows and padding, as the engine's
forward graphs do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hotswap.core.contracts.attention import AttentionBackend, AttentionLayer, BatchGeometry
from hotswap.core.testing.paged_steps import PagedStep

# (new tokens, context length) of each request, by step: mixed, decode, prefill, drafts and a prompt.
GRAPHED = (
    ((1, 700), (150, 300), (5, 90), (9, 33), (1, 1), (64, 64)),
    ((1, 2000), (1, 5)),
    ((230, 230),),
    ((7, 30), (8, 8), (1, 600)),
)
TOKENS, ROWS, WIDTH = 256, 8, 300


def replays(
    backend: AttentionBackend, layer: AttentionLayer, steps: Sequence[PagedStep]
) -> Iterator[tuple[PagedStep, Tensor]]:
    """Captures once, over buffers that hold no step; then each step and what the graph made of it, [its tokens, H, D]. The
    steps' caches must have the same sizes but for the number of blocks."""
    first = steps[0]
    block_size = first.geometry.block_size
    query = torch.zeros((TOKENS, *first.query.shape[1:]), dtype=first.query.dtype, device="cuda")
    blocks = max(len(step.cache[0]) for step in steps)
    cache = (
        torch.zeros((blocks, *first.cache[0].shape[1:]), dtype=first.cache[0].dtype, device="cuda"),
        torch.zeros((blocks, *first.cache[1].shape[1:]), dtype=first.cache[1].dtype, device="cuda"),
    )
    geometry = BatchGeometry(
        query_start_loc=torch.zeros(ROWS + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
        block_table=torch.zeros((ROWS, WIDTH), dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((TOKENS,), -1, device="cuda"),
        num_tokens=TOKENS,
        num_requests=ROWS,
        max_query_len=TOKENS,
        max_seq_len=4096,
        block_size=block_size,
    )
    backend.prepare(geometry)

    def run() -> Tensor:
        new = query[:, : layer.num_kv_heads]
        backend.write_kv(new, new, cache)  # every slot is -1
        return backend.forward(query, cache, layer)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in [*steps, first]:
        step.run(backend, layer)  # writes this step's keys
        for stored, mine in zip(step.cache, cache, strict=True):
            mine[: len(stored)] = stored
        query[: len(step.query)] = step.query
        geometry.query_start_loc.fill_(len(step.query))
        geometry.query_start_loc[: len(step.contexts) + 1] = step.geometry.query_start_loc
        geometry.seq_lens.fill_(999)
        geometry.seq_lens[: len(step.contexts)] = step.geometry.seq_lens
        geometry.block_table.zero_()
        geometry.block_table[: len(step.contexts), : step.geometry.block_table.shape[1]] = step.geometry.block_table
        out.fill_(float("nan"))
        graph.replay()
        yield step, out[: len(step.query)].clone()
