"""What sampling needs to know about requests: `SamplingRow`, one a request, worked out at admission, and
`SamplingBatch`, the rows of one step grouped by what they ask for. A batch is kept while the same requests sample step
after step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers.sampling.draw import ALWAYS, OFF
from ..sampling_params import SamplingParams
from .transfer import Transfers

BIAS_BAN, BIAS_FORCE = -100.0, 100.0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request's sampling, resolved against the model.

    greedy: take the best token; temperature 0 and top_k 1 are the same thing. top_k: the width of the logits when off.
    until: (token id, n): the token cannot be drawn while the request has fewer than n output tokens.
    words: bad words of two and more tokens. forced: ids with a bias of 100. allowed: bool [V] or None.
    penalty_row: the request's row in the PenaltyPool, or None. processed: whether a logits processor serves it.
    """

    greedy: bool
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    until: tuple[tuple[int, int], ...]
    words: tuple[tuple[int, ...], ...]
    bias: tuple[tuple[int, float], ...]
    forced: tuple[int, ...]
    allowed: Tensor | None
    penalty_row: int | None
    logprobs: int | None
    processed: bool = False

    @property
    def edited(self) -> bool:
        """Whether the logits change before temperature and filters."""
        return bool(
            self.until
            or self.words
            or self.bias
            or self.forced
            or self.allowed is not None
            or self.penalty_row is not None
            or self.processed
        )

    @property
    def ordered(self) -> bool:
        """Whether the draw needs tokens in order of probability."""
        return self.top_p < 1.0 or self.top_k < ALWAYS


def resolve_row(
    params: SamplingParams,
    request_id: int,
    logits_width: int,
    transfers: Transfers,
    penalty_row: int | None,
    *,
    processed: bool = False,
) -> SamplingRow:
    """Works out a request's row. `ignore_eos` masks every end-of-sequence token, except one that is also a stop token
    id."""
    until: dict[int, int] = {}
    if params.min_tokens > 0:
        until.update(dict.fromkeys([*params.eos_token_ids, *params.stop_token_ids], params.min_tokens))
    if params.ignore_eos:
        until.update({i: ALWAYS for i in params.eos_token_ids if i not in params.stop_token_ids})
    until.update({word[0]: ALWAYS for word in params.bad_words_token_ids if len(word) == 1})
    until.update({i: ALWAYS for i, value in params.logit_bias.items() if value == BIAS_BAN})
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = transfers.to_device(_mask(params.allowed_token_ids, logits_width))
    return SamplingRow(
        greedy=params.is_greedy or params.top_k == 1,
        # The front end gives every request a seed; without one the request's number keeps results reproducible.
        seed=params.seed if params.seed is not None else request_id,
        temperature=params.temperature,
        top_k=params.top_k if 0 < params.top_k < logits_width else ALWAYS,
        top_p=params.top_p,
        min_p=params.min_p,
        until=tuple((i, n) for i, n in until.items() if i < logits_width),
        words=tuple(tuple(word) for word in params.bad_words_token_ids if len(word) > 1),
        bias=tuple((i, v) for i, v in params.logit_bias.items() if v not in (BIAS_BAN, 0.0)),
        forced=tuple(i for i, v in params.logit_bias.items() if v == BIAS_FORCE),
        allowed=allowed,
        penalty_row=penalty_row,
        logprobs=params.logprobs,
        processed=processed,
    )


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to the logits of E rows. Tensors named `*_at` are int64 indices into those E rows; None: nobody asked.

    rows: int64 [E], the places of the edited rows among the S sampling rows; places: the same on the host.
    """

    places: tuple[int, ...]
    rows: Tensor
    allowed: tuple[Tensor, Tensor] | None  # at [A], bool [A, V]
    until: tuple[Tensor, Tensor, Tensor] | None  # at, token ids, thresholds; all [U]
    words: (
        tuple[Tensor, Tensor, Tensor, Tensor] | None
    )  # at [W], last ids [W], prefixes [W, L] (-1 pads), prefix lengths [W]
    bias: tuple[Tensor, Tensor, Tensor] | None  # at, token ids, float32 values; all [B]
    forced: tuple[Tensor, Tensor] | None  # at, token ids; both [F]
    penalties: tuple[Tensor, Tensor] | None  # at [P], pool rows [P]


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows that draw in one way.

    edited: whether they draw from the edited logits. ordered: whether top_k or top_p apply.
    rows: int64 [D], places among the S sampling rows. source: int64 [D], places in the logits drawn from; None: all of
        them.
    """

    edited: bool
    ordered: bool
    rows: Tensor
    source: Tensor | None
    temperature: Tensor  # float32 [D]
    min_p: Tensor | None  # float32 [D]; None: off for all
    top_k: Tensor  # int64 [D]
    top_p: Tensor  # float64 [D]; OFF where off
    seeds: Tensor  # int64 [D]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The S sampling rows of a step."""

    edits: Edits | None
    groups: tuple[DrawGroup, ...]
    logprob_rows: tuple[int, ...]  # places of the rows that report log-probabilities
    num_logprobs: tuple[int, ...]  # alternatives each of them asked for


def _mask(token_ids: Sequence[int], logits_width: int) -> Tensor:
    """bool [V] on the host, True at the ids given."""
    mask = torch.zeros(logits_width, dtype=torch.bool)
    mask[torch.tensor(token_ids, dtype=torch.int64)] = True
    return mask


class _Host:
    """A host tensor that is to be on the device."""

    __slots__ = ("tensor",)

    def __init__(self, values: Sequence[Any], dtype: torch.dtype) -> None:
        self.tensor = torch.tensor(values, dtype=dtype)


