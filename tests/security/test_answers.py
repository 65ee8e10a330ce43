"""S-24, S-25, S-26: what leaves the server, in answers and in logs."""

from __future__ import annotations

import io
import json
import logging
import random
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from hotswap.core import logs
from hotswap.core.errors import EngineDeadError, HotswapError, RequestError
from hotswap.core.outputs import CompletionOutput, RequestOutput
from hotswap.core.testing.fake_engine import FakeEngine

KEY = "very-secret-key"
LEAKS = re.compile(
    rf" object at 0x|0x[0-9a-f]{{6,}}|/usr/|/home/|/root/|site-packages|Traceback|\.py\"|line \d+, in|{KEY}"
)
HEADERS = {"authorization": f"Bearer {KEY}"}


def clean(reply: Any) -> None:
    """No body and no frame of it tells about the machine."""
    assert not LEAKS.search(reply.text), reply.text[:500]
    assert KEY not in str(reply.headers)
    if reply.status_code >= 400 and reply.request.method != "HEAD":
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


class Faulty(FakeEngine):
    """Raises what it is told to, before or after the first delta."""

    fault: Exception = ValueError("x")
    late = False

    async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        if self.late:
            yield RequestOutput("r", None, [80], [CompletionOutput(0, text="a", token_ids=[68])])
        raise self.fault


PRIVATE = f"<object object at 0x7f00deadbeef> in /home/me/model/weights.bin, /usr/lib/python3/x.py; {KEY}"
FAULTS: list[Exception] = [
    ValueError(PRIVATE),
    KeyError(PRIVATE),
    OSError(2, PRIVATE, "/root/secret"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, PRIVATE),
    RecursionError(PRIVATE),
    MemoryError(PRIVATE),
    HotswapError(PRIVATE),
    AssertionError(PRIVATE),
    StopAsyncIteration(PRIVATE),
    RuntimeError(PRIVATE),
]
OURS: list[Exception] = [
    RequestError("at <X object at 0x7f00deadbeef> in /home/me/model/x.bin", param="p"),
    EngineDeadError("killed: /usr/lib/x/y.so at 0x7f00deadbeef"),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [*FAULTS, *OURS], ids=lambda fault: type(fault).__name__)
def test_s24_faults_say_nothing_of_the_machine(
    make_api: Callable[..., Any], fault: Exception, stream: bool, late: bool
) -> None:
    engine = Faulty()
    engine.fault, engine.late = fault, late
    api = make_api(engine, api_key=[KEY])
    for path, body in (
        ("/v1/completions", {"prompt": "a", "stream": stream}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": stream}),
    ):
        reply = api.post(path, body, headers=HEADERS)
        clean(reply)
        if late and stream:
            frames = [line for line in reply.text.split("\n\n") if line]
            assert frames[-1] == "data: [DONE]" and '"error"' in frames[-2]
        else:
            assert reply.status_code >= 400


def hostile_bodies() -> Iterator[bytes]:
    """A few hundred requests that are wrong in all the ways that we could think of, the same in every run."""
    chance = random.Random(24)
    base = {
        "prompt": "a",
        "max_tokens": 1,
        "stop": ["x"],
        "logit_bias": {"80": 1},
        "stream_options": {"include_usage": True},
    }
    values: list[Any] = [
        None,
        True,
        -1,
        2**70,
        1e308,
        "\ud83d",
        "\x00",
        "/usr/lib/python3",
        [],
        {},
        [[]],
        {"a": object.__name__},
    ]
    values += [PRIVATE, "{{ ''.__class__ }}", "<script>", {"__class__": 1}, ["a", 1], "a" * 3000]
    names = [
        *base,
        "messages",
        "n",
        "temperature",
        "model",
        "cache_salt",
        "user",
        "request_id",
        "tools",
        "echo",
        "logprobs",
    ]
    for _ in range(250):
        body: dict[str, Any] = {**base}
        for _ in range(chance.randint(1, 3)):
            body[chance.choice(names)] = chance.choice(values)
        yield json.dumps(body).encode()
    for _ in range(100):
        data = bytearray(json.dumps(base).encode())
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        yield bytes(data)


def test_s24_fuzzed_requests_get_clean_answers(make_api: Callable[..., Any]) -> None:
    api = make_api(api_key=[KEY])
    json_type = {**HEADERS, "content-type": "application/json"}
    statuses = set()
    for number, body in enumerate(hostile_bodies()):
        path = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")[number % 4]
        reply = api.call("POST", path, content=body, headers=json_type)
        clean(reply)
        statuses.add(reply.status_code)
    assert statuses <= {200, 400, 404} and 400 in statuses
    for path in ("/nope/0x7f00deadbeef", "/home/me", "/v1/models/usr/lib", "/admin", "/v1/completions"):
        for method in ("GET", "POST", "DELETE"):
            clean(api.call(method, path, headers=HEADERS))


def test_s24_the_check_can_fail(make_api: Callable[..., Any]) -> None:
    api = make_api()
    api.engine.info.model = "x"
    reply = api.complete("a")
    clean(reply)
    for leak in (PRIVATE, "Traceback (most recent call last)", 'a.py", line 3, in f', KEY, "0x7f00dead"):
        assert LEAKS.search(leak)


# S-25.


@pytest.mark.parametrize("label", ["a", "x" * 128, "my label 1", "!~", "trace=1;user=2", '{"a":1}'])
def test_s25_a_label_is_echoed_and_nothing_else(api: Any, label: str) -> None:
    reply = api.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": label})
    assert reply.headers["x-request-id"] == label
    assert label not in reply.json()["id"] or len(label) == 1
    request = api.engine.requests[-1]
    assert isinstance(request.request_id, int) and request.cache_salt is None and request.user == ""


@pytest.mark.parametrize(
    "label",
    [b"x" * 129, b"", b" a", b"a ", b"caf\xc3\xa9", b"a\x00b", b"a\x1bb", b"a\tb", b"\x7f", "é".encode("latin-1")],
)
def test_s25_what_is_no_label_is_refused(api: Any, label: bytes) -> None:
    reply = api.get("/v1/models", headers={"x-request-id": label})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "X-Request-Id"
    assert reply.headers["x-request-id"].startswith("req-")
    assert api.complete("a", request_id=label.decode("latin-1")).status_code == 400


def test_s25_the_same_label_twice_is_two_requests(make_api: Callable[..., Any]) -> None:
    """At the same time, too: a label is never a key."""
    import asyncio

    api = make_api(FakeEngine(step_seconds=0.005))
    body = {"prompt": "abcdef", "request_id": "same", "max_tokens": 5}

    async def both() -> list[Any]:
        call = api._client.post
        headers = {"x-request-id": "same"}
        return list(await asyncio.gather(*(call("/v1/completions", json=body, headers=headers) for _ in range(2))))

    replies = api.runner.run(both())
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]
    assert len({request.request_id for request in api.engine.requests}) == 2
    assert len(api.engine.finished) == 2 and not api.engine.aborted


