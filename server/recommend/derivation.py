"""The arithmetic of `hotswap recommend`. Pure functions of a trace, a model and a device; every step is kept as a line
for the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hotswap.core.devices import GIB, Device
from hotswap.core.errors import UsageError
from hotswap.core.trace import TraceRow

from .model_facts import ModelFacts

BUSY_SECONDS: Final = 60.0  # the busiest stretch of this length sets the arrival rate
_BANDWIDTH_SHARE: Final = 0.6  # of the peak, in decode
_COMPUTE_SHARE: Final = 0.4  # of the peak, in prefill


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the operator may set, and is assumed otherwise.

    tpot: measured seconds for each output token of a request. prefill_rate: measured prompt tokens a second.
    workspace_bytes: what activations, the runtime and fragmentation take. stall_seconds: how long one step's prompt tokens
    may hold up everybody else's next token.
    """

    block_size: int = 16
    utilization: float | None = None
    workspace_bytes: int = GIB
    stall_seconds: float = 0.2
    tpot: float | None = None
    prefill_rate: float | None = None
    prefix_caching: bool = True


@dataclass(slots=True)
class Derivation:
    """The settings, and how they came about: (heading, line) in order."""

    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    kv_cache_bytes: int = 0
    utilization: float = 0.0
    refused: int = 0
    cut_short: int = 0
    lines: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def say(self, heading: str, line: str) -> None:
        self.lines.append((heading, line))


def derive(rows: Sequence[TraceRow], model: ModelFacts, device: Device, assumed: Assumed) -> Derivation:
    """Raises UsageError when the model does not fit the device, or the device's speed is not known."""
    found = Derivation(utilization=assumed.utilization or device.utilization)
    blocks = _memory_for_blocks(found, model, device, assumed)
    _window(found, rows, model, assumed, blocks)
    token_seconds = _prefill_seconds_per_token(model, device, assumed)
    _seats(found, rows, model, device, assumed, blocks, token_seconds)
    _step(found, rows, assumed, token_seconds)
    _memory_used(found, rows, model, device, assumed)
    return found


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def busiest_rate(rows: Sequence[TraceRow], seconds: float = BUSY_SECONDS) -> tuple[float, float]:
    """(requests a second in the busiest stretch, its length). The length is the whole trace's when that is shorter; the
    rate of requests that all come at once is infinite."""
    arrivals = sorted(row.arrival for row in rows)
    length = min(seconds, arrivals[-1] - arrivals[0])
    if length == 0:
        return math.inf, 0.0
    most, first = 0, 0
    for last, arrival in enumerate(arrivals):
        while arrival - arrivals[first] >= length:
            first += 1
        most = max(most, last - first + 1)
    return most / length, length


def computed_prompt_tokens(rows: Sequence[TraceRow], prefix_caching: bool) -> int:
    """Prompt tokens that have to be computed: a shared prefix once, when prefixes are cached."""
    seen: dict[str, int] = {}
    total = 0
    for row in sorted(rows, key=lambda row: row.arrival):
        shared = min(row.prefix_tokens, seen.get(row.prefix, 0)) if row.prefix and prefix_caching else 0
        total += row.prompt_tokens - shared
        if row.prefix:
            seen[row.prefix] = max(seen.get(row.prefix, 0), row.prefix_tokens)
    return total


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def seconds(value: float) -> str:
    """0.0021 -> '2.1 ms'"""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _memory_for_blocks(found: Derivation, model: ModelFacts, device: Device, assumed: Assumed) -> int:
    """How many blocks the device has room for, without the null block."""
    heading = "Memory for the KV cache"
    budget = int(device.memory_bytes * found.utilization)
    room = budget - model.weight_bytes - assumed.workspace_bytes
    per_token = model.kv_bytes_per_token
    found.say(heading, f"device {device.name}: {gib(device.memory_bytes)} x {found.utilization:g} = {gib(budget)}")
    found.say(heading, f"weights: {model.weights_from}; as {model.dtype}: {gib(model.weight_bytes)}")
    found.say(
        heading,
        f"KV cache of a token: 2 (K and V) x {model.layers} layers x {model.kv_heads} KV heads x {model.head_dim} x "
        f"{model.dtype_bytes} bytes = {per_token:,} bytes",
    )
    found.say(
        heading,
        f"room: {gib(budget)} - {gib(model.weight_bytes)} weights - {gib(assumed.workspace_bytes)} workspace = {gib(room)}",
    )
    blocks = room // (per_token * assumed.block_size)
    if blocks < 2:
        raise UsageError(
            f"{model.name} does not fit {device.name}: {gib(budget)} to use, {gib(model.weight_bytes)} of weights and "
            f"{gib(assumed.workspace_bytes)} of workspace leave no room for a KV cache"
        )
    found.say(
        heading,
        f"blocks: {gib(room)} / ({assumed.block_size} tokens x {per_token:,} bytes) = {blocks:,}, one is the null block",
    )
    return blocks - 1


