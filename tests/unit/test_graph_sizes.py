"""Which graphs are captured; which one a step takes is tested with the runner."""

from __future__ import annotations

import pytest

from hotswap.core.runner.graphs import decode_sizes, forward_sizes


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 9, 200, 256])
def test_decode_graphs_hold_every_batch_with_little_padding(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for rows in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < max(2 * rows, rows + 8)


@pytest.mark.parametrize(
    ("max_tokens", "max_num_seqs"), [(1, 4), (20, 8), (512, 256), (2048, 256), (2048, 4), (700, 64)]
)
def test_forward_graphs_hold_every_step(max_tokens: int, max_num_seqs: int) -> None:
    sizes = forward_sizes(max_tokens, max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1][0] == max_tokens
    assert all(rows <= min(tokens, max_num_seqs) for tokens, rows in sizes)
    for tokens in range(1, max_tokens + 1):
        rows = min(tokens, max_num_seqs)  # the most that a step of so many tokens can have
        size = next(size for size in sizes if size[0] >= tokens and size[1] >= rows)
        assert size[0] <= max(tokens + 32, 1.5 * tokens), f"{tokens} tokens are padded to {size[0]}"


def test_large_steps_of_few_requests_have_graphs_of_their_own() -> None:
    sizes = forward_sizes(2048, 256)
    assert (2048, 8) in sizes and (2048, 256) in sizes and (16, 16) in sizes
    assert (2048, 8) not in forward_sizes(2048, 8)[:-1]
