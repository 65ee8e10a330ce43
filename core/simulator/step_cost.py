"""What a step costs: products and attention, each the larger of what it reads and what it computes, plus an overhead.

    products   max(weight_seconds, token_seconds x tokens + row_seconds x rows that draw a token)
    attention  max(context_seconds x context tokens read, pair_seconds x (query, key) pairs)
    step       products + attention + overhead_seconds

Within a kernel, memory and arithmetic overlap; the products of a layer and its attention run one after the other. For a lone
prompt the arithmetic of the products counts, for a small decode batch the weights' bytes, for a large one with long contexts
the bytes of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ..contracts.plan import StepPlan
from ..devices import Device
from ..errors import UsageError
from .model_shape import ModelShape

# What of a data sheet's peaks a step reaches, over all of its kernels. Measured on an H200 (docs/benchmarks.md): weights and KV
# cache are read at 3.9 to 4.2 of 4.8 TB/s; products run at 570 (256 rows) to 700 TFLOP/s (2,048) of 989. 0.8 and 0.65 lie
# between, and what the small kernels of a layer take is in them.
BANDWIDTH_EFFICIENCY: Final = 0.8
FLOPS_EFFICIENCY: Final = 0.65
# What a step takes besides: launches, the draw's way to the host, gaps. On an H200 what is left of a decode step of one row;
# on a CPU a guess, as its speed is.
OVERHEAD_SECONDS: Final = 300e-6
CPU_OVERHEAD_SECONDS: Final = 2e-3


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step has to do. tokens: computed. rows: that draw a token. context_tokens: whose KV is read, each row's
    own and those before. pairs: of a query and a key that it sees."""

    tokens: int
    rows: int
    context_tokens: int
    pairs: int


def work_of(plan: StepPlan) -> StepWork:
    """Of a plan's batch."""
    before = rows = pairs = 0
    for row in plan.scheduled:
        first, count = row.num_scheduled_tokens_before, row.num_tokens
        before += first
        rows += row.samples
        pairs += first + 1 if count == 1 else count * first + count * (count + 1) // 2
    return StepWork(plan.num_tokens, rows, before + plan.num_tokens, pairs)


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds; see the module's docstring. weight_seconds: the weights, read once. token_seconds: the products of one
    token through the layers. row_seconds: the output head and the draw. context_seconds: the KV of one token.
    pair_seconds: one pair. source: where the figures come from, for the reader."""

    weight_seconds: float
    token_seconds: float
    row_seconds: float = 0.0
    context_seconds: float = 0.0
    pair_seconds: float = 0.0
    overhead_seconds: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name != "source" and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of seconds from 0 on, got {value}")
        if self.weight_seconds + self.token_seconds + self.overhead_seconds <= 0:
            raise ValueError("weight_seconds, token_seconds and overhead_seconds are all 0: a step would take no time")

    def seconds(self, work: StepWork) -> float:
        """Of a step."""
        products = self.token_seconds * work.tokens + self.row_seconds * work.rows
        read, computed = self.context_seconds * work.context_tokens, self.pair_seconds * work.pairs
        return (
            (products if products > self.weight_seconds else self.weight_seconds)
            + (read if read > computed else computed)
            + self.overhead_seconds
        )


def derive_cost(shape: ModelShape, device: Device) -> StepCost:
    """From a device's peaks: two operations a parameter and token in the products, four a pair and query value in
    attention. Every layer sees the whole context. Raises UsageError when nothing is known of the device's speed."""
    if device.bandwidth is None or device.flops is None:
        raise UsageError(f"--device {device.name}: its speed is not known; give --cost FILE")
    byte, operation = 1 / (device.bandwidth * BANDWIDTH_EFFICIENCY), 1 / (device.flops * FLOPS_EFFICIENCY)
    return StepCost(
        weight_seconds=shape.read_bytes * byte,
        token_seconds=2 * shape.layer_parameters * operation,
        row_seconds=2 * shape.head_parameters * operation,
        context_seconds=shape.kv_bytes_per_token * byte,
        pair_seconds=4 * shape.attention_width * operation,
        overhead_seconds=CPU_OVERHEAD_SECONDS if device.name == "cpu" else OVERHEAD_SECONDS,
        source=f"derived: {device.name}, {BANDWIDTH_EFFICIENCY:.0%} of its bandwidth, {FLOPS_EFFICIENCY:.0%} of its arithmetic",
    )


def read_cost(path: str | Path) -> StepCost:
    """A JSON object with the fields of StepCost. Raises UsageError naming file and field."""
    try:
        cost = msgspec.json.decode(Path(path).read_bytes(), type=StepCost)
    except OSError as error:
        raise UsageError(f"--cost {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--cost {path}: {error}") from None
    return cost if cost.source else msgspec.structs.replace(cost, source=f"file {path}")


def write_cost(path: str | Path, cost: StepCost) -> None:
    """What `read_cost` reads. Replaces the file."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=1) + b"\n")