def _window(found: Derivation, rows: Sequence[TraceRow], model: ModelFacts, assumed: Assumed, blocks: int) -> None:
    """--max-model-len."""
    heading = "--max-model-len"
    lengths = [row.prompt_tokens + row.output_tokens for row in rows]
    p99 = percentile(lengths, 0.99)
    window = round_up(p99, assumed.block_size)
    found.say(
        heading,
        f"prompt + output: p50 {percentile(lengths, 0.5):,}, p95 {percentile(lengths, 0.95):,}, p99 {p99:,}, longest "
        f"{max(lengths):,} tokens",
    )
    found.say(heading, f"p99 {p99:,} rounded up to blocks of {assumed.block_size}: {window:,}")
    for limit, what in (
        (model.window, "the model's own window"),
        (blocks * assumed.block_size, "what the KV cache holds"),
    ):
        if 0 < limit < window:
            found.say(heading, f"{window:,} is more than {what}: {limit:,}")
            found.warnings.append(f"requests longer than {what} ({limit:,} tokens) cannot be served whole")
            window = limit
    found.max_model_len = window
    found.refused = sum(row.prompt_tokens >= window for row in rows)
    found.cut_short = sum(row.prompt_tokens < window < row.prompt_tokens + row.output_tokens for row in rows)
    found.say(
        heading,
        f"of {len(rows):,} requests {found.refused:,} would be refused (the prompt leaves no token to answer) and "
        f"{found.cut_short:,} cut short",
    )


def _prefill_seconds_per_token(model: ModelFacts, device: Device, assumed: Assumed) -> float:
    if assumed.prefill_rate is not None:
        return 1 / assumed.prefill_rate
    if device.flops is None:
        raise UsageError("the device's speed is not known: give --prefill-rate and --tpot as measured, or a --device")
    return 2 * model.parameters / (device.flops * _COMPUTE_SHARE)


