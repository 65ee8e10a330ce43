"""From the engine's updates to what a caller reads: text, stop strings, logprobs, choices put together.

One `RequestState` per caller's request, one `_Choice` per engine request under it.
Used by the async client and by the offline LLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..contracts.plan import PositionLogprobs
from ..contracts.scheduler import RequestUpdate
from ..outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from ..text.detokenizer import IncrementalDetokenizer, TextStream
from ..text.tokenizer import Tokenizer
from .wire import EngineRequest


class _Choice:
    """One sequence. Owned by its RequestState."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request_id = request.request_id
        self.finished = False
        self.gathered: CompletionOutput | None = None  # all of it so far, where it is put together here
        sampling = request.sampling
        self.is_simple = sampling.logprobs is None and not sampling.stop  # more tokens are more text, and nothing else
        self._text: TextStream | None = None
        self._pieces: IncrementalDetokenizer | None = None
        self._wants_logprobs = sampling.logprobs is not None
        if tokenizer is not None and sampling.detokenize:
            self._text = TextStream(
                tokenizer,
                stops=sampling.stop,
                include_stop_str=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            )
        if tokenizer is not None and self._wants_logprobs:
            self._pieces = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)

    def gather(self, gathered: CompletionOutput, token_ids: list[int]) -> None:
        """Adds tokens that do not end it; for a simple one."""
        if self._text is not None:
            gathered.text += self._text.push(token_ids).text
        gathered.token_ids += token_ids

    def apply(self, update: RequestUpdate) -> CompletionOutput:
        """The delta that the update means. Tokens after a stop string are dropped: neither returned nor counted."""
        token_ids = update.new_token_ids
        finish_reason, stop_reason = update.finish_reason, update.stop_reason
        stopped_by_token = finish_reason == "stop"
        text = ""
        if self._text is not None:
            result = self._text.push(
                token_ids, finished=finish_reason is not None, ends_with_stop_token=stopped_by_token
            )
            text = result.text
            if result.stop is not None:
                token_ids = token_ids[: result.num_tokens]
                finish_reason, stop_reason = "stop", None
                return self._output(update, token_ids, text, finish_reason, result.stop)
        return self._output(update, token_ids, text, finish_reason, stop_reason)

    def _output(
        self,
        update: RequestUpdate,
        token_ids: list[int],
        text: str,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        self.finished = finish_reason is not None
        logprobs: list[TokenLogprobs] | None = None
        cumulative: float | None = None
        if self._wants_logprobs:
            positions = (update.logprobs or [])[: len(token_ids)]
            logprobs = [describe_position(position, self._pieces) for position in positions]
            cumulative = sum(position.logprobs[0] for position in positions)
        return CompletionOutput(self.index, text, token_ids, logprobs, cumulative, finish_reason, stop_reason)


@dataclass(slots=True)
class RequestState:
    """A caller's request in flight. to_abort: engine requests whose stop string was found here and that must be told so.
    total: what `OutputProcessor.gather` has put together.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: dict[int, _Choice]
    prompt_tokenizer: Tokenizer | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    to_abort: list[int] = field(default_factory=list)
    total: RequestOutput = field(init=False)

    def __post_init__(self) -> None:
        self.total = RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, [])

    @property
    def finished(self) -> bool:
        # Asked for every token: a plain loop is several times a generator's speed.
        for choice in self.choices.values():  # noqa: SIM110
            if not choice.finished:
                return False
        return True

    def apply(self, update: RequestUpdate) -> RequestOutput | None:
        """The delta for the caller; None when the update concerns a choice that has ended here already."""
        choice = self.choices[update.request_id]
        if choice.finished:
            return None
        delta = choice.apply(update)
        if choice.finished and update.finish_reason is None:
            self.to_abort.append(update.request_id)
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [delta],
            num_cached_tokens=self.num_cached_tokens,
            finished=self.finished,
            error=update.error,
            error_status=update.error_status,
            error_code=update.error_code,
            error_param=update.error_param,
        )
        if update.queue_seconds is not None:
            output.queue_seconds.append(update.queue_seconds)
        if update.prefill_seconds is not None:
            output.prefill_seconds.append(update.prefill_seconds)
        if update.prompt_logprobs is not None:  # choice 0's: the others do not compute them
            output.prompt_logprobs = self._describe_prompt(update.prompt_logprobs)
        return output

    def _describe_prompt(self, positions: list[PositionLogprobs]) -> list[TokenLogprobs | None]:
        """Entries for positions 1.. of the prompt, and None for the first token, which nothing precedes."""
        pieces = None
        if self.prompt_tokenizer is not None:
            pieces = IncrementalDetokenizer(self.prompt_tokenizer, skip_special_tokens=False, continuation=False)
            pieces.feed_piece(self.prompt_token_ids[0])
        return [None, *(describe_position(position, pieces) for position in positions)]


def describe_position(position: PositionLogprobs, pieces: IncrementalDetokenizer | None) -> TokenLogprobs:
    """Chosen token first. Alternatives are decoded as if they had come instead of it (bugbank A01)."""
    entries: TokenLogprobs = {}
    chosen = position.token_ids[0]
    alternatives = {}
    if pieces is not None:
        alternatives = {i: pieces.peek_piece(i) for i in position.token_ids[1:]}
        alternatives[chosen] = pieces.feed_piece(chosen)
    for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True):
        if token_id in entries:
            continue
        piece = alternatives.get(token_id)
        entries[token_id] = Logprob(logprob, rank, piece.text if piece else "", piece.bytes if piece else b"")
    return entries


class OutputProcessor:
    """Routes updates to the requests that they belong to. Not thread-safe: one owner, one thread or event loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[int, RequestState] = {}  # by engine request id

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request_id: str, prompt: str | None, requests: list[EngineRequest]) -> RequestState:
        """Registers a caller's request before its engine requests are sent."""
        choices = {r.request_id: _Choice(i, r, self._tokenizer) for i, r in enumerate(requests)}
        state = RequestState(request_id, prompt, requests[0].prompt_token_ids, choices, self._tokenizer)
        for engine_id in choices:
            self._states[engine_id] = state
        return state

    def apply(self, update: RequestUpdate) -> tuple[RequestState, RequestOutput] | None:
        """None for a request that is unknown here (aborted) or has nothing to say."""
        state = self._states.get(update.request_id)
        if state is None:
            return None
        output = state.apply(update)
        if state.choices[update.request_id].finished:
            del self._states[update.request_id]
        return None if output is None else (state, output)

    def gather(self, update: RequestUpdate) -> RequestState | None:
        """As `apply`, for a caller that wants no deltas: they are merged into the state's `total`. Nearly every update of a
        long answer is one more token and no more, so that this is added without making a delta of it.
        """
        state = self._states.get(update.request_id)
        if state is None:
            return None
        choice = state.choices[update.request_id]
        gathered = choice.gathered
        if gathered is not None and choice.is_simple and _is_only_tokens(update, state):
            choice.gather(gathered, update.new_token_ids)
            return state
        routed = self.apply(update)
        if routed is None:
            return None
        merge_delta(state.total, routed[1])
        choice.gathered = next(output for output in state.total.outputs if output.index == choice.index)
        return state

    def give_up(self, request_id: int) -> tuple[RequestState, RequestOutput] | None:
        """After `apply` raised: ends the caller's whole request with an error; what still runs of it is in `to_abort`."""
        state = self._states.get(request_id)
        if state is None:
            return None
        state.to_abort.extend(self.forget(state))
        for choice in state.choices.values():
            choice.finished = True
        output = RequestOutput(state.request_id, state.prompt, state.prompt_token_ids, [], finished=True)
        output.error = "the answer could not be put together; the server's log says why"
        return state, output

    def forget(self, state: RequestState) -> list[int]:
        """Drops a request; the engine ids that are still running, to be aborted."""
        running = [i for i in state.choices if self._states.pop(i, None) is not None]
        return running

    def states(self) -> list[RequestState]:
        """Every caller's request that is not finished, once each."""
        return list({id(state): state for state in self._states.values()}.values())


