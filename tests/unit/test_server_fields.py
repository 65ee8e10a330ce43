"""Request fields: strict types, the three lists, bounds before work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotswap.server.openai.fields import REMOVED

ROUTES = ("complete", "chat")


def refused(reply: Any, param: str, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    return str(error["message"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", ["5", True, 5.0, 5.5, [], {}, -1, 2**40]),
        ("n", ["1", True, 1.0, 0, -1, 129]),
        ("temperature", ["1", True, [], -0.1]),
        ("top_p", ["0.5", False, 0, 1.5]),
        ("top_k", ["5", True, 5.0, -2]),
        ("seed", ["3", True, 1.5, 2**63, -(2**63) - 1]),
        ("repetition_penalty", [0, -1, "2"]),
        ("presence_penalty", [2.1, -2.1]),
        ("min_tokens", [-1, "0"]),
        ("ignore_eos", ["true", 1]),
        ("stream", ["true", 1]),
        ("stop", [1, [1], {}, "", [""], ["x"] * 17, "x" * 257]),
        ("stop_token_ids", [["1"], [True], [-1], [320], 5]),
        (
            "logit_bias",
            [{"x": 1}, {"1e3": 1}, {"-1": 1}, {"320": 1}, {"5": 101}, {"5": -101}, [1], {"5": "1"}, {"5": None}],
        ),
        ("allowed_token_ids", [[], [320], ["a"]]),
        ("bad_words", [[1], [""], "x", ["x"] * 129]),
        ("user", [5, "x" * 513]),
        ("priority", ["1", 1.5, 2**63]),
        ("cache_salt", ["", "x" * 257, 5, "a b", "ü"]),
        ("request_id", ["", "x" * 129, "ü", 7]),
        ("model", [5, ["tiny"]]),
    ],
)
def test_values_are_not_coerced(api: Any, route: str, field: str, values: list[Any]) -> None:
    for value in values:
        reply = getattr(api, route)(**{field: value})
        assert reply.status_code == 400, (field, value, reply.text)
        assert reply.json()["error"]["param"].split("[")[0].split(".")[0] == field, reply.text


@pytest.mark.parametrize("route", ROUTES)
def test_null_means_not_said(api: Any, route: str) -> None:
    names = "n temperature top_p top_k seed stop stream stream_options logit_bias max_tokens user tools cache_salt"
    reply = getattr(api, route)(**dict.fromkeys(names.split()))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("route", ROUTES)
def test_valid_extras_pass(api: Any, route: str) -> None:
    api.engine.info.uses_priority = True
    reply = getattr(api, route)(
        temperature=0,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=3.0,
        seed=-1,
        logit_bias={"5": -100, "6": 100},
        max_completion_tokens=3,
        stop=["zz"],
        stop_token_ids=[300],
        bad_words=["foo"],
        allowed_token_ids=[80, 81],
        priority=-3,
        cache_salt="tenant-1",
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        reasoning_effort="none",
        use_beam_search=False,
        length_penalty=1.0,
        response_format={"type": "text"},
    )
    assert reply.status_code == 200, reply.text
    sampling = api.engine.requests[-1].sampling
    assert sampling.max_tokens == 3 and sampling.repetition_penalty == 3.0 and sampling.logit_bias == {5: -100, 6: 100}
    assert api.engine.requests[-1].priority == -3 and api.engine.requests[-1].user == "u"


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_fields(make_api: Callable[..., Any], route: str) -> None:
    api = make_api()
    assert "did you mean max_tokens?" in refused(getattr(api, route)(max_token=3), "max_token")
    assert "did you mean temperature?" in refused(getattr(api, route)(temprature=3), "temprature")
    refused(getattr(api, route)(foo=None), "foo")
    assert "<script>" not in getattr(api, route)(**{"<script>": 1}).text
    lenient = make_api(allow_unknown_fields=True)
    assert getattr(lenient, route)(max_token=3).status_code == 200
    refused(getattr(lenient, route)(guided_json={}), "guided_json")
    refused(getattr(lenient, route)(structured_outputs={}), "structured_outputs")


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_fields_name_the_new_one(api: Any, name: str) -> None:
    assert REMOVED[name] in refused(api.complete(**{name: None}), name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"json": {}}),
        ("use_beam_search", True),
        ("length_penalty", 1.2),
        ("reasoning_effort", "high"),
        ("modalities", ["audio"]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "nonsense"}),
        ("prompt_embeds", "AAAA"),
    ],
)
def test_what_is_not_served_says_so(api: Any, field: str, value: Any) -> None:
    assert "not served" in refused(api.chat(**{field: value}), field) or field == "response_format"


def test_tool_choice(api: Any) -> None:
    for fine in ("none", None):
        assert api.chat(tool_choice=fine).status_code == 200
    for wrong in ("auto", "required", {}, {"type": "function", "function": {"name": "x"}}, 5):
        refused(api.chat(tool_choice=wrong), "tool_choice")


def test_fan_out_is_bounded(make_api: Callable[..., Any]) -> None:
    api = make_api(max_requests_per_call=8)
    assert len(api.complete(["a"] * 4, n=2, max_tokens=1).json()["choices"]) == 8
    refused(api.complete(["a"] * 5, n=2), "prompt")
    refused(api.complete("a", n=9), "n")
    refused(api.chat("a", n=9), "n")
    assert len(api.engine.requests) == 8


def test_limits_of_max_tokens(make_api: Callable[..., Any]) -> None:
    from hotswap.core.testing.fake_engine import FakeEngine

    api = make_api(FakeEngine(lambda prompt, choice: [80] * 100, max_model_len=64))
    for length, max_tokens, expected in ((63, None, 1), (63, 64, 1), (62, 64, 2), (40, None, 16), (40, 20, 20)):
        reply = api.complete([80] * length, max_tokens=max_tokens)
        assert reply.json()["usage"]["completion_tokens"] == expected, (length, max_tokens)
        assert reply.json()["choices"][0]["finish_reason"] == "length"
    for length in (64, 65, 200):
        for stream in (False, True):
            assert api.complete([80] * length, stream=stream).json()["error"]["code"] == "context_length_exceeded"
    refused(api.complete("a", max_tokens=0), "max_tokens")
    refused(api.chat("a", max_tokens=0), "max_tokens")
    refused(api.chat("a", max_tokens=3, max_completion_tokens=4), "max_tokens")
    assert api.chat("a", max_tokens=4, max_completion_tokens=4).json()["usage"]["completion_tokens"] == 4
    assert api.complete("a", min_tokens=20).json()["usage"]["completion_tokens"] >= 20
    refused(api.complete("a", min_tokens=5, max_tokens=4), "min_tokens")


def test_generation_defaults(make_api: Callable[..., Any]) -> None:
    from hotswap.core.testing.fake_engine import FakeEngine

    defaults = {"temperature": 0.3, "top_k": 7, "max_tokens": 10}
    api = make_api(FakeEngine(lambda prompt, choice: [80] * 100, generation_defaults=defaults))
    assert api.complete("a").json()["usage"]["completion_tokens"] == 10
    assert api.chat("a").json()["usage"]["completion_tokens"] == 10
    assert api.complete("a", max_tokens=15).json()["usage"]["completion_tokens"] == 15
    api.complete("a", temperature=1.5)
    sampling = api.engine.requests[-1].sampling
    assert sampling.temperature == 1.5 and sampling.top_k == 7
    ceiling = make_api(FakeEngine(lambda prompt, choice: [80] * 100, max_tokens_ceiling=10))
    assert ceiling.complete("a", max_tokens=15).json()["usage"]["completion_tokens"] == 10