def _seats(
    found: Derivation,
    rows: Sequence[TraceRow],
    model: ModelFacts,
    device: Device,
    assumed: Assumed,
    blocks: int,
    token_seconds: float,
) -> None:
    """--max-num-seqs: Little's law, bounded by memory."""
    heading = "--max-num-seqs"
    rate, length = busiest_rate(rows)
    wanted: float
    if math.isinf(rate):
        wanted = len(rows)
        found.say(heading, f"all {len(rows):,} requests come at once: {len(rows):,} at a time")
    else:
        found.say(heading, f"arrivals: {rate:.3g} a second in the busiest {length:.0f} s")
        wanted = _little(found, heading, rows, model, device, assumed, rate, token_seconds)
    p95 = percentile([min(row.prompt_tokens + row.output_tokens, found.max_model_len) for row in rows], 0.95)
    each = -(-p95 // assumed.block_size)
    bound = max(1, blocks // each)
    found.say(
        heading,
        f"memory: {blocks:,} blocks / {each:,} (p95 length {p95:,} tokens, in blocks) = {bound:,} requests at once",
    )
    wanted = min(wanted, len(rows))  # more than the whole trace are never there
    found.max_num_seqs = max(1, min(math.ceil(wanted), bound))
    if wanted > bound:
        found.warnings.append(
            f"memory holds {bound:,} requests at once and the trace asks for {math.ceil(wanted):,}: the others wait in "
            "the queue"
        )


def _little(
    found: Derivation,
    heading: str,
    rows: Sequence[TraceRow],
    model: ModelFacts,
    device: Device,
    assumed: Assumed,
    rate: float,
    token_seconds: float,
) -> float:
    """Seats for the requests in the engine at once in the busiest stretch; infinite when it cannot keep up.

    Random arrivals make the number of requests at once a Poisson variable around Little's average: three standard
    deviations above it are exceeded in less than one moment of a hundred.
    """
    computed = computed_prompt_tokens(rows, assumed.prefix_caching) / len(rows)
    output = sum(row.output_tokens for row in rows) / len(rows)
    context = sum(row.prompt_tokens + row.output_tokens / 2 for row in rows) / len(rows)
    prefill = computed * token_seconds
    busy = rate * prefill
    found.say(
        heading,
        f"prefill: {computed:,.0f} prompt tokens to compute x {seconds(token_seconds)} = {seconds(prefill)} a request; "
        f"x {rate:.3g}/s = {busy:.0%} of the device",
    )
    if busy >= 1:
        return _overloaded(found, heading, "prefill alone takes more than all of the device's time")
    share = 1 - busy
    if assumed.tpot is not None:
        tpot = assumed.tpot
        service = prefill + output * tpot
        found.say(heading, f"decode: {seconds(tpot)} a token, as measured")
    else:
        if device.bandwidth is None:
            raise UsageError("the device's speed is not known: give --tpot as measured, or a --device")
        bandwidth = device.bandwidth * _BANDWIDTH_SHARE * share
        read = context * model.kv_bytes_per_token
        # N = rate x (prefill + output x (weights + N x read) / bandwidth), solved for N.
        growth = rate * output * read / bandwidth
        if growth >= 1:
            return _overloaded(found, heading, "every request read while others decode slows all of them further")
        together = rate * (prefill + output * model.weight_bytes / bandwidth) / (1 - growth)
        tpot = (model.weight_bytes + together * read) / bandwidth
        service = prefill + output * tpot
        found.say(
            heading,
            f"decode: a step reads the weights and {together:.3g} requests x {context:,.0f} tokens of KV = "
            f"{gib(model.weight_bytes + together * read)}, at {bandwidth / 1e9:,.0f} GB/s: {seconds(tpot)} a token",
        )
    found.say(
        heading, f"service: {seconds(prefill)} + {output:,.0f} output tokens x {seconds(tpot)} = {seconds(service)}"
    )
    average = rate * service
    seats = average + 3 * math.sqrt(average)
    found.say(heading, f"Little's law: {rate:.3g}/s x {seconds(service)} = {average:.3g} requests at once, on average")
    found.say(
        heading,
        f"arrivals come in bunches: {average:.3g} + 3 x sqrt({average:.3g}) = {seats:.3g} is seldom exceeded",
    )
    return seats


def _overloaded(found: Derivation, heading: str, why: str) -> float:
    found.say(heading, f"the device cannot keep up with the busiest stretch: {why}")
    found.warnings.append(
        "the device cannot keep up with the busiest stretch of this trace: queues grow meanwhile, which "
        "--max-num-queued-reqs bounds"
    )
    return math.inf


def _step(found: Derivation, rows: Sequence[TraceRow], assumed: Assumed, token_seconds: float) -> None:
    """--max-num-batched-tokens."""
    heading = "--max-num-batched-tokens"
    seats = found.max_num_seqs
    prompt = percentile([min(row.prompt_tokens, found.max_model_len) for row in rows], 0.95)
    stall = max(assumed.block_size, int(assumed.stall_seconds / token_seconds))
    chunk = min(prompt, stall)
    found.say(
        heading, f"a decode token for each of {seats:,} requests, and a prompt beside them: p95 {prompt:,} tokens"
    )
    found.say(
        heading,
        f"prompt tokens that hold up the others for {assumed.stall_seconds:g} s at most: {assumed.stall_seconds:g} s / "
        f"{seconds(token_seconds)} = {stall:,}",
    )
    found.max_num_batched_tokens = round_up(seats + max(chunk, assumed.block_size), assumed.block_size)
    found.say(
        heading,
        f"{seats:,} + the smaller, {chunk:,}, rounded up to {assumed.block_size}: {found.max_num_batched_tokens:,}",
    )


def _memory_used(
    found: Derivation, rows: Sequence[TraceRow], model: ModelFacts, device: Device, assumed: Assumed
) -> None:
    heading = "Memory at that concurrency"
    lengths = [min(row.prompt_tokens + row.output_tokens, found.max_model_len) for row in rows]
    each = round_up(percentile(lengths, 0.95), assumed.block_size)
    # The longest request must fit whatever the others do; one more block is the null block.
    tokens = max(found.max_num_seqs * each, round_up(found.max_model_len, assumed.block_size)) + assumed.block_size
    found.kv_cache_bytes = tokens * model.kv_bytes_per_token
    total = model.weight_bytes + assumed.workspace_bytes + found.kv_cache_bytes
    budget = int(device.memory_bytes * found.utilization)
    found.say(
        heading,
        f"KV cache: {found.max_num_seqs:,} requests x {each:,} tokens (p95), or the longest, and the null block: "
        f"{tokens:,} tokens x {model.kv_bytes_per_token:,} bytes = {gib(found.kv_cache_bytes)}",
    )
    found.say(
        heading,
        f"{gib(model.weight_bytes)} weights + {gib(assumed.workspace_bytes)} workspace + {gib(found.kv_cache_bytes)} KV = "
        f"{gib(total)} of {gib(budget)}",
    )
