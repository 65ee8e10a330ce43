"""Reads one JSON value piece by piece: finds its end, or the first character that cannot belong to it. Evaluates nothing."""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH: Final = 128
MAX_LITERAL: Final = 256  # characters of a number

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*")
_LITERAL: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_HEX: Final = frozenset("0123456789abcdefABCDEF")

# What may come next.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _STRING, _ESCAPE, _UNICODE, _WORD_GOES_ON = range(10)


def skip_space(text: str, start: int) -> int:
    """The index of the first character from `start` on that is not JSON's white space."""
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


class JsonValue:
    """One value. `done` once it is complete, `broken` once it cannot be JSON. Linear in what it is fed.

    A number has no end of its own: it is done when something follows it, and that is not consumed.
    """

    __slots__ = ("_expects", "_hex_left", "_is_key", "_stack", "_word", "broken", "done")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._expects = _VALUE
        self._stack: list[str] = []  # the brackets that are open
        self._is_key = False  # whether the string being read is a key
        self._word = ""  # the number or name being read
        self._hex_left = 0

    def feed(self, text: str, start: int) -> int:
        """Reads from `start`; the index after what belongs to the value. The value is done, broken, or `text` used up."""
        position, size = start, len(text)
        while position < size and not self.done and not self.broken:
            if self._expects == _STRING:
                position = self._in_string(text, position)
            elif self._expects >= _ESCAPE:
                position = self._in_token(text, position)
            else:
                position = skip_space(text, position)
                if position < size:
                    position = self._between(text, position)
        return position

    def _in_string(self, text: str, position: int) -> int:
        match = _PLAIN.match(text, position)
        position = position if match is None else match.end()
        if position == len(text):
            return position
        if text[position] == '"':
            if self._is_key:
                self._is_key, self._expects = False, _COLON
            else:
                self._value_ends()
        elif text[position] == "\\":
            self._expects = _ESCAPE
        else:  # a control character
            self.broken = True
            return position
        return position + 1

    def _in_token(self, text: str, position: int) -> int:
        """In the middle of an escape, a number or a name."""
        char = text[position]
        if self._expects == _WORD_GOES_ON:
            match = _WORD.match(text, position, position + MAX_LITERAL + 1 - len(self._word))
            end = position if match is None else match.end()
            self._word += text[position:end]
            if len(self._word) > MAX_LITERAL:
                self.broken = True
            elif end < len(text):
                if _LITERAL.fullmatch(self._word) is None:
                    self.broken = True
                else:
                    self._value_ends()
            return end
        if self._expects == _ESCAPE:
            if char == "u":
                self._expects, self._hex_left = _UNICODE, 4
            else:
                self._expects = _STRING
                self.broken = char not in '"\\/bfnrt'
        else:
            self.broken = char not in _HEX
            self._hex_left -= 1
            if self._hex_left == 0:
                self._expects = _STRING
        return position if self.broken else position + 1

    def _between(self, text: str, position: int) -> int:
        """At the first character of a value or a key, or at a colon, a comma or a closing bracket."""
        char, expects = text[position], self._expects
        if char == '"' and expects in (_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY):
            self._is_key = expects in (_FIRST_KEY, _KEY)
            self._expects = _STRING
        elif (char == "]" and expects == _FIRST_ITEM) or (char == "}" and expects == _FIRST_KEY):
            self._stack.pop()
            self._value_ends()
        elif char in "{[" and expects in (_VALUE, _FIRST_ITEM):
            if len(self._stack) == MAX_DEPTH:
                self.broken = True
                return position
            self._stack.append(char)
            self._expects = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char == ":" and expects == _COLON:
            self._expects = _VALUE
        elif expects == _NEXT and char == ",":
            self._expects = _KEY if self._stack[-1] == "{" else _VALUE
        elif expects == _NEXT and char == ("}" if self._stack[-1] == "{" else "]"):
            self._stack.pop()
            self._value_ends()
        elif expects in (_VALUE, _FIRST_ITEM) and (char in "-tfn" or "0" <= char <= "9"):
            self._expects, self._word = _WORD_GOES_ON, ""
            return position  # nothing consumed: the word's reader begins here
        else:
            self.broken = True
            return position
        return position + 1

    def _value_ends(self) -> None:
        if self._stack:
            self._expects = _NEXT
        else:
            self.done = True
