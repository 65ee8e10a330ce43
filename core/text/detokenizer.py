"""Token ids to text, as they arrive: the incremental detokenizer, the stop checker, and the stream that joins the two.

All three are per request, single-threaded, and O(1) amortised a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token inside a text, for logprobs.

    text: the characters that it completes, after the bytes that came before it; empty while a character is incomplete,
        so the texts of consecutive tokens concatenate to the text, without U+FFFD for a character that completes later.
    bytes: exactly what the token adds; consecutive ones concatenate to the exact UTF-8.
    """

    text: str
    bytes: bytes


class IncrementalDetokenizer:
    """Text deltas of one sequence. The joined deltas, with `finish()`, equal `Tokenizer.decode` of all ids.

    Bytes go through an incremental UTF-8 decoder: a delta never holds U+FFFD for a character that completes later, at
    most the last three bytes wait, and no byte sequence raises.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        continuation: bool = True,
    ) -> None:
        """continuation: the ids go on after a prompt, so a first word keeps its space.

        spaces_between_special_tokens: False drops the space that some decoders (those that join words by spaces) put
        before a special token that follows another one. Only seen when special tokens are shown.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._close_up = not spaces_between_special_tokens and not skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._fresh = not continuation  # the next shown token is the first of a text
        self._after_special = False

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        tokenizer = self._tokenizer
        special = self._close_up and token_id in tokenizer.special_ids
        if self._fresh or (special and self._after_special):
            return tokenizer.leading_bytes(token_id)
        return tokenizer.token_bytes(token_id)

    def _take(self, token_id: int) -> bytes:
        data = self._bytes_of(token_id)
        if token_id not in self._hidden:
            self._fresh = False
            self._after_special = self._close_up and token_id in self._tokenizer.special_ids
        return data

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete."""
        return self._decoder.decode(b"".join([self._take(i) for i in token_ids]))

    def feed_each(self, token_ids: Sequence[int]) -> list[str]:
        """The same, one delta a token."""
        decode = self._decoder.decode
        return [decode(self._take(i)) for i in token_ids]

    def feed_piece(self, token_id: int) -> TokenPiece:
        """Takes one token and describes it."""
        data = self._take(token_id)
        return TokenPiece(self._decoder.decode(data), data)

    def peek_piece(self, token_id: int) -> TokenPiece:
        """Describes the token as if it came next, changing nothing: for the alternatives to a sampled token."""
        data = self._bytes_of(token_id)
        state = self._decoder.getstate()
        text = self._decoder.decode(data)
        self._decoder.setstate(state)
        return TokenPiece(text, data)

    def finish(self) -> str:
        """The end of the sequence: U+FFFD when it ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class StopResult:
    """What a run of tokens came to.

    text: what may be sent now. stop: the stop string that was met, or None. num_tokens: how many tokens of the run are
    delivered: all, or those up to and with the one in which the stop string ended.
    """

    text: str
    stop: str | None
    num_tokens: int


class StopChecker:
    """Finds stop strings in a stream of text deltas.

    The stop string that ends first wins, of two that end together the longer one: so the outcome does not depend on how
    the stream was cut into runs. Text that may be the beginning of a stop string is held back until it is decided. Each
    stop string is followed by a Knuth-Morris-Pratt automaton: time is linear in text and stop strings, always.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str: bool = False, min_tokens: int = 0) -> None:
        """min_tokens: a stop string that ends within the first so many tokens is ordinary text."""
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop: how many of its characters the text ends with
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop_str
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, deltas: Sequence[str]) -> StopResult:
        """Takes a run of new tokens, one delta each (possibly empty). After a stop, call nothing more."""
        out: list[str] = []
        for index, delta in enumerate(deltas):
            self._num_tokens += 1
            if not self._held and self._firsts.isdisjoint(delta):
                out.append(delta)
                continue
            end, stop = self._scan(delta)
            buffer = self._held + delta
            if stop is not None:
                cut = len(self._held) + end - (0 if self._include else len(stop))
                self._held = ""
                return StopResult("".join(out) + buffer[:cut], stop, index + 1)
            keep = max(self._matched)
            out.append(buffer[: len(buffer) - keep])
            self._held = buffer[len(buffer) - keep :]
        return StopResult("".join(out), None, len(deltas))

    def _scan(self, delta: str) -> tuple[int, str | None]:
        """Advances every automaton over `delta`; the first end of a stop string and which, if it counts."""
        counts = self._num_tokens > self._min_tokens
        matched = self._matched
        for position, char in enumerate(delta):
            for n, stop in enumerate(self._stops):
                length = matched[n]
                failure = self._failures[n]
                while length and stop[length] != char:
                    length = failure[length - 1]
                if stop[length] == char:
                    length += 1
                matched[n] = length
                if length == len(stop):
                    if counts:
                        return position + 1, stop
                    matched[n] = failure[length - 1]
        return 0, None

    def flush(self) -> str:
        """The end of the stream without a stop: what was held back."""
        held, self._held = self._held, ""
        return held


def _failure_table(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table


class TextStream:
    """The text of one sequence: detokenizer and stop checker together, with the rules for its end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._checker = StopChecker(stops, include_stop_str=include_stop_str, min_tokens=min_tokens) if stops else None
        self._include = include_stop_str

    def push(
        self, token_ids: Sequence[int], *, finished: bool = False, ends_with_stop_token: bool = False
    ) -> StopResult:
        """Takes a run of new tokens.

        finished: they are the last; what is held back is released. ends_with_stop_token: the last of them ended the
        sequence (EOS or one of stop_token_ids); its text is shown only with include_stop_str.
        The count of delivered tokens includes that token in either case.
        """
        shown = token_ids[:-1] if ends_with_stop_token and not self._include else token_ids
        if self._checker is None:
            text = self._detokenizer.feed(shown)
            if finished:
                text += self._detokenizer.finish()
            return StopResult(text, None, len(token_ids))
        deltas = self._detokenizer.feed_each(shown)
        if finished:
            tail = self._detokenizer.finish()
            if tail and deltas:
                deltas[-1] += tail
            result = self._checker.push(deltas)
            if result.stop is not None:
                return result
            rest = self._checker.flush() + ("" if deltas else tail)
            return StopResult(result.text + rest, None, len(token_ids))
        result = self._checker.push(deltas)
        return result if result.stop is not None else StopResult(result.text, None, len(token_ids))