# S-26.


@pytest.fixture(params=["json", "text"])
def logged(request: pytest.FixtureRequest) -> Iterator[tuple[str, io.StringIO]]:
    """Everything that is logged, as `hotswap serve --log-format ...` writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines() if request.param == "json" else logs.TextLines())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield request.param, stream
    root.removeHandler(handler)
    root.setLevel(level)


NASTY = [
    'x\n{"time": "2026", "level": "error", "logger": "hotswap.server", "message": "forged"}',
    "x\r\n12:00:00 ERROR hotswap.server: forged",
    "x\u2028forged\u2029forged\x85forged\x0bforged\x0cforged\x1eforged",
    "\x1b[2J\x1b[31mforged",
    "\ud83d lone",
    'quote " backslash \\ null \x00',
]


@pytest.mark.parametrize("text", NASTY)
def test_s26_no_text_forges_a_line(logged: tuple[str, io.StringIO], text: str) -> None:
    form, stream = logged
    logging.getLogger("hotswap.test").warning("a request has the field %s", text)
    written = stream.getvalue()
    assert written.endswith("\n") and len(written.splitlines()) == 1
    assert "\x1b" not in written
    if form == "json":
        line = json.loads(written)
        assert line["message"] == f"a request has the field {text}"
        assert line["level"] == "warning" and line["logger"] == "hotswap.test"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert set(line) == {"time", "level", "logger", "message"}


def test_s26_tracebacks_stay_inside_their_record(logged: tuple[str, io.StringIO]) -> None:
    form, stream = logged
    try:
        raise ValueError("first\n12:00:00 ERROR hotswap.server: forged")
    except ValueError:
        logging.getLogger("hotswap.test").exception("it failed")
    lines = stream.getvalue().splitlines()
    if form == "json":
        assert len(lines) == 1 and "forged" in json.loads(lines[0])["exception"]
    else:
        assert all(line.startswith("  ") for line in lines[1:]) and len(lines) > 3


def test_s26_lines_carry_the_request_s_label_and_no_prompt(
    logged: tuple[str, io.StringIO], make_api: Callable[..., Any]
) -> None:
    form, stream = logged
    api = make_api(api_key=[KEY], engine_settings={"enable_log_requests": True})
    secret = "the-private-prompt"
    headers = {**HEADERS, "x-request-id": "label-7"}
    messages = [{"role": "user", "content": secret}]
    for path, body in (
        ("/v1/completions", {"prompt": secret, "max_tokens": 3}),
        ("/v1/completions", {"prompt": secret, "max_tokens": 3, "stream": True}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3}),
        ("/tokenize", {"prompt": secret}),
        ("/v1/completions", {"prompt": secret, secret: 1}),
        ("/v1/completions", {"prompt": secret, "stop": [secret], "user": secret, "n": 0}),
    ):
        api.post(path, body, headers=headers)
    api.engine.fail_after = 1
    api.post("/v1/completions", {"prompt": secret}, headers=headers)
    written = stream.getvalue()
    ours = [line for line in written.splitlines() if "hotswap" in line]
    assert len(ours) >= 4
    assert secret not in written and KEY not in written and secret[::-1] not in written
    for line in ours:
        assert "label-7" in line
        if form == "json":
            assert json.loads(line)["request_id"] == "label-7"
    assert logs.request_id.get() is None


def test_s26_format_by_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    made: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: made.extend(options["handlers"]))
    for form, stream in (("auto", Terminal()), ("auto", io.StringIO()), ("json", Terminal()), ("text", io.StringIO())):
        logs.configure("info", form, stream)  # type: ignore[arg-type]
    found = [type(handler.formatter) for handler in made]
    assert found == [logs.TextLines, logs.JsonLines, logs.JsonLines, logs.TextLines]