def _upload(found: Any, transfers: Transfers) -> Any:
    """The same structure of tuples and data classes, with device tensors for each _Host; one copy takes all of them."""
    if transfers.device == "cpu":
        return _replaced(found, lambda host: host.tensor)
    hosts: list[_Host] = []
    _replaced(found, hosts.append)
    if not hosts:
        return found
    hosts.sort(key=lambda host: -host.tensor.element_size())  # the widest first: so each is aligned to its own dtype
    pieces = [host.tensor.reshape(-1).view(torch.uint8) for host in hosts]
    moved = torch.split(transfers.to_device(torch.cat(pieces)), [len(piece) for piece in pieces])
    on_device = {
        id(host): piece.view(host.tensor.dtype).view(host.tensor.shape)
        for host, piece in zip(hosts, moved, strict=True)
    }
    return _replaced(found, lambda host: on_device[id(host)])


def _replaced(found: Any, move: Callable[[_Host], Any]) -> Any:
    if isinstance(found, _Host):
        return move(found)
    if isinstance(found, tuple):
        return tuple(_replaced(item, move) for item in found)
    if is_dataclass(found) and not isinstance(found, type):
        return type(found)(**{field.name: _replaced(getattr(found, field.name), move) for field in fields(found)})
    return found


def _ints(values: Sequence[Any]) -> Any:
    return _Host(values, torch.int64)


def _floats(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Any:
    return _Host(values, dtype)


def _columns(found: Sequence[tuple[Any, ...]], *dtypes: torch.dtype) -> Any:
    """One tensor for each place of the tuples; None when there are none."""
    if not found:
        return None
    return tuple(_Host(column, dtype) for column, dtype in zip(zip(*found, strict=True), dtypes, strict=True))


def build_batch(
    rows: Sequence[SamplingRow], masks: Mapping[int, Tensor], logits_width: int, transfers: Transfers
) -> SamplingBatch:
    """rows: in sampling order. masks: place -> bool [V] on the device, of the tokens that a grammar allows there."""
    edited = [place for place, row in enumerate(rows) if row.edited or place in masks]
    at_of = {place: at for at, place in enumerate(edited)}
    grouped: dict[tuple[bool, bool], list[int]] = {}
    for place, row in enumerate(rows):
        if not row.greedy:
            grouped.setdefault((place in at_of, row.ordered), []).append(place)
    groups = []
    for (is_edited, ordered), places in grouped.items():
        source = [at_of[place] for place in places] if is_edited else places
        whole = len(source) == (len(edited) if is_edited else len(rows))
        groups.append(_draw_group([rows[p] for p in places], places, None if whole else source, is_edited, ordered))
    with_logprobs = [(place, row.logprobs) for place, row in enumerate(rows) if row.logprobs is not None]
    batch = SamplingBatch(
        edits=_edits([rows[p] for p in edited], edited, masks) if edited else None,
        groups=tuple(groups),
        logprob_rows=tuple(place for place, _ in with_logprobs),
        num_logprobs=tuple(count for _, count in with_logprobs),
    )
    uploaded: SamplingBatch = _upload(batch, transfers)
    return uploaded


def _draw_group(
    rows: list[SamplingRow], places: list[int], source: list[int] | None, edited: bool, ordered: bool
) -> DrawGroup:
    min_p = [row.min_p for row in rows]
    return DrawGroup(
        edited=edited,
        ordered=ordered,
        rows=_ints(places),
        source=None if source is None else _ints(source),
        temperature=_floats([row.temperature for row in rows]),
        min_p=_floats(min_p) if any(min_p) else None,
        top_k=_ints([row.top_k for row in rows]),
        top_p=_floats([row.top_p if row.top_p < 1.0 else OFF for row in rows], torch.float64),
        seeds=_ints([row.seed for row in rows]),
    )


def _edits(rows: list[SamplingRow], places: list[int], masks: Mapping[int, Tensor]) -> Edits:
    allowed: list[tuple[int, Tensor]] = []
    forced: list[tuple[int, int]] = []
    until: list[tuple[int, int, int]] = []
    bias: list[tuple[int, int, float]] = []
    words: list[tuple[int, tuple[int, ...]]] = []
    penalised: list[tuple[int, int]] = []
    for at, (place, row) in enumerate(zip(places, rows, strict=True)):
        both = [mask for mask in (row.allowed, masks.get(place)) if mask is not None]
        if both:
            allowed.append((at, both[0] if len(both) == 1 else both[0] & both[1]))
        forced.extend((at, token_id) for token_id in row.forced)
        until.extend((at, token_id, count) for token_id, count in row.until)
        bias.extend((at, token_id, value) for token_id, value in row.bias)
        words.extend((at, word) for word in row.words)
        if row.penalty_row is not None:
            penalised.append((at, row.penalty_row))
    return Edits(
        places=tuple(places),
        rows=_ints(places),
        allowed=_masks(allowed),
        until=_columns(until, torch.int64, torch.int64, torch.int64),
        words=_words(words),
        bias=_columns(bias, torch.int64, torch.int64, torch.float32),
        forced=_columns(forced, torch.int64, torch.int64),
        penalties=_columns(penalised, torch.int64, torch.int64),
    )


def _masks(found: list[tuple[int, Tensor]]) -> Any:
    if not found:
        return None
    return _ints([at for at, _ in found]), torch.stack([mask for _, mask in found])


def _words(words: list[tuple[int, tuple[int, ...]]]) -> Any:
    if not words:
        return None
    width = max(len(word) for _, word in words) - 1
    prefixes = [[-1] * (width - len(word) + 1) + list(word[:-1]) for _, word in words]
    return (
        _ints([at for at, _ in words]),
        _ints([word[-1] for _, word in words]),
        _ints(prefixes),
        _ints([len(word) - 1 for _, word in words]),
    )
