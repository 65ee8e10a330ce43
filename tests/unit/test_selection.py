"""The values of --plugin: parsed, ranked, refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.errors import PluginError
from hotswap.core.plugin_selection import (
    COMMAND_LINE,
    CONFIG_FILE,
    PYTHON,
    Block,
    LoadRequest,
    Selection,
    agree,
    nearest,
    parse,
    selections_from_settings,
    strongest,
)


def parsed(raw: str) -> Any:
    return parse(raw, COMMAND_LINE)


@pytest.mark.parametrize(
    ("raw", "kind", "op", "name", "options"),
    [
        ("policy=fair", "policy", None, "fair", {}),
        (" policy=fair ", "policy", None, "fair", {}),
        ("fair", None, None, "fair", {}),
        ("fair,a=1", None, None, "fair", {"a": 1}),
        ("kernels.rope=native", "kernels", "rope", "native", {}),
        ("policy=fair,a=1,b=2.5,c=true,d=null", "policy", None, "fair", {"a": 1, "b": 2.5, "c": True, "d": None}),
        ("policy=fair,a=text,b=", "policy", None, "fair", {"a": "text", "b": ""}),
        (
            'policy=fair,a=[1,2],b={"x":[3,{"y":"}],"}]}',
            "policy",
            None,
            "fair",
            {"a": [1, 2], "b": {"x": [3, {"y": "}],"}]}},
        ),
        ('policy=fair,a="x,y=z",b=1', "policy", None, "fair", {"a": "x,y=z", "b": 1}),
        ("policy=fair,a=[a-z]+,b=1", "policy", None, "fair", {"a": "[a-z]+", "b": 1}),
        ("policy=fair,a=[1]x", "policy", None, "fair", {"a": "[1]x"}),
        ("policy=fair,a=x=y", "policy", None, "fair", {"a": "x=y"}),
        ("policy=fair,a=NaN,b=-Infinity,c=1e3", "policy", None, "fair", {"a": "NaN", "b": "-Infinity", "c": 1000.0}),
        ("policy=auto", "policy", None, "auto", {}),
    ],
)
def test_choices(raw: str, kind: str | None, op: str | None, name: str, options: dict[str, Any]) -> None:
    selection = parsed(raw)
    assert isinstance(selection, Selection)
    assert (selection.kind, selection.op, selection.name, selection.options) == (kind, op, name, options)


@pytest.mark.parametrize(
    ("raw", "target", "is_file", "options"),
    [
        ("./my_sched.py", "./my_sched.py", True, {}),
        ("my_sched.py", "my_sched.py", True, {}),
        ("/a/b.c/my_sched.py,x=1", "/a/b.c/my_sched.py", True, {"x": 1}),
        ("some.module", "some.module", False, {}),
        ("some.module,x=a.b", "some.module", False, {"x": "a.b"}),
    ],
)
def test_files_and_modules(raw: str, target: str, is_file: bool, options: dict[str, Any]) -> None:
    request = parsed(raw)
    assert isinstance(request, LoadRequest)
    assert (request.target, request.is_file, request.options) == (target, is_file, options)


@pytest.mark.parametrize(
    ("raw", "name", "kind"),
    [("no:fair", "fair", None), ("no:hotswap-fair", "hotswap-fair", None), ("no:policy=fair", "fair", "policy")],
)
def test_blocks(raw: str, name: str, kind: str | None) -> None:
    block = parsed(raw)
    assert isinstance(block, Block)
    assert (block.name, block.kind) == (name, kind)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("", "empty; write KIND=NAME, NAME, ./file.py, some.module or no:NAME"),
        ("polcy=fair", "unknown plugin kind 'polcy'; did you mean 'policy'?"),
        ("policy=", "the name after policy= is empty"),
        ("policy=fair,x", "'x' is not OPTION=VALUE"),
        ("policy=fair,", "'' is not OPTION=VALUE"),
        ("policy=fair,=3", "an option without a name"),
        ("policy=fair,a=1,a=2", "option 'a' is given twice"),
        ("policy=./fair.py", "a file is loaded by itself, without a kind: --plugin ./fair.py"),
        ("policy=auto,x=1", "options need a named plugin"),
        ("policy.rope=x", "policy is not chosen per op; write policy=NAME"),
        ("kernels.rop=x", "unknown op 'rop'; did you mean 'rope'"),
        ("no:", "write no:NAME, no:DISTRIBUTION or no:KIND=NAME"),
        ("no:a,b", "a block takes no options"),
        ("no:polcy=x", "unknown plugin kind 'polcy'"),
    ],
)
def test_what_cannot_be_parsed(raw: str, expected: str) -> None:
    with pytest.raises(PluginError) as caught:
        parsed(raw)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"--plugin {raw}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), json_values, max_size=4))
def test_every_json_value_survives(options: dict[str, Any]) -> None:
    import json

    raw = "".join(f",{name}={json.dumps(value)}" for name, value in options.items())
    assert parsed(f"policy=fair{raw}").options == options


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused_in_words(raw: str) -> None:
    try:
        parsed(raw)
    except PluginError as error:
        assert "--plugin" in str(error)


def test_aliases_are_the_same_rule() -> None:
    settings = {
        "plugin": ["victim=newest"],
        "attention_backend": "FLASH_ATTN",
        "scheduling_policy": "priority",
        "quantization": None,
        "load_format": "auto",
        "max_num_seqs": 4,
    }
    found = selections_from_settings(settings, CONFIG_FILE)
    assert [(item.kind, item.name) for item in found if isinstance(item, Selection)] == [
        ("victim", "newest"),
        ("attention", "flash_attn"),
        ("policy", "priority"),
        ("loader", "auto"),
    ]
    assert {item.source for item in found} == {CONFIG_FILE}


def test_precedence() -> None:
    low, high = parse("policy=a", CONFIG_FILE), parse("policy=b", COMMAND_LINE)
    assert isinstance(low, Selection)
    assert isinstance(high, Selection)
    assert strongest([low, high]) == [high]
    assert strongest([low]) == [low]
    assert strongest([]) == []


def select(raw: str, source: str = PYTHON) -> Selection:
    found = parse(raw, source)
    assert isinstance(found, Selection)
    return found


def test_two_choices_in_one_source() -> None:
    with pytest.raises(
        PluginError, match=r"policy: two choices, --plugin policy=a and --plugin policy=b,x=1 \(Python\)"
    ):
        agree([select("policy=a"), select("policy=b,x=1")], "policy")
    with pytest.raises(PluginError, match="two choices"):
        agree([select("policy=a,x=1"), select("policy=a,x=2")], "policy")


def test_saying_the_same_twice_is_one_choice() -> None:
    assert agree([select("policy=a"), select("policy=a,x=1"), select("policy=a")], "policy") == select("policy=a,x=1")
    assert agree([select("policy=auto"), select("policy=a")], "policy") == select("policy=a")
    assert agree([], "policy") is None


def test_nearest() -> None:
    assert nearest("Fair-Share", ["fair_share", "fcfs"]) == "; did you mean 'fair_share'?"
    assert nearest("zzz", ["fair_share", "fcfs"]) == ""


def test_unknown_source_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="unknown source"):
        parse("policy=a", "environment")