def _is_only_tokens(update: RequestUpdate, state: RequestState) -> bool:
    return (
        update.finish_reason is None
        and update.queue_seconds is None  # nor prefill_seconds: they come together
        and update.prompt_logprobs is None
        and update.error is None
        and update.num_cached_tokens <= state.num_cached_tokens
    )


def merge_delta(total: RequestOutput, delta: RequestOutput) -> None:
    """Adds a delta to what was collected before, in place. Containers of `delta` are not kept."""
    for new in delta.outputs:
        for old in total.outputs:
            if old.index == new.index:
                break
        else:
            total.outputs.append(_copy(new))
            continue
        old.text += new.text
        old.token_ids.extend(new.token_ids)
        if new.logprobs is not None:
            old.logprobs = (old.logprobs or []) + new.logprobs
            old.cumulative_logprob = (old.cumulative_logprob or 0.0) + (new.cumulative_logprob or 0.0)
        if new.finish_reason is not None:
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    if delta.prompt_logprobs is not None:
        total.prompt_logprobs = delta.prompt_logprobs
    total.num_cached_tokens = delta.num_cached_tokens
    total.finished = delta.finished
    total.queue_seconds += delta.queue_seconds
    total.prefill_seconds += delta.prefill_seconds
    if delta.error is not None:
        total.error, total.error_status = delta.error, delta.error_status
        total.error_code, total.error_param = delta.error_code, delta.error_param


def _copy(output: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        output.index,
        output.text,
        list(output.token_ids),
        None if output.logprobs is None else list(output.logprobs),
        output.cumulative_logprob,
        output.finish_reason,
        output.stop_reason,
    )
