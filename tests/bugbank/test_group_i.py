"""Bug bank, group I: chat template and tools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hotswap.core.contracts.tool_parser import ToolCallStream, ToolParser
from hotswap.core.testing.fake_engine import FakeEngine, byte_tokenizer
from hotswap.plugins.parsers import hermes, llama3_json
from hotswap.plugins.parsers.json_calls import JsonCallParser

Api = Any
Sse = Callable[[Any], list[dict[str, Any]]]
HERMES = JsonCallParser(hermes.FORMAT)
LLAMA3 = JsonCallParser(llama3_json.FORMAT)
BOS, IM_END = 0, 3

# ChatML with tools, content as a string.
STRING_STYLE = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same with content as a list of parts, and arguments as the string that they arrive in.
PARTS_STYLE = STRING_STYLE.replace(
    "{{ message.content }}", "{% for part in message.content %}{{ part.text }}{% endfor %}"
).replace("call.function.arguments | tojson", "call.function.arguments + ''")
STYLES = {"string": STRING_STYLE, "parts": PARTS_STYLE}
every_style = pytest.mark.parametrize("style", sorted(STYLES))
both_ways = pytest.mark.parametrize("stream", [False, True])


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": parameters}}}


TOOLS = [tool("get", q={"type": "string"}), tool("get_all")]
USER = {"role": "user", "content": "find it"}


def engine_saying(*texts: str, parser: ToolParser | None = HERMES, **settings: Any) -> FakeEngine:
    """Choice k says texts[k]."""
    ids = [byte_tokenizer().encode(text, add_special_tokens=False) for text in texts or ("ok",)]
    settings = {"max_model_len": 8192, "chat_template": STRING_STYLE, "tool_parser": parser, **settings}
    return FakeEngine(lambda prompt, choice: ids[choice % len(ids)], **settings)


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [USER], **fields}


def chat(api: Api, *messages: dict[str, Any], **fields: Any) -> Any:
    return api.post("/v1/chat/completions", body(*messages, **fields))


def prompt_of(api: Api, *messages: dict[str, Any], **fields: Any) -> str:
    """What the engine was given, as text."""
    reply = chat(api, *messages, max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    text: str = api.engine.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)
    return text


def refused(reply: Any, param: str) -> str:
    error = reply.json()["error"]
    assert reply.status_code == 400 and (error["param"] or "").startswith(param), reply.text
    return str(error["message"])


def choices_of(reply: Any, sse: Sse, stream: bool) -> list[dict[str, Any]]:
    """Each choice as {content, calls: [{id, name, arguments}], finish_reason}, from either kind of answer."""
    assert reply.status_code == 200, reply.text
    if not stream:
        ChatCompletion.model_validate(reply.json())
        return [
            {
                "content": choice["message"]["content"],
                "calls": [{"id": c["id"], **c["function"]} for c in choice["message"].get("tool_calls", [])],
                "finish_reason": choice["finish_reason"],
            }
            for choice in reply.json()["choices"]
        ]
    found: dict[int, dict[str, Any]] = {}
    for event in sse(reply):
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], {"content": "", "calls": [], "finish_reason": None})
            assert whole["finish_reason"] is None, "something came after the end"
            whole["finish_reason"] = choice["finish_reason"]
            whole["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(whole["calls"]):
                    assert call["type"] == "function" and call["id"].startswith("call_")
                    whole["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert not {"id", "type"} & call.keys() and "name" not in call["function"], "named twice"
                whole["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    for whole in found.values():
        whole["content"] = whole["content"] or ("" if not whole["calls"] else None)
    return [found[index] for index in sorted(found)]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["name"], json.loads(call["arguments"])) for call in choice["calls"]]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**c, "calls": [{**call, "id": ""} for call in c["calls"]]} for c in choices]


def written(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# I01


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("prints_bos", [False, True])
def test_i01_chat_paths_have_one_bos_and_the_same_ids(
    make_api: Callable[..., Api], add_bos: bool, prints_bos: bool
) -> None:
    template = ("{{ bos_token }}" if prints_bos else "") + STRING_STYLE
    api = make_api(engine_saying(chat_template=template, add_bos=add_bos))
    ids = api.post("/tokenize", body()).json()["tokens"]
    assert ids.count(BOS) == (1 if add_bos or prints_bos else 0) == ids[:1].count(BOS)
    for fields in ({}, {"echo": True}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        reply = chat(api, return_token_ids=True, max_tokens=1, **fields)
        assert reply.json()["prompt_token_ids"] == ids == api.engine.requests[-1].prompt_token_ids


@pytest.mark.parametrize("add_bos", [False, True])
def test_i01_completions_follow_add_special_tokens(make_api: Callable[..., Api], add_bos: bool) -> None:
    api = make_api(engine_saying(add_bos=add_bos))
    plain = api.engine.tokenizer.encode("hello", add_special_tokens=False)
    for flag, echo in itertools.product((None, True, False), (False, True)):
        fields = {} if flag is None else {"add_special_tokens": flag}
        expected = [BOS, *plain] if add_bos and flag is not False else plain
        reply = api.complete("hello", max_tokens=1, echo=echo, **fields)
        assert api.engine.requests[-1].prompt_token_ids == expected
        assert reply.json()["choices"][0]["text"].startswith("hello") == echo
        assert api.post("/tokenize", {"prompt": "hello", **fields}).json()["tokens"] == expected


def test_i01_offline_chat_has_the_servers_ids(make_llm: Callable[..., Any], make_api: Callable[..., Api]) -> None:
    """LLM.chat over a real engine, and the application, over one tokenizer and one template."""
    template = "{{ bos_token }}" + STRING_STYLE
    llm = make_llm({}, model={"max_model_len": 1024}, num_gpu_blocks_override=300)
    api = make_api(engine_saying(chat_template=template))
    for messages, tools in itertools.product(([USER], [{"role": "system", "content": "x"}, USER]), (None, TOOLS)):
        (output,) = llm.chat(messages, chat_template=template, tools=tools, use_tqdm=False)
        fields = {} if tools is None else {"tools": tools}
        ids = chat(api, *messages, return_token_ids=True, max_tokens=1, **fields).json()["prompt_token_ids"]
        assert output.prompt_token_ids == ids and ids.count(BOS) == 1


# I02


@every_style
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_i02_equal_text_gives_equal_prompts(make_api: Callable[..., Api], style: str, role: str) -> None:
    api = make_api(engine_saying(chat_template=STYLES[style]))

    def prompt(content: Any) -> str:
        return prompt_of(api, USER, {"role": role, "content": content})

    assert "\none two<|im_end|>" in prompt("one two") and "[{" not in prompt("one two")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert prompt(parts) == prompt("one two")
    assert prompt("") == prompt([]) == prompt([{"type": "text", "text": ""}])
    refused(chat(api, USER, {"role": role, "content": None}), "messages[1].content")
    refused(chat(api, USER, {"role": role}), "messages[1].content")


@every_style
def test_i02_null_is_for_an_assistant_with_tool_calls(make_api: Callable[..., Api], style: str) -> None:
    api = make_api(engine_saying(chat_template=STYLES[style]))
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]}
    prompts = set()
    contents: tuple[dict[str, Any], ...] = ({"content": None}, {"content": ""}, {"content": []}, {})
    for content in contents:
        message = {"role": "assistant", "tool_calls": [call], **content}
        prompts.add(prompt_of(api, USER, message, result))
    assert len(prompts) == 1 and "None" not in prompts.pop()
    refused(chat(api, USER, {"role": "assistant", "content": None, "tool_calls": []}), "messages[1].content")
    refused(chat(api, {"role": "user", "content": None, "tool_calls": [call]}), "messages[0]")


@both_ways
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "refusal", "", None, 5])
def test_i02_unknown_parts_are_refused_without_a_look(make_api: Callable[..., Api], kind: Any, stream: bool) -> None:
    """The address is one where nobody answers: a look at it would take time and show in the message."""
    part = {"type": kind, "image_url": {"url": "http://192.0.2.1/x.png"}}
    api = make_api(engine_saying())
    for role in ("system", "user", "assistant", "tool"):
        reply = chat(api, {"role": role, "content": [{"type": "text", "text": "a"}, part]}, stream=stream)
        refused(reply, "messages[0].content[1]")
    assert not api.engine.requests


# I03


@both_ways
@pytest.mark.parametrize("prefix", ["The answer is ", "\n", "x", " a  "])
def test_i03_the_answer_goes_on_after_the_prefix(
    make_api: Callable[..., Api], sse: Sse, prefix: str, stream: bool
) -> None:
    for style in STYLES:
        api = make_api(engine_saying("42", chat_template=STYLES[style]))
        messages = [USER, {"role": "assistant", "content": prefix}]
        for add, echo in itertools.product((None, False), (None, False, True)):
            fields = {"continue_final_message": True, "add_generation_prompt": add, "echo": echo, "stream": stream}
            (choice,) = choices_of(chat(api, *messages, **fields), sse, stream)
            assert choice["content"] == (prefix if echo else "") + "42"
            ids = api.engine.requests[-1].prompt_token_ids
            assert api.engine.tokenizer.decode(ids).endswith(f"<|im_start|>assistant\n{prefix}")
            assert IM_END not in ids[-len(prefix) - 1 :] and ids.count(IM_END) == 1


@both_ways
def test_i03_flags_that_exclude_each_other(make_api: Callable[..., Api], stream: bool) -> None:
    api = make_api(engine_saying())
    messages = [USER, {"role": "assistant", "content": "x"}]
    for echo in (None, False, True):
        fields = {"add_generation_prompt": True, "continue_final_message": True, "echo": echo}
        refused(chat(api, *messages, stream=stream, **fields), "continue_final_message")
    assert api.post("/tokenize", body(*messages, **fields | {"echo": None})).status_code == 400


def test_i03_generation_prompt(make_api: Callable[..., Api]) -> None:
    api = make_api(engine_saying())
    start = "<|im_start|>assistant\n"
    for flag, ends in ((None, True), (True, True), (False, False)):
        assert prompt_of(api, add_generation_prompt=flag).endswith("<|im_end|>\n" + start) == ends
        assert prompt_of(api, add_generation_prompt=flag).endswith("<|im_end|>\n") == (not ends)


def test_i03_offline(make_llm: Callable[..., Any]) -> None:
    from hotswap.core.errors import RequestError

    llm = make_llm({}, model={"max_model_len": 1024}, num_gpu_blocks_override=300)
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    settings: dict[str, Any] = {"chat_template": STRING_STYLE, "use_tqdm": False}
    (output,) = llm.chat(messages, continue_final_message=True, **settings)
    assert output.prompt.endswith("assistant\nThe answer is ") and not output.outputs[0].text.startswith("The")
    with pytest.raises(RequestError, match="exclude"):
        llm.chat(messages, continue_final_message=True, add_generation_prompt=True, **settings)
    (output,) = llm.chat([USER], add_generation_prompt=False, **settings)
    assert output.prompt.endswith("<|im_end|>\n")


# I05

NAMED = {"type": "function", "function": {"name": "get"}}


@both_ways
@pytest.mark.parametrize("parser", [HERMES, None], ids=["parser", "none"])
@pytest.mark.parametrize("choice", ["none", None])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "without"])
def test_i05_none_and_null_hide_the_tools(
    make_api: Callable[..., Api], sse: Sse, tools: Any, choice: Any, parser: ToolParser | None, stream: bool
) -> None:
    said = written("get", {"q": "x"})
    api = make_api(engine_saying(said, parser=parser))
    fields = {"tool_choice": choice, **({} if tools is None else {"tools": tools})}
    (answer,) = choices_of(chat(api, stream=stream, **fields), sse, stream)
    assert answer == {"content": said, "calls": [], "finish_reason": "stop"}
    assert prompt_of(api, **fields) == prompt_of(api)


@both_ways
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "without"])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        "",
        "any",
        "get",
        5,
        True,
        [],
        ["auto"],
        {"type": "function"},
        {"type": "auto"},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": None}},
        {"type": "function", "function": {"name": "ge"}},
        {"type": "function", "function": {"name": "unknown"}},
        {"function": {"name": "get"}},
        {"type": "function", "name": "get"},
        {"type": "custom", "custom": {"name": "get"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    ],
)
def test_i05_a_choice_that_is_none_is_refused(
    make_api: Callable[..., Api], choice: Any, tools: Any, stream: bool
) -> None:
    api = make_api(engine_saying())
    fields = {} if tools is None else {"tools": tools}
    message = refused(chat(api, tool_choice=choice, stream=stream, **fields), "tool_choice")
    assert "not served" not in message
    assert not api.engine.requests


@both_ways
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_i05_what_needs_constrained_output_says_so(make_api: Callable[..., Api], choice: Any, stream: bool) -> None:
    api = make_api(engine_saying())
    reply = chat(api, tools=TOOLS, tool_choice=choice, stream=stream)
    assert "not served by this version" in refused(reply, "tool_choice")
    assert reply.json()["error"]["code"] == "unsupported_parameter"
    assert "not served" not in refused(chat(api, tool_choice=choice, stream=stream), "tool_choice")


@both_ways
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "none"}, {"tool_choice": None}, {"tool_choice": "auto"}])
@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([], "tools"),
        ({}, "tools"),
        ("get", "tools"),
        ([None], "tools"),
        (["get"], "tools"),
        ([{}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "get"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x" * 65}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "get\n"}}], "tools[0].function.name"),
        ([TOOLS[0], TOOLS[0]], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0].function.description"),
        ([{"type": "function", "function": {"name": "f", "strict": True}}], "tools[0].function.strict"),
        ([tool(f"f{n}") for n in range(129)], "tools"),
        ([tool("f", q={"description": "x" * 300_000})], "tools"),
    ],
)
def test_i05_wrong_tools_are_refused_whatever_the_choice(
    make_api: Callable[..., Api], tools: Any, param: str, choice: dict[str, Any], stream: bool
) -> None:
    api = make_api(engine_saying())
    refused(chat(api, tools=tools, stream=stream, **choice), param)
    assert not api.engine.requests


@both_ways
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_i05_auto_needs_a_parser_a_template_and_tools(
    make_api: Callable[..., Api], choice: dict[str, Any], stream: bool
) -> None:
    ask = {"tools": TOOLS, "stream": stream, **choice}
    assert "--tool-call-parser" in refused(chat(make_api(engine_saying(parser=None)), **ask), "tools")
    assert "does not use tools" in refused(
        chat(make_api(engine_saying(chat_template="{{ messages }}")), **ask), "tools"
    )
    off = make_api(engine_saying(), enable_auto_tool_choice=False)
    assert "--no-enable-auto-tool-choice" in refused(chat(off, **ask), "tool_choice")
    api = make_api(engine_saying())
    assert chat(api, **ask).status_code == 200 and "# Tools" in prompt_of(api, tools=TOOLS, **choice)
    refused(chat(api, tool_choice="auto", stream=stream), "tool_choice")
    for value in (True, False, None):
        assert chat(api, parallel_tool_calls=value, stream=stream).status_code == 200
    refused(chat(api, parallel_tool_calls="no", stream=stream), "parallel_tool_calls")


# I06


@every_style
def test_i06_arguments_as_string_or_object_render_alike(make_api: Callable[..., Api], style: str) -> None:
    api = make_api(engine_saying(chat_template=STYLES[style]))

    def prompt(arguments: Any) -> str:
        call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}
        return prompt_of(api, USER, {"role": "assistant", "content": None, "tool_calls": [call]})

    assert prompt('{"a":1}') == prompt({"a": 1}) == prompt(' {\n"a" : 1 } ')
    assert '"arguments": {"a": 1}}' in prompt({"a": 1})
    assert prompt("") == prompt("{}") == prompt({})  # the documented rule: nothing means no arguments
    nested = {"q": 'a } b { "x"', "é": [None, True, 1.5, {"<": ">"}]}
    assert prompt(json.dumps(nested)) == prompt(nested) == prompt(json.dumps(nested, ensure_ascii=False))


@both_ways
@pytest.mark.parametrize(
    "arguments",
    [
        "[]",
        "not json",
        "null",
        "3",
        '"x"',
        "{",
        '{"a":1} x',
        '{"a":NaN}',
        "{'a':1}",
        " ",
        [],
        [1],
        3,
        True,
        None,
        "{" * 9999,
    ],
)
def test_i06_arguments_that_are_no_object(make_api: Callable[..., Api], arguments: Any, stream: bool) -> None:
    for style in STYLES.values():
        api = make_api(engine_saying(chat_template=style))
        call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}
        reply = chat(api, USER, {"role": "assistant", "content": "", "tool_calls": [call]}, stream=stream)
        refused(reply, "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    "calls", [{}, "x", [None], [{}], [{"function": "get"}], [{"function": {"arguments": "{}"}}], [{"id": 5, **NAMED}]]
)
def test_i06_calls_that_are_none(make_api: Callable[..., Api], calls: Any) -> None:
    reply = chat(make_api(engine_saying()), USER, {"role": "assistant", "content": "", "tool_calls": calls})
    refused(reply, "messages[1].tool_calls")


def test_i06_offline(make_llm: Callable[..., Any]) -> None:
    from hotswap.core.errors import RequestError

    llm = make_llm({}, model={"max_model_len": 1024}, num_gpu_blocks_override=300)

    def prompt(arguments: Any, **settings: Any) -> Any:
        call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return llm.chat(messages, chat_template=STRING_STYLE, use_tqdm=False, **settings)[0].prompt

    assert prompt('{"a":1}') == prompt({"a": 1})
    for wrong in ("[]", "not json"):
        with pytest.raises(RequestError, match="arguments"):
            prompt(wrong)
    assert "# Tools" in prompt({}, tools=TOOLS)
    wrong_tools: tuple[Any, ...] = ([], [{}], ["get"])
    for tools in wrong_tools:
        with pytest.raises(RequestError, match="tools"):
            prompt({}, tools=tools)
    with pytest.raises(RequestError, match="does not use tools"):
        llm.chat([USER], tools=TOOLS, use_tqdm=False)


# I07


@both_ways
@pytest.mark.parametrize("step_seconds", [0.0, 0.001], ids=["merged", "stepwise"])
def test_i07_choices_have_parsers_of_their_own(
    make_api: Callable[..., Api], sse: Sse, stream: bool, step_seconds: float
) -> None:
    """Two choices write different calls at the same time, token by token; one has two calls, the other words before."""
    texts = (
        written("get", {"q": "first", "n": 1}) + "\n" + written("get_all", {}),
        "Let me see. " + written("get_all", {"q": {"deep": ["second"]}}),
    )
    api = make_api(engine_saying(*texts, step_seconds=step_seconds))
    reply = chat(api, tools=TOOLS, n=2, stream=stream)
    one, two = choices_of(reply, sse, stream)
    assert calls_of(one) == [("get", {"q": "first", "n": 1}), ("get_all", {})]
    assert calls_of(two) == [("get_all", {"q": {"deep": ["second"]}})]
    assert (one["content"], two["content"]) == (None, "Let me see. ")
    assert {one["finish_reason"], two["finish_reason"]} == {"tool_calls"}
    ids = [call["id"] for choice in (one, two) for call in choice["calls"]]
    assert len(set(ids)) == 3


def test_i07_streamed_pieces_come_as_they_are_written(make_api: Callable[..., Api], sse: Sse) -> None:
    api = make_api(engine_saying(written("get", {"q": "word " * 20}), step_seconds=0.0005))
    events = sse(chat(api, tools=TOOLS, stream=True))
    pieces = [c for e in events for choice in e["choices"] for c in choice["delta"].get("tool_calls", [])]
    assert len(pieces) > 10 and max(len(piece["function"]["arguments"]) for piece in pieces) < 40


@both_ways
def test_i07_one_call_at_most(make_api: Callable[..., Api], sse: Sse, stream: bool) -> None:
    """parallel_tool_calls: false ends the answer where a second call begins, and stops the engine."""
    two = written("get", {"q": "1"}) + "\n" + written("get_all", {}) + "never said " * 50
    api = make_api(engine_saying(two, step_seconds=0.0005))
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream, "max_tokens": 700}
    (choice,) = choices_of(chat(api, **fields), sse, stream)
    assert calls_of(choice) == [("get", {"q": "1"})]
    assert choice["content"] is None and choice["finish_reason"] == "tool_calls"
    assert len(api.engine.aborted) == 1
    assert api.metric("request_success_total", finished_reason="stop") == 1
    words, both = choices_of(chat(make_api(engine_saying("hello", two)), n=2, **fields), sse, stream)
    assert words == {"content": "hello", "calls": [], "finish_reason": "stop"}
    assert calls_of(both) == [("get", {"q": "1"})] and both["finish_reason"] == "tool_calls"


# I08

AWKWARD = [
    ("get", {"q": 'a } b { "x"'}),
    ("get_all", {}),
    ("get", {"q": "</tool_call> <tool_call> ] [ \\ \" ' é😀 \n\t\u2028"}),
    ("get_all", {"name": "get", "arguments": {"name": "get"}, "": [[], {}, -0.5e-7, None, True]}),
]


@both_ways
@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("format_", ["hermes", "llama3_json"])
def test_i08_exact_calls_whole_and_streamed(
    make_api: Callable[..., Api], sse: Sse, format_: str, ensure_ascii: bool, stream: bool
) -> None:
    def said(calls: list[tuple[str, Any]]) -> str:
        if format_ == "hermes":
            objects = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ensure_ascii) for n, a in calls]
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=ensure_ascii) for n, a in calls)

    parser = HERMES if format_ == "hermes" else LLAMA3
    for calls in ([call] for call in AWKWARD):
        api = make_api(engine_saying(said(calls), parser=parser))
        (choice,) = choices_of(chat(api, tools=TOOLS, stream=stream), sse, stream)
        assert calls_of(choice) == calls and choice["content"] is None and choice["finish_reason"] == "tool_calls"
        expected = json.dumps(calls[0][1], ensure_ascii=ensure_ascii)
        assert choice["calls"][0]["arguments"] == expected, "the text of the arguments is passed on as it was written"
    api = make_api(engine_saying(said(AWKWARD), parser=parser))
    (choice,) = choices_of(chat(api, tools=TOOLS, stream=stream), sse, stream)
    assert calls_of(choice) == AWKWARD


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        written("ge", {}),
        written("get_", {}),
        written("GET", {}),
        written("get_all_of_it", {"q": 1}),
        '<tool_call>{"name": "get", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>',
        "<tool_call>__import__('os').abort()</tool_call>",
        '<tool_call>{"name": "get"',
        "<tool_call>",
        "a < b <tool",
    ],
)
def test_i08_what_is_no_call_is_content(make_api: Callable[..., Api], sse: Sse, text: str) -> None:
    api = make_api(engine_saying(text))
    for stream in (False, True):
        (choice,) = choices_of(chat(api, tools=TOOLS, stream=stream), sse, stream)
        assert choice == {"content": text, "calls": [], "finish_reason": "stop"}


def test_i08_every_length_limit(make_api: Callable[..., Api], sse: Sse) -> None:
    """Cut after any number of tokens: the stream equals the whole, a name that was sent stays, the reason is length."""
    text = "Hm. " + written("get", {"q": "a } b"}) + written("get_all", {})
    api = make_api(engine_saying(text))
    total = len(api.engine.tokenizer.encode(text, add_special_tokens=False))
    for limit in range(1, total + 1, 3):
        whole = choices_of(chat(api, tools=TOOLS, max_tokens=limit), sse, False)
        streamed = choices_of(chat(api, tools=TOOLS, max_tokens=limit, stream=True), sse, True)
        assert without_ids(whole) == without_ids(streamed)
        assert whole[0]["finish_reason"] == "length"
        assert all(call["name"] in ("get", "get_all") for call in whole[0]["calls"])


@both_ways
def test_i08_usage_and_logprobs_are_those_of_the_tokens(make_api: Callable[..., Api], sse: Sse, stream: bool) -> None:
    text = written("get", {"q": "é"})
    api = make_api(engine_saying(text))
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, "stream": stream}
    reply = chat(api, **fields, **({"stream_options": {"include_usage": True}} if stream else {}))
    events = sse(reply) if stream else [reply.json()]
    choices = [choice for event in events for choice in event["choices"]]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == text
    assert len(entries) == len(ids) == events[-1]["usage"]["completion_tokens"]
    assert calls_of(choices_of(reply, sse, stream)[0]) == [("get", {"q": "é"})]


class Broken(ToolParser):
    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        raise ZeroDivisionError("secret of the plugin")


def test_i08_a_parser_that_raises_ends_its_request_only(
    make_api: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    api = make_api(engine_saying("hello", parser=Broken()))
    for stream in (False, True):
        caplog.clear()
        reply = chat(api, tools=TOOLS, stream=stream)
        assert reply.status_code == 500 and "secret" not in reply.text
        assert "tool parser" in reply.json()["error"]["message"]
        assert any("Broken" in record.getMessage() for record in caplog.records)
        assert chat(api, stream=stream).status_code == 200
