"""Conformance of kind `tool_parser`.

    class TestMyParser(ToolParserSuite):
        plugin = "hotswap_my_tool_parser"
        examples = (('<call get {"q": 1}>', "", [("get", {"q": 1})]),)

Without `examples` the suite does not know the format: it checks that a parser is safe, and tries it on common formats.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pytest
from hypothesis import strategies as st

from ...contracts.provider import Provider
from ...contracts.tool_parser import ToolCallStream, ToolParser, ToolParserOutput, ToolParserProvider
from .base import ConformanceSuite

Example = tuple[str, str, list[tuple[str, dict[str, Any]]]]

TOOL_NAMES: Final = ("get", "get_all")  # one is the beginning of the other
# How calls look in formats that are common; NAME and ARGUMENTS stand for what a call has.
COMMON_FORMATS: Final = (
    '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    '<tool_call>{"arguments": ARGUMENTS, "name": "NAME"}</tool_call>',
    '{"name": "NAME", "parameters": ARGUMENTS}',
    '<|python_tag|>{"type": "function", "name": "NAME", "parameters": ARGUMENTS}',
    '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    "<function=NAME>ARGUMENTS</function>",
    "CALL NAME ARGUMENTS\n",
)
ARGUMENTS: Final = ("{}", '{"q": "a } b { \\"x\\" </tool_call> é😀"}', '{"name": "get", "n": [1, {"m": null}]}')
PLAIN_TEXTS: Final = ("Hello, world.", "One line.\nAnother: 1 < 2, 3 > 2.\n", "é😀 \u2028 end", "")
HOSTILE: Final = (
    *("<", "</", "<tool", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function=", "CALL "),
    *("{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n", "\x00", "é😀", "\ud83d", "null", "-", "1e999", "NaN"),
    *('{"name": "get", ', '{"name": "get_all", "arguments": {', '"arguments"', '"name": 5', "get", "a"),
)
BAD_ARGUMENTS: Final = (
    "",
    "x",
    "{",
    "{'q': 1}",
    "[1]",
    "null",
    '"{}"',
    "[" * 5000,
    '{"q":' * 5000,
    '{"q": "\\ud83d"}',
    "9" * 5000,
)
ATTACK: Final = '__import__("hotswap.core.testing.suites.tool_parser", fromlist=["x"]).evaluated.append(1)'
MAX_SECONDS: Final = 1.0  # of processor time for a million characters
NUM_CHARS: Final = 1_000_000

evaluated: list[int] = []  # grows when a parser runs ATTACK


@dataclass(slots=True)
class Collected:
    """What a text came to. calls: name and arguments' text."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def put_together(outputs: Iterable[ToolParserOutput]) -> Collected:
    """Joins a stream's outputs, and checks their order."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for output in outputs:
        assert isinstance(output, ToolParserOutput), f"{output!r} is no ToolParserOutput"
        content.append(output.content)
        for delta in output.calls:
            if delta.index == len(names):
                assert delta.name is not None, f"call {delta.index} begins without its name"
                names.append(delta.name)
                arguments.append([])
            else:
                assert 0 <= delta.index < len(names), f"call {delta.index} comes after {len(names)} calls"
                assert delta.name is None, f"call {delta.index} is named a second time"
            arguments[delta.index].append(delta.arguments)
    joined = ["".join(pieces) for pieces in arguments]
    return Collected("".join(content), list(zip(names, joined, strict=True)))


def collect(stream: ToolCallStream, pieces: Iterable[str]) -> Collected:
    """Feeds a stream and finishes it."""
    outputs = [stream.feed(piece) for piece in pieces]
    return put_together([*outputs, stream.finish()])


def chunks(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` cut at the places (taken modulo its length)."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def common_calls() -> list[str]:
    """Well-formed answers in common formats: one call, and two with words before."""
    texts = []
    for pattern in COMMON_FORMATS:
        calls = [
            pattern.replace("NAME", name).replace("ARGUMENTS", arguments)
            for name, arguments in zip(itertools.cycle(TOOL_NAMES), ARGUMENTS, strict=False)
        ]
        texts += [*calls, f"Let me see.\n{calls[1]}\n{calls[2]}", f"{calls[0]}; {calls[1]}"]
    return texts


class ToolParserSuite(ConformanceSuite):
    """examples: answers in the parser's own format: (text, the content, the calls with their arguments as objects)."""

    kind = "tool_parser"
    examples: ClassVar[Sequence[Example]] = ()

    def names(self) -> frozenset[str]:
        return frozenset([*TOOL_NAMES, *(name for _, _, calls in self.examples for name, _ in calls)])

    def texts(self) -> list[str]:
        """Well-formed answers, the author's first."""
        return [*(text for text, _, _ in self.examples), *common_calls()]

    def patterns(self) -> list[str]:
        """Calls with NAME and ARGUMENTS to be filled in, the author's with NAME filled in already."""
        own = [
            text.replace(json.dumps(arguments), "ARGUMENTS")
            for text, _, calls in self.examples
            for _, arguments in calls
        ]
        return [*own, *COMMON_FORMATS, "NAME ARGUMENTS", "[NAME(q=ARGUMENTS)]"]

    def whole(self, parser: ToolParser, text: str) -> Collected:
        return collect(parser.stream(self.names()), [text])

    def test_examples_are_read_exactly(self, product: ToolParser) -> None:
        """Each example gives its content and its calls, whole, character by character, and through `parse`."""
        if not self.examples:
            pytest.skip("no examples: set `examples` to check the format")
        for text, content, calls in self.examples:
            for pieces in ([text], list(text)):
                found = collect(product.stream(self.names()), pieces)
                assert found.content == content, f"content of {text!r}"
                assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls, f"calls of {text!r}"

    def test_streamed_and_whole_are_equal(self, product: ToolParser) -> None:
        """However a text is cut, the joined pieces are the same."""
        for text in self.texts():
            expected = self.whole(product, text)
            assert collect(product.stream(self.names()), text) == expected, f"{text!r}, character by character"
            parsed = product.parse(text, self.names())
            assert parsed.content == expected.content, f"parse({text!r})"

        def check(texts: list[str], places: list[int]) -> None:
            text = "".join(texts)
            assert collect(product.stream(self.names()), cut(text, places)) == self.whole(product, text), f"{text!r}"

        pieces = st.one_of(st.sampled_from(self.texts()), st.sampled_from(HOSTILE))
        places = st.lists(st.integers(0, 10_000), max_size=12)
        self.for_all(150, check, texts=st.lists(pieces, max_size=5), places=places)

    def test_streams_share_nothing(self, product: ToolParser) -> None:
        """Two choices of one request, fed in turns, come out as each does alone."""
        texts = self.texts()
        for one, two in zip(texts, texts[1:] + texts[:1], strict=True):
            expected = [self.whole(product, text) for text in (one, two)]
            streams = [product.stream(self.names()) for _ in range(2)]
            outputs: list[list[ToolParserOutput]] = [[], []]
            for pair in itertools.zip_longest(one, two, fillvalue=""):
                for number, char in enumerate(pair):
                    outputs[number].append(streams[number].feed(char))
            for number, stream in enumerate(streams):
                outputs[number].append(stream.finish())
                assert put_together(outputs[number]) == expected[number], f"{(one, two)[number]!r}, among others"

    def test_nothing_that_a_model_writes_raises(self, product: ToolParser) -> None:
        """Names, brackets and marks in any order: outputs stay in order, and only tools of the request are called."""

        def check(texts: list[str]) -> None:
            found = self.whole(product, "".join(texts))
            assert {name for name, _ in found.calls} <= self.names()

        for text in HOSTILE:
            check([text])
            check([text * 2000])
        for pattern, arguments in itertools.product(self.patterns(), BAD_ARGUMENTS):
            check([pattern.replace("NAME", "get").replace("ARGUMENTS", arguments)])
        self.for_all(200, check, texts=st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=5)), max_size=15))

    def test_plain_text_is_content(self, product: ToolParser) -> None:
        """An answer without calls reaches the user as it was written."""
        for text in PLAIN_TEXTS:
            assert self.whole(product, text) == Collected(text), f"{text!r}"

    def test_arguments_join_to_an_object(self, product: ToolParser) -> None:
        """A complete call's arguments are one JSON object; a call without any has {}."""
        for text in self.texts():
            for name, arguments in self.whole(product, text).calls:
                assert isinstance(json.loads(arguments), dict), f"{name}: {arguments!r} in {text!r}"

    def test_other_tools_are_content(self, product: ToolParser) -> None:
        """A call of a tool that the request does not have is no call, even when its name begins like one."""
        others = frozenset(f"{name}_x" for name in self.names()) | frozenset(name[:-1] for name in self.names())
        for text in self.texts():
            found = collect(product.stream(others - self.names()), [text])
            assert found == Collected(text), f"{text!r}"

    def test_a_call_cut_short_is_not_lost(self, product: ToolParser) -> None:
        """Until a call's name is sent, what was written of it is given as content at the end."""
        for text in self.texts():
            for end in range(len(text)):
                found = self.whole(product, text[:end])
                assert found.calls or found.content == text[:end], f"{text[:end]!r}"

    def test_nothing_is_evaluated(self, product: ToolParser) -> None:
        """What a model writes is data: Python in the place of the arguments does not run."""
        evaluated.clear()
        for pattern, name, attack in itertools.product(
            self.patterns(), self.names(), (ATTACK, f"{ATTACK} or {{}}", f'{{"q": {ATTACK}}}')
        ):
            self.whole(product, pattern.replace("NAME", name).replace("ARGUMENTS", attack))
            assert not evaluated, f"{pattern!r} ran what the model wrote"

    def test_work_is_linear_in_the_text(self, product: ToolParser) -> None:
        """A million characters of marks and brackets take less than a second, at once or in pieces; so does a fifth as
        much of the beginnings of calls."""
        calls = [text[:length] for text in self.texts()[:2] for length in (len(text) // 2, len(text) - 1)]
        marks = ("[", "<tool", "<tool_call>", "{", " ")
        for fragment, total in [*((mark, NUM_CHARS) for mark in marks), *((call, NUM_CHARS // 5) for call in calls)]:
            text = fragment * (total // max(1, len(fragment)))
            for size in (len(text), 64):
                # The better of two: another process may have had the machine.
                seconds = self._seconds(product, text, size)
                if seconds >= MAX_SECONDS:
                    seconds = min(seconds, self._seconds(product, text, size))
                assert seconds < MAX_SECONDS, f"{seconds:.1f} s for {len(text)} characters of {fragment!r}"

    def _seconds(self, parser: ToolParser, text: str, size: int) -> float:
        """Processor time; stops soon after the limit."""
        stream = parser.stream(self.names())
        start = time.process_time()
        for piece in chunks(text, size):
            stream.feed(piece)
            if time.process_time() - start > MAX_SECONDS:
                break
        else:
            stream.finish()
        return time.process_time() - start

    def test_detect_reads_the_text_only(self, provider: Provider[Any]) -> None:
        """`detect` says yes or no for any text, the same each time, and no for a template without anything."""
        assert isinstance(provider, ToolParserProvider)
        for template in ("", "{{ messages }}", "<", "{% for", *HOSTILE):
            answer = provider.detect(template)
            assert isinstance(answer, bool) and provider.detect(template) is answer, f"detect({template!r})"
        assert not provider.detect("") and not provider.detect("{{ messages }}")
