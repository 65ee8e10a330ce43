"""One error shape everywhere, and nothing in it that is not ours to tell."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from hotswap.core.errors import EngineDeadError, HotswapError, RequestError
from hotswap.core.outputs import CompletionOutput, RequestOutput
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.errors import describe, public_text

FORBIDDEN = ("Traceback", " object at 0x", "/usr/", "/home/", "site-packages", '.py"')


def check_shape(reply: Any, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert not any(word in reply.text for word in FORBIDDEN)
    assert (status in (429, 503)) == ("retry-after" in reply.headers)
    return error


def test_shape_of_each_kind(make_api: Callable[..., Any]) -> None:
    api = make_api(max_request_bytes=2000)
    check_shape(api.get("/nope"), 404)
    check_shape(api.get("/v1/models/"), 404)
    assert "POST" in api.get("/v1/completions").headers["allow"]
    check_shape(api.get("/v1/completions"), 405)
    check_shape(api.call("POST", "/v1/completions", content=b"{}"), 415)
    json_type = {"content-type": "application/json"}
    check_shape(api.call("POST", "/v1/completions", content=b"{", headers=json_type), 400)
    check_shape(api.call("POST", "/v1/completions", content=b'{"prompt":"\\ud83d"}', headers=json_type), 400)
    check_shape(api.call("POST", "/v1/completions", content=b"x" * 3000, headers=json_type), 413)
    check_shape(
        api.call("POST", "/v1/completions", content=b"{}", headers={**json_type, "content-encoding": "gzip"}), 415
    )
    latin = {"content-type": "application/json; charset=latin-1"}
    check_shape(api.call("POST", "/v1/completions", content=b"{}", headers=latin), 415)
    assert check_shape(api.complete(model="other"), 404)["code"] == "model_not_found"
    assert check_shape(api.complete("x" * 300), 400)["code"] == "context_length_exceeded"
    assert check_shape(api.complete("x" * 300, stream=True), 400)["code"] == "context_length_exceeded"


def test_content_type_variants(api: Any) -> None:
    for value in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        assert (
            api.call("POST", "/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": value}).status_code
            == 200
        )


def test_chunked_body_is_capped_while_it_arrives(make_api: Callable[..., Any]) -> None:
    api = make_api(max_request_bytes=2000)
    seen = 0

    async def body() -> Any:
        nonlocal seen
        for _ in range(100):
            seen += 1
            yield b"x" * 100

    reply = api.call("POST", "/v1/completions", content=body(), headers={"content-type": "application/json"})
    check_shape(reply, 413)


def test_foreign_exceptions_say_nothing(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    def explode(*_: Any, **__: Any) -> Any:
        raise ValueError("secret of /home/somebody <x object at 0x7f12>")

    api.engine.generate = explode
    for stream in (False, True):
        reply = api.complete(stream=stream, max_tokens=2)
        error = check_shape(reply, 500)
        assert "secret" not in reply.text
        assert reply.headers["x-request-id"] in error["message"]
    assert "secret of" in caplog.text


def test_fault_of_one_request(api: Any, sse: Callable[[Any], Any]) -> None:
    api.engine.fail_after = 2
    check_shape(api.complete(max_tokens=4), 500)
    chunks = sse(api.complete(max_tokens=4, stream=True))
    assert "error" in chunks[-1] and chunks[-1]["error"]["type"] == "server_error"
    assert "0x7f" not in chunks[-1]["error"]["message"]
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
    assert api.metric("request_success_total", finished_reason="error") == 2
    api.engine.fail_after = None
    assert api.complete(max_tokens=4).status_code == 200


def test_refusals_of_the_engine(api: Any) -> None:
    api.engine.refuse = RequestError("too many requests wait", code="queue_full", status=429)
    for stream in (False, True):
        check_shape(api.complete(stream=stream), 429)
    assert api.metric("admission_rejections_total", reason="queue_full") == 2
    assert api.metric("request_success_total", finished_reason="error") == 0


def test_a_full_queue_is_a_refusal_and_not_a_request_that_failed(make_api: Callable[..., Any]) -> None:
    """The engine process says so in its first and last word about the request."""

    class Full(FakeEngine):
        async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
            yield RequestOutput(
                "r",
                None,
                [80],
                [CompletionOutput(0, finish_reason="error")],
                finished=True,
                error="full",
                error_status=429,
            )

    api = make_api(Full())
    for stream in (False, True):
        reply = api.complete("a", stream=stream)
        assert reply.status_code == 429 and reply.headers["retry-after"]
    assert api.metric("admission_rejections_total", reason="queue_full") == 2
    assert api.metric("request_success_total", finished_reason="error") == 0


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_not_ready(api: Any, state: str) -> None:
    if state == "draining":
        api.state.begin_drain()
    else:
        api.engine.state = state
    for reply in (api.get("/health"), api.get("/ping"), api.get("/v1/models"), api.complete(), api.chat()):
        assert check_shape(reply, 503)["code"] == state
    assert api.get("/version").status_code == 200
    assert api.get("/metrics").status_code == 200


def test_before_there_is_an_engine(make_api: Callable[..., Any]) -> None:
    api = make_api()
    api.state.engine = None
    assert check_shape(api.get("/health"), 503)["code"] == "starting"
    assert check_shape(api.complete(), 503)["code"] == "starting"


def test_dead_engine(api: Any) -> None:
    api.engine.die("the engine process was killed by SIGKILL")
    assert "SIGKILL" in check_shape(api.get("/health"), 503)["message"]
    assert check_shape(api.complete(), 503)["code"] == "engine_dead"
    assert api.get("/metrics").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_engine_dies_mid_call(make_api: Callable[..., Any], stream: bool) -> None:
    """Before the first token, so that both kinds of answer are an ordinary error; later ones need a socket."""
    engine = FakeEngine()

    def script(prompt: list[int], choice: int) -> list[int]:
        engine.die("gone")
        return [80, 81]

    engine._script = script
    check_shape(make_api(engine).complete(stream=stream), 503)


def test_public_text() -> None:
    assert public_text("cannot read /home/a/b/model.bin here") == "cannot read …/model.bin here"
    assert public_text("<Foo object at 0x7f00ab> broke\nTwice") == "<Foo> broke Twice"
    assert (
        public_text("pypi:x and org/model and https://host/a/b stay")
        == "pypi:x and org/model and https://host/a/b stay"
    )
    assert len(public_text("x" * 5000)) <= 500


def test_describe_keeps_our_own_words() -> None:
    reply = describe(RequestError("n is 0", param="n", code="c", status=400), "r")
    assert (reply.status, reply.message, reply.param, reply.code) == (400, "n is 0", "n", "c")
    assert describe(EngineDeadError("why"), "r").status == 503
    assert describe(HotswapError("inner"), "r").status == 500
