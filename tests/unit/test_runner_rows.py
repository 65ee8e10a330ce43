"""Which tokens' hidden states the runner asks a model for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hash_worker import PROMPT, Driver, HashModel, check, make_runner
from torch import Tensor

from hotswap.core.contracts.model import ForwardContext


class Asked(HashModel):
    """asked: the rows of each call, None where it was asked for all."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int] | None] = []

    def forward(self, embeds: Tensor, positions: Tensor, context: ForwardContext, *more: Any) -> Tensor:
        self.asked.append(None)
        return super().forward(embeds, positions, context, *more)

    def forward_rows(self, embeds: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor) -> Tensor:
        assert rows.dtype is torch.int64
        found = super().forward(embeds, positions, context).index_select(0, rows)
        self.asked.append(rows.tolist())
        return found


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_the_last_token_of_each_row(asked: Asked) -> None:
    """Rows that draw nothing have one too; a step of single tokens needs no choice."""
    driver = Driver(make_runner(graphs=False, model=asked)[0])
    requests = [driver.add(at, PROMPT[: 4 + at], temperature=0.0) for at in range(3)]
    driver.run({0: 4, 1: 3, 2: 6})
    driver.run({0: 1, 1: 2})
    driver.run({0: 1, 1: 1, 2: 1})
    assert asked.asked == [[3, 6, 12], [0, 2], None]
    assert [len(request.outputs) for request in requests] == [3, 2, 2]
    for request in requests:
        check(request)


def test_a_chunk_that_draws_nothing(asked: Asked) -> None:
    driver = Driver(make_runner(graphs=False, model=asked)[0])
    request = driver.add(0, PROMPT, temperature=0.0)
    driver.run({0: 5})
    assert asked.asked == [[4]] and not request.outputs
    driver.run({0: len(PROMPT) - 5})
    check(request)


def test_all_of_them_where_a_prompt_is_described(asked: Asked) -> None:
    """As long as it is: the chunk that ends with its last token owes nothing for that one."""
    driver = Driver(make_runner(graphs=False, model=asked)[0])
    described = driver.add(0, PROMPT, temperature=0.0, prompt_logprobs=1)
    other = driver.add(1, PROMPT[:3], temperature=0.0)
    driver.run({0: len(PROMPT) - 2, 1: 3})
    driver.run({0: 2, 1: 1})
    driver.run({0: 1, 1: 1})
    assert asked.asked == [None, None, None]
    assert sorted(described.prompt_logprobs) == list(range(1, len(PROMPT)))
    later = driver.add(2, PROMPT[:4], temperature=0.0)
    driver.run({0: 1, 2: 4})
    assert asked.asked[-1] == [0, 4]
    for request in (described, other, later):
        check(request)
