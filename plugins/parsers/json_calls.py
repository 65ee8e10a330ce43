"""Calls written as a JSON object with a name and arguments, between marks or bare: what the formats here share.

Every decision depends on the characters alone, never on where the text was cut. Nothing is looked at twice but a mark's
beginning, so the work is linear in the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hotswap.core.contracts.tool_parser import ToolCallDelta, ToolCallStream, ToolParser, ToolParserOutput

from .json_value import JsonValue, skip_space

MAX_KEY_CHARS: Final = 512  # of a name or a key, as it is written
_HARMLESS: Final = frozenset(["type", "id"])  # keys that models add to a call


@dataclass(frozen=True, slots=True)
class CallFormat:
    """opening: the mark before a call. closing: the mark after it; empty when the object's brace ends it.

    bare: whether a call may also begin without a mark, at the start of the text or after another call.
    separator: what may stand between two calls beside white space.
    arguments_keys: the keys under which the arguments may be.
    any_key: whether the object may have keys of no meaning here; otherwise such an object is no call.
    """

    opening: str
    closing: str
    bare: bool
    separator: str
    arguments_keys: frozenset[str]
    any_key: bool


class JsonCallParser(ToolParser):
    """Immutable: a format."""

    def __init__(self, call_format: CallFormat) -> None:
        self._format = call_format

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        return _JsonCallStream(self._format, tool_names)


_Reader = Callable[[str, int, ToolParserOutput], int]


class _Call:
    """One call's object. `started` once the call was given out: from then on its arguments are passed on as they come.

    Before that, everything is remembered in `held`, to be given as content if it is no call after all.
    """

    def __init__(self, call_format: CallFormat, tool_names: frozenset[str], index: int, mark: str) -> None:
        self._format = call_format
        self._tool_names = tool_names
        self._index = index
        self.held = [mark]
        self.started = False
        self.done = False
        self.broken = False
        self._read: _Reader = self._open
        self._key = ""
        self._token: list[str] = []  # a key or a name, as it is written
        self._token_chars = 0
        self._value: JsonValue | None = None
        self._name: str | None = None
        self._arguments: list[str] | None = None  # complete ones that came before the name

    def feed(self, text: str, start: int, output: ToolParserOutput) -> int:
        """Reads from `start`; the index of the first character that is not the object's."""
        position = start
        while position < len(text) and not self.done and not self.broken:
            if self._value is not None:
                position = self._go_on(self._value, text, position, output)
                continue
            position = skip_space(text, position)
            if position < len(text):
                position = self._read(text, position, output)
        if not self.started:
            self.held.append(text[start:position])
        return position

    # One of these is `_read`: it looks at the first character of something, and says where to go on.

    def _open(self, text: str, position: int, output: ToolParserOutput) -> int:
        return self._expect(text, position, "{", self._first_key)

    def _first_key(self, text: str, position: int, output: ToolParserOutput) -> int:
        if text[position] == "}":
            return self._end(position, output)
        return self._key_begins(text, position, output)

    def _key_begins(self, text: str, position: int, output: ToolParserOutput) -> int:
        if text[position] != '"':
            self.broken = True
            return position
        self._key = ""
        return self._value_begins(position)

    def _colon(self, text: str, position: int, output: ToolParserOutput) -> int:
        return self._expect(text, position, ":", self._member_begins)

    def _member_begins(self, text: str, position: int, output: ToolParserOutput) -> int:
        wanted = {"name": '"', "arguments": "{"}.get(self._key)
        if wanted is not None and text[position] != wanted:
            self.broken = True
            return position
        if self._key == "arguments" and self._name is not None:
            self._start(output)
        return self._value_begins(position)

    def _member_ends(self, text: str, position: int, output: ToolParserOutput) -> int:
        if text[position] == "}":
            return self._end(position, output)
        return self._expect(text, position, ",", self._key_begins)

    def _expect(self, text: str, position: int, char: str, then: _Reader) -> int:
        if text[position] != char:
            self.broken = True
            return position
        self._read = then
        return position + 1

    def _end(self, position: int, output: ToolParserOutput) -> int:
        """At the object's closing brace. A call without arguments has none."""
        if not self.started and self._name is not None:
            self._start(output)
            output.calls[-1].arguments += "{}"
        self.done, self.broken = self.started, not self.started
        return position if self.broken else position + 1

    # Keys and values.

    def _value_begins(self, position: int) -> int:
        self._value, self._token, self._token_chars = JsonValue(), [], 0
        return position

    def _go_on(self, value: JsonValue, text: str, position: int, output: ToolParserOutput) -> int:
        if self._key in ("", "name"):  # bounded: it is kept, and its end decides
            left = MAX_KEY_CHARS + 1 - self._token_chars
            end = position + value.feed(text[position : position + left], 0)
            self._token_chars += end - position
            self.broken = self._token_chars > MAX_KEY_CHARS
        else:
            end = value.feed(text, position)
        piece = text[position:end]
        if self._key == "arguments" and self.started:
            self._pass_on(piece, output)
        elif self._key != "other":
            self._token.append(piece)
        self.broken = self.broken or value.broken
        if value.done and not self.broken:
            self._value = None
            self._value_ends(output)
        return end

    def _value_ends(self, output: ToolParserOutput) -> None:
        self._read = self._member_ends
        if self._key == "":
            self._read = self._colon
            self._key_ends(json.loads("".join(self._token)))
        elif self._key == "name":
            self._name = json.loads("".join(self._token))
            self.broken = self._name not in self._tool_names
            if not self.broken and self._arguments is not None:
                self._start(output)
                self._pass_on("".join(self._arguments), output)
        elif self._key == "arguments" and not self.started:
            self._arguments = self._token

    def _key_ends(self, key: str) -> None:
        """Only a known key has a meaning, and only once; after the call was given out, the rest has none."""
        if self.started:
            self._key = "other"
        elif key == "name":
            self._key, self.broken = "name", self._name is not None
        elif key in self._format.arguments_keys:
            self._key, self.broken = "arguments", self._arguments is not None
        else:
            self._key, self.broken = "other", not (self._format.any_key or key in _HARMLESS)

    def _start(self, output: ToolParserOutput) -> None:
        self.started = True
        self.held.clear()
        output.calls.append(ToolCallDelta(self._index, self._name))

    def _pass_on(self, piece: str, output: ToolParserOutput) -> None:
        if not piece:
            return
        if output.calls and output.calls[-1].index == self._index:
            output.calls[-1].arguments += piece
        else:
            output.calls.append(ToolCallDelta(self._index, None, piece))


