"""The built-in tool parsers: exact JSON, any cut, linear; and how one is chosen for a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.config import EngineConfig
from hotswap.core.contracts.tool_parser import ToolCallDelta, ToolCallStream, ToolParser, ToolParserOutput
from hotswap.core.engine.assembly import make_manager
from hotswap.core.engine.tool_parsing import GuardedToolParser, choose_tool_parser
from hotswap.core.errors import PluginError, RequestError
from hotswap.core.testing.suites.tool_parser import Collected, collect, cut
from hotswap.core.testing.templates import tool_parser as my_tool_parser
from hotswap.plugins import BUILTIN_PLUGINS
from hotswap.plugins.parsers import hermes, llama3_json
from hotswap.plugins.parsers.json_calls import MAX_KEY_CHARS, JsonCallParser
from hotswap.plugins.parsers.json_value import MAX_DEPTH, MAX_LITERAL, JsonValue

NAMES = frozenset(["get", "get_all"])
HERMES = JsonCallParser(hermes.FORMAT)
LLAMA3 = JsonCallParser(llama3_json.FORMAT)
PARSERS = {"hermes": HERMES, "llama3_json": LLAMA3}
every_parser = pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)

# JSON values.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def end_of_value(pieces: Iterable[str]) -> int | None:
    """Where the value ends in the joined pieces; None when it does not, -1 when it is broken."""
    value, offset = JsonValue(), 0
    for piece in pieces:
        end = value.feed(piece, 0)
        if value.done or value.broken:
            return offset + end if value.done else -1
        assert end == len(piece)
        offset += end
    return None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(JSON, st.sampled_from([None, 1]), st.booleans(), st.lists(st.integers(0, 200), max_size=6))
def test_a_value_ends_where_json_says(value: Any, indent: int | None, ascii_only: bool, places: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for pieces in (cut(text + ",tail", places), text + ",tail"):
        assert end_of_value(pieces) == len(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet='{}[]",:0123456789-+.eE\\u trufalsn\n\x00', max_size=20), st.lists(st.integers(0, 20)))
def test_a_value_is_accepted_only_if_json_does(text: str, places: list[int]) -> None:
    text = text.lstrip(" \n")
    found = end_of_value(cut(text, places))
    assert found == end_of_value(text)
    try:
        _, expected = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert found in (None, -1)
    else:
        # "1" may go on and "1.5.2" is no number followed by something: only the end of the word decides.
        assert found == expected or re.match(r"[-+.0-9A-Za-z]*$", text[expected:]) or found == -1


def test_limits_do_not_depend_on_the_cut() -> None:
    for text, ends in (
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, True),
        ("[" * (MAX_DEPTH + 1), False),
        ("9" * MAX_LITERAL + ",", True),
        ("9" * (MAX_LITERAL + 1) + ",", False),
    ):
        for pieces in ([text], text, [text[:100], text[100:]]):
            assert end_of_value(pieces) == (len(text.rstrip(",")) if ends else -1)


# Parsers.

WRITTEN = st.sampled_from(
    [
        '<tool_call>\n{"name": "get", "arguments": {"q": "a } b { \\"x\\""}}\n</tool_call>',
        '<tool_call>{"arguments": {"a": [1, {}]}, "name": "get_all"}</tool_call>',
        '{"name": "get", "parameters": {"q": 1}}',
        '<|python_tag|>{"type": "function", "name": "get"}',
        '<tool_call>{"name": "' + "x" * MAX_KEY_CHARS + '<tool_call>"',
        '{"' + "k" * (MAX_KEY_CHARS + 40) + '": 1}',
        *('<tool_call>{"name": "get", "arguments": {"a": ', "1}}", "</tool_call>", "<tool_call>", "; ", "\n", " ", "x"),
        *("<|python_tag|>", '"', "{", "}", "[", "<", "</", '"name"', ":", '"get"', ",", "\\", "é", "9" * 300, "\u2028"),
    ]
)


@every_parser
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(WRITTEN, max_size=6), st.lists(st.integers(0, 3000), max_size=10))
def test_any_cut_gives_the_same(parser: ToolParser, texts: list[str], places: list[int]) -> None:
    text = "".join(texts)
    whole = collect(parser.stream(NAMES), [text])
    assert collect(parser.stream(NAMES), cut(text, places)) == whole == collect(parser.stream(NAMES), text)
    parsed = parser.parse(text, NAMES)
    assert parsed.content == whole.content and {call.name for call in parsed.calls if call.name} <= NAMES


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name":"get","arguments":{"a":  1}}</tool_call>', "", [("get", '{"a":  1}')]),
        ('<tool_call>{"name": "g\\u0065t"}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name": "get", "arguments": {}, "why": [1]}</tool_call>.', ".", [("get", "{}")]),
        ('<tool_call>{"why": "x", "name": "get"}</tool_call>', "", [("get", "{}")]),
        ('\n\n<tool_call>{"name": "get"}\n</tool_call>\n', "", [("get", "{}")]),
        ('<tool_call>{"name": "get"}', "", [("get", "{}")]),
        ('<tool_call>{"name": "get"}</tool_', "", [("get", "{}")]),
        ('<tool_call>{"name": "get"} <tool_call>{"name": "get_all"}', "", [("get", "{}"), ("get_all", "{}")]),
        ('<tool_call>{"name": "get"} and <b>', " and <b>", [("get", "{}")]),
        ('<tool_call>{"name": "get", "arguments": {"a": 1', "", [("get", '{"a": 1')]),
        # After a call was given out it cannot be taken back: it ends where it is no JSON any more.
        ('<tool_call>{"name": "get", "arguments": {"a": x}}', "x}}", [("get", '{"a": ')]),
        ('<tool_call><tool_call>{"name": "get"}</tool_call>', "<tool_call>", [("get", "{}")]),
        (' <tool_call>{"name": "other"}</tool_call> ', None, []),
        ('<tool_call>{"name": "get", "name": "get_all"}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}, "arguments": {}, "name": "get"}</tool_call>', None, []),
        ("<tool_call>{}</tool_call>", None, []),
        ('<tool_call>{"arguments": {}}</tool_call>', None, []),
        ('<tool_call>["get"]</tool_call>', None, []),
        ('<tool_call>{"name": "get", "arguments": null}</tool_call>', None, []),
        ('{"name": "get", "arguments": {}}', None, []),
        ("  \n", None, []),
    ],
)
def test_hermes(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    """None: the text as it is."""
    assert collect(HERMES.stream(NAMES), [text]) == Collected(text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
        ('{"name": "get", "arguments": {"a": 1}}', "", [("get", '{"a": 1}')]),
        ('\n<|python_tag|> {"type": "function", "name": "get"}', "", [("get", "{}")]),
        (
            '{"name": "get"}; {"name": "get_all"}\n{"name": "get"}',
            "",
            [("get", "{}"), ("get_all", "{}"), ("get", "{}")],
        ),
        ('{"name": "get"}; and', "; and", [("get", "{}")]),
        ('Look: <|python_tag|>{"name": "get"}', "Look: ", [("get", "{}")]),
        ('Look: {"name": "get"}', None, []),
        ('{"answer": {"name": "get", "parameters": {}}}', None, []),
        ('{"name": "get", "note": 1}', None, []),
        ('; {"name": "get"}', None, []),
        ("<|python_tag|>print(1)", None, []),
    ],
)
def test_llama3_json(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert collect(LLAMA3.stream(NAMES), [text]) == Collected(text if content is None else content, calls)


def test_arguments_come_as_they_are_written() -> None:
    stream = HERMES.stream(NAMES)
    assert stream.feed('Hm <tool_call>{"name": "get", "argu') == ToolParserOutput("Hm ")
    assert stream.feed('ments": {"a') == ToolParserOutput("", [ToolCallDelta(0, "get", '{"a')])
    assert stream.feed('": "x') == ToolParserOutput("", [ToolCallDelta(0, None, '": "x')])
    assert stream.feed('"}}') == ToolParserOutput("", [ToolCallDelta(0, None, '"}')])
    assert stream.feed("</tool_call>") == stream.finish() == ToolParserOutput()


# The choice.

HERMES_TEMPLATE = (
    '{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
)
LLAMA3_TEMPLATE = "<|start_header_id|>ipython<|end_header_id|>{{ parameters }}"


def chosen(template: str | None, **settings: Any) -> ToolParser | None:
    config = EngineConfig.from_flat(model="x", **settings)
    return choose_tool_parser(make_manager(config, BUILTIN_PLUGINS), config, template)


def format_of(parser: ToolParser | None) -> str | None:
    if parser is None:
        return None
    samples = {
        "hermes": '<tool_call>{"name": "get", "arguments": {}}</tool_call>',
        "llama3_json": '{"name": "get", "parameters": {}}',
    }
    (name,) = [name for name, text in samples.items() if parser.parse(text, NAMES).calls]
    return name


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (HERMES_TEMPLATE, {}, "hermes"),
        (LLAMA3_TEMPLATE, {}, "llama3_json"),
        ("{{ messages }}", {}, None),
        (None, {}, None),
        ("<tool_call><function=x>arguments", {}, None),  # the same mark around another format
        ("<tool_call><arg_key>arguments", {}, None),
        (LLAMA3_TEMPLATE, {"tool_call_parser": "hermes"}, "hermes"),
        (None, {"tool_call_parser": "llama3_json"}, "llama3_json"),
        (None, {"tool_call_parser": "LLAMA3-JSON"}, "llama3_json"),
        (HERMES_TEMPLATE, {"tool_call_parser": "none"}, None),
        (HERMES_TEMPLATE, {"tool_call_parser": "auto"}, "hermes"),
        (HERMES_TEMPLATE, {"plugin": ["tool_parser=llama3_json"]}, "llama3_json"),
        (HERMES_TEMPLATE, {"plugin": ["no:hermes"]}, None),
    ],
)
def test_choice(template: str | None, settings: dict[str, Any], expected: str | None) -> None:
    assert format_of(chosen(template, **settings)) == expected


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"--tool-call-parser herms.*did you mean 'hermes'"):
        chosen(HERMES_TEMPLATE, tool_call_parser="herms")


def test_a_parser_from_outside_works_when_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "outside.py"
    file.write_text(Path(my_tool_parser.__file__).read_text())
    assert format_of(chosen(HERMES_TEMPLATE, plugin=["hotswap.core.testing.templates.victim"])) == "hermes"
    parser = chosen(HERMES_TEMPLATE, plugin=[str(file)])
    assert parser is not None and parser.parse("CALL get {}", NAMES).calls == [ToolCallDelta(0, "get", "{}")]


# The guard.


class _Fixed(ToolParser, ToolCallStream):
    def __init__(self, output: Any) -> None:
        self._output = output

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        return self

    def feed(self, text: str) -> ToolParserOutput:
        if isinstance(self._output, BaseException):
            raise self._output
        return self._output  # type: ignore[no-any-return]

    def finish(self) -> ToolParserOutput:
        return self.feed("")


@pytest.mark.parametrize(
    "output",
    [
        ValueError("secret"),
        RecursionError(),
        None,
        ("x", []),
        ToolParserOutput("", [ToolCallDelta(0)]),
        ToolParserOutput("", [ToolCallDelta(1, "get")]),
        ToolParserOutput("", [ToolCallDelta(-1, None, "x")]),
        ToolParserOutput("", [ToolCallDelta(0, "get"), ToolCallDelta(0, "get")]),
        ToolParserOutput("", [ToolCallDelta(0, "not_offered")]),
        ToolParserOutput(cast(Any, None)),
        ToolParserOutput("", cast(Any, None)),
        ToolParserOutput("", [cast(Any, "get")]),
        ToolParserOutput("", [ToolCallDelta(cast(Any, "0"), "get")]),
        ToolParserOutput("", [ToolCallDelta(0, cast(Any, ["get"]))]),
        ToolParserOutput("", [ToolCallDelta(0, "get", cast(Any, {}))]),
    ],
)
def test_faults_of_a_parser_are_one_requests(output: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RequestError) as info:
        GuardedToolParser(_Fixed(output), "my_parser (my-package 1.0)").parse("x", NAMES)
    assert info.value.status == 500 and "secret" not in info.value.message
    assert any("my_parser (my-package 1.0)" in record.getMessage() for record in caplog.records)


# The author's page.


def test_the_page_shows_the_template_and_its_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plugins" / "tool_parser.md").read_text()
    example, check = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert example == Path(my_tool_parser.__file__).read_text()
    space: dict[str, Any] = {}
    exec(compile(check, "tool_parser.md", "exec"), space)  # noqa: S102 - a page of this repository
    suite = type("OfTheTemplate", (space["TestMine"],), {"plugin": my_tool_parser.__name__})()
    suite.test_examples_are_read_exactly(suite.build())
