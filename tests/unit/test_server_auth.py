"""Keys, Host, request ids: deny by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotswap.core.config import ServerConfig
from hotswap.core.errors import UsageError
from hotswap.server.auth import KeyRing
from hotswap.server.cli.serve import check_exposure, with_key_from_environment

PUBLIC = {"/health", "/ping", "/version"}


def test_key_ring() -> None:
    ring = KeyRing(["alpha", "beta"])
    assert ring.accepts(b"Bearer alpha")
    assert ring.accepts(b"bearer beta")
    assert ring.accepts(b"BEARER  beta ")
    for wrong in (
        None,
        b"",
        b"alpha",
        b"Bearer",
        b"Bearer ",
        b"Bearer alph",
        b"Bearer alpha beta",
        b"Basic alpha",
        b"Bearer \xff\xe9",
    ):
        assert not ring.accepts(wrong)
    assert "alpha" not in repr(ring)
    assert not KeyRing([]).accepts(b"Bearer ")


@pytest.mark.parametrize("key", ["", " a", "a\n", "schlüssel"])
def test_unusable_keys_are_refused_at_start(key: str) -> None:
    with pytest.raises(UsageError):
        KeyRing([key])


def test_every_route_is_guarded_unless_public(make_api: Callable[..., Any]) -> None:
    api = make_api(api_key=["secret"])
    paths = {route.path for route in api.app.routes}
    assert (
        paths
        >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics"} | PUBLIC
    )
    for path in paths | {"/", "/nope", "/v1", "//v1/models", "/docs", "/openapi.json"}:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            status = api.call(method, path).status_code
            assert (status != 401) == (path in PUBLIC), (method, path, status)


@pytest.mark.parametrize(
    "path",
    [
        "/health/",
        "/health/x",
        "/HEALTH",
        "/health%2f",
        "/v1/models?/health",
        "/%2fhealth",
        "/v1/models#/health",
    ],
)
def test_lookalikes_of_public_paths_stay_guarded(make_api: Callable[..., Any], path: str) -> None:
    api = make_api(api_key=["secret"])
    assert api.get(path).status_code == 401
    for host in ("x/health?", "localhost/health", "localhost:80/health#"):
        assert api.get("/v1/models", headers={"host": host}).status_code == 401


def test_a_key_opens_and_refusals_look_alike(make_api: Callable[..., Any]) -> None:
    api = make_api(api_key=["secret", "other"])
    assert api.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 200
    bodies = set()
    for value in ("Bearer nope", "Bearer sécret".encode(), "Basic secret", ""):
        reply = api.get("/v1/models", headers={"authorization": value})
        assert reply.status_code == 401
        bodies.add(reply.text)
    bodies.add(api.post("/v1/completions", {}).text)
    assert len(bodies) == 1
    assert api.get("/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_metrics_public(make_api: Callable[..., Any]) -> None:
    assert make_api(api_key=["secret"], metrics_public=True).get("/metrics").status_code == 200
    assert make_api(api_key=["secret"]).get("/metrics").status_code == 401


def test_websocket_is_refused(make_api: Callable[..., Any]) -> None:
    api = make_api(api_key=["secret"])
    sent: list[dict[str, Any]] = []

    async def connect(path: str) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await api.app({"type": "websocket", "path": path, "headers": [], "query_string": b""}, receive, send)

    for path in ("/v1/completions", "/health"):
        api.runner.run(connect(path))
    assert [message["type"] for message in sent] == ["websocket.close"] * 2


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 400)]
)
def test_host_header_on_loopback(make_api: Callable[..., Any], host: str, status: int) -> None:
    assert make_api(host="127.0.0.1").get("/v1/models", headers={"host": host}).status_code == status
    assert (
        make_api(host="0.0.0.0", api_key=["k"])
        .get("/v1/models", headers={"host": host, "authorization": "Bearer k"})
        .status_code
        == 200
    )


def test_public_bind_without_key(capsys: pytest.CaptureFixture[str]) -> None:
    check_exposure(ServerConfig(host="127.0.0.1"))
    check_exposure(ServerConfig(host="0.0.0.0", api_key=["k"]))
    assert capsys.readouterr().err == ""
    check_exposure(ServerConfig(host="0.0.0.0"))
    warning = capsys.readouterr().err
    assert "WARNING" in warning and warning.count("\n") == 1
    with pytest.raises(UsageError, match="without an API key"):
        check_exposure(ServerConfig(host="0.0.0.0", strict_auth=True))


def test_key_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_API_KEY", "from-env")
    keys = with_key_from_environment(ServerConfig(api_key=["a"])).api_key
    assert [key.get_secret_value() for key in keys] == ["a", "from-env"]
    monkeypatch.delenv("HOTSWAP_API_KEY")
    assert with_key_from_environment(ServerConfig()).api_key == []


def test_request_id_is_a_label(api: Any) -> None:
    assert api.get("/health", headers={"x-request-id": "my-label 1"}).headers["x-request-id"] == "my-label 1"
    assert api.get("/nope", headers={"x-request-id": "a"}).headers["x-request-id"] == "a"
    assert api.get("/health").headers["x-request-id"].startswith("req-")
    for bad in ("x" * 129, "", "é".encode("latin-1"), " a"):
        reply = api.call("GET", "/health", headers={"x-request-id": bad})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "X-Request-Id"
    both = [api.complete(max_tokens=1) for _ in range(2)]
    assert both[0].json()["id"] != both[1].json()["id"]


def test_header_block_is_bounded(api: Any) -> None:
    reply = api.get("/health", headers={"x-long": "a" * 70_000})
    assert reply.status_code == 431
    assert reply.json()["error"]["code"] == "headers_too_large"