_GAP, _TEXT, _CALL, _CLOSE = range(4)


class _JsonCallStream(ToolCallStream):
    """Where it is: in a gap (at the start, or after a call: only white space so far), in text for the user, in a call,
    or after a call's object, where the closing mark is due."""

    def __init__(self, call_format: CallFormat, tool_names: frozenset[str]) -> None:
        self._format = call_format
        self._tool_names = tool_names
        self._mode = _GAP
        self._pending = ""  # what may be the beginning of a mark; shorter than one
        self._gap: list[str] = []  # white space, given to the user only if text follows
        self._call: _Call | None = None
        self._num_calls = 0
        self._content: list[str] = []  # of the output being made
        self._steps = {_GAP: self._in_gap, _TEXT: self._in_text, _CALL: self._in_call, _CLOSE: self._at_close}

    def feed(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        text, self._pending = self._pending + text, ""
        position = 0
        while position < len(text):
            position = self._steps[self._mode](text, position, output)
        return self._completed(output)

    def finish(self) -> ToolParserOutput:
        if self._call is not None:
            self._content += self._call.held
        elif self._mode == _GAP and (self._pending or not self._num_calls):
            self._content += [*self._gap, self._pending]
        elif self._mode == _TEXT:
            self._content.append(self._pending)
        return self._completed(ToolParserOutput())

    def _completed(self, output: ToolParserOutput) -> ToolParserOutput:
        output.content = "".join(self._content)
        self._content = []
        return output

    def _in_gap(self, text: str, position: int, output: ToolParserOutput) -> int:
        start = skip_space(text, position)
        self._gap.append(text[position:start])
        if start == len(text):
            return start
        opening = self._format.opening
        if self._num_calls and text[start] == self._format.separator:
            self._gap.append(text[start])
            return start + 1
        if text.startswith(opening, start):
            return self._begin_call(opening, text, start + len(opening))
        if opening.startswith(text[start : start + len(opening)]):
            self._pending = text[start:]
            return len(text)
        if self._format.bare and text[start] == "{":
            return self._begin_call("", text, start)
        self._content += self._gap
        self._gap = []
        self._mode = _TEXT
        return start

    def _in_text(self, text: str, position: int, output: ToolParserOutput) -> int:
        opening = self._format.opening
        found = text.find(opening, position)
        if found >= 0:
            self._content.append(text[position:found])
            return self._begin_call(opening, text, found + len(opening))
        held = _beginning_at_end(text, position, opening)
        self._content.append(text[position : len(text) - held])
        self._pending = text[len(text) - held :]
        return len(text)

    def _begin_call(self, mark: str, text: str, position: int) -> int:
        start = skip_space(text, position)
        if start < len(text) and text[start] != "{":  # what `_Call` would find, at a fraction of the cost
            self._content += [*self._gap, mark]
            self._gap = []
            self._mode = _TEXT
            return position
        self._call = _Call(self._format, self._tool_names, self._num_calls, "".join([*self._gap, mark]))
        self._gap = []
        self._mode = _CALL
        return position

    def _in_call(self, text: str, position: int, output: ToolParserOutput) -> int:
        call = self._call
        if call is None:
            raise RuntimeError("in a call without one")
        end = call.feed(text, position, output)
        if call.done or call.broken:
            self._content += call.held
            self._num_calls += call.started
            self._call = None
            self._mode = _TEXT if call.broken else _CLOSE if self._format.closing else _GAP
        return end

    def _at_close(self, text: str, position: int, output: ToolParserOutput) -> int:
        start = skip_space(text, position)
        self._gap.append(text[position:start])
        closing = self._format.closing
        if text.startswith(closing, start):
            self._gap = []
            self._mode = _GAP
            return start + len(closing)
        if closing.startswith(text[start : start + len(closing)]):
            self._pending = text[start:]
            return len(text)
        self._mode = _GAP
        return start


def _beginning_at_end(text: str, start: int, mark: str) -> int:
    """How many characters at the end of `text[start:]` may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
