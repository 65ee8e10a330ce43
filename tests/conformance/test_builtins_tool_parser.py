"""The built-in tool parsers keep their contract."""

from __future__ import annotations

from hotswap.core.testing.suites import ToolParserSuite


class TestHermes(ToolParserSuite):
    plugin = "hotswap.plugins.parsers.hermes"
    examples = (
        ('<tool_call>\n{"name": "get", "arguments": {"q": "a } b"}}\n</tool_call>', "", [("get", {"q": "a } b"})]),
        ('Hm.<tool_call>{"arguments": {}, "name": "get_all"}</tool_call>', "Hm.", [("get_all", {})]),
        ('<tool_call>{"name": "get"}</tool_call>', "", [("get", {})]),
        (
            '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_all", "arguments": {}}\n</tool_call>',
            "",
            [("get", {"n": 1}), ("get_all", {})],
        ),
    )


class TestLlama3Json(ToolParserSuite):
    plugin = "hotswap.plugins.parsers.llama3_json"
    examples = (
        ('{"name": "get", "parameters": {"q": "a } b"}}', "", [("get", {"q": "a } b"})]),
        ('<|python_tag|>{"name": "get_all", "parameters": {}}', "", [("get_all", {})]),
        ('Hm. <|python_tag|>{"type": "function", "name": "get"}', "Hm. ", [("get", {})]),
        (
            '{"name": "get", "parameters": {"n": 1}}; {"name": "get_all", "parameters": {}}',
            "",
            [("get", {"n": 1}), ("get_all", {})],
        ),
        ('{"answer": {"name": "get", "parameters": {}}}', '{"answer": {"name": "get", "parameters": {}}}', []),
    )


class TestTemplate(ToolParserSuite):
    plugin = "hotswap.core.testing.templates.tool_parser"
    examples = (('Hm.\nCALL get {"q": "a } b"}\nCALL get_all {}', "Hm.\n", [("get", {"q": "a } b"}), ("get_all", {})]),)
