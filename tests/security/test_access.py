"""S-20 to S-23: who may call what. Deny by default, on the raw path; keys compared as digests; secrets never shown."""

from __future__ import annotations

import json
import logging
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import EngineDeadError, HotswapError, UsageError
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.admin import AdminGate
from hotswap.server.auth import PUBLIC_PATHS, KeyRing
from hotswap.server.cli.serve import with_key_from_environment

KEY, OTHER_KEY, ADMIN_KEY = "api-secret-1", "api-secret-2", "admin-secret"
BEARER = {"authorization": f"Bearer {KEY}"}
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND")


@pytest.fixture
def guarded(make_api: Callable[..., Any]) -> Any:
    return make_api(api_key=[KEY, OTHER_KEY], admin_key=ADMIN_KEY)


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of everything that the router serves, routers inside it included."""
    todo = list(app.routes)
    while todo:
        route = todo.pop()
        todo += getattr(getattr(route, "original_router", None), "routes", [])
        if isinstance(route, APIRoute):
            yield from ((method, route.path.replace("{name:path}", "tiny")) for method in route.methods or ())


def test_s21_every_route_needs_the_key(guarded: Any) -> None:
    found = sorted(routes(guarded.app))
    assert len(found) >= 18 and ("POST", "/admin/plugins/policy") in found and ("GET", "/openapi.json") in found
    for method, path in found:
        status = guarded.call(method, path).status_code
        assert (status == 401) == (path not in PUBLIC_PATHS), (method, path, status)


def test_s21_every_method_of_every_path_needs_it(guarded: Any) -> None:
    for path in {path for _, path in routes(guarded.app)} - PUBLIC_PATHS:
        for method in METHODS:
            assert guarded.call(method, path).status_code == 401, (method, path)


@pytest.mark.parametrize(
    "host", ["x/health?", "localhost/health", "127.0.0.1/version#", "localhost:80/health", "@health"]
)
def test_s21_the_host_header_takes_no_part(guarded: Any, host: str) -> None:
    assert guarded.get("/v1/models", headers={"host": host}).status_code == 401


TRICKS = [
    *(
        "//v1/models",
        "/v1/../health",
        "/health/../v1/models",
        "/v1%2fmodels",
        "/%2fv1/models",
        "/health%2f..%2fv1",
        "/.",
    ),
    *(
        "/health/",
        "/HEALTH",
        "/health;x=1",
        "/health%00",
        "/health%20",
        "/health/v1/models",
        "/v1/models?/health",
        "/ping/x",
    ),
    *("/metrics", "/docs", "/redoc", "/openapi.json", "/admin", "/static/x", "/.well-known/x", "/versio\u006e/"),
]


@pytest.mark.parametrize("path", TRICKS)
def test_s21_lookalikes_of_public_paths(live: Callable[..., Any], path: str) -> None:
    """Over a real socket, so that no client normalises the path."""
    server = live(api_key=[KEY])
    target = path.encode("latin-1").decode("latin-1")
    reply = server.raw(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 401"), (path, reply[:80])


def test_s21_websocket(guarded: Any) -> None:
    sent: list[dict[str, Any]] = []

    async def connect(path: str) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "subprotocols": []}
        await guarded.app(scope, receive, send)

    for path in ("/v1/completions", "/health", "/nope"):
        guarded.runner.run(connect(path))
    assert [message["type"] for message in sent] == ["websocket.close"] * 3


# S-22.


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_s22_all_keys_and_any_case_of_the_scheme(guarded: Any, scheme: str, key: str) -> None:
    assert guarded.get("/v1/models", headers={"authorization": f"{scheme} {key}"}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        *(
            b"Bearer api-secret-3",
            b"Bearer \xff\xfe",
            "Bearer ключ".encode(),
            "Bearer clé".encode("latin-1"),
            b"Bearer",
        ),
        *(b"", b"Basic api-secret-1", b"api-secret-1", b"Bearer api-secret-1 api-secret-1", b"Bearer\tapi-secret-1"),
        *(b"Bearer " + b"x" * 10_000, b"Bearer api-secret-1\x00", b"Bearer admin-secret", b"bearer:api-secret-1"),
    ],
)
def test_s22_a_wrong_key_is_401_and_never_500(guarded: Any, value: bytes) -> None:
    reply = guarded.get("/v1/models", headers={"authorization": value})
    assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_s22_keys_are_compared_as_digests_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    compare = secrets.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr("hotswap.server.auth.secrets.compare_digest", spy)
    ring = KeyRing(["a", "second-key", "c" * 100])
    for presented in (b"Bearer a", b"Bearer " + b"c" * 100, b"Bearer wrong", None):
        seen.clear()
        ring.accepts(presented)
        assert seen == [(32, 32)] * 3
    assert not [value for value in vars(ring).values() if "second-key" in str(value)]


# S-23.


def test_s23_secrets_are_not_shown() -> None:
    config = ServerConfig(api_key=[KEY], admin_key=ADMIN_KEY)
    shown = [
        repr(config),
        str(config),
        config.model_dump_json(),
        json.dumps(config.model_dump(mode="json")),
        f"{config}",
    ]
    shown += [repr(KeyRing([KEY])), repr(AdminGate(ADMIN_KEY)), repr(vars(AdminGate(ADMIN_KEY)))]
    assert not [text for text in shown if KEY in text or ADMIN_KEY in text]
    assert "***" in shown[0] and "***" in shown[2]


def test_s23_a_bad_key_is_refused_without_being_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in ("schlüssel-geheim", "a\nb-geheim", ""):
        with pytest.raises(UsageError) as refused:
            AdminGate(bad)
        assert "geheim" not in str(refused.value) and "admin key" in str(refused.value)


def test_s23_no_answer_and_no_log_holds_a_key(guarded: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    for method, path in sorted(routes(guarded.app)):
        for headers in ({}, BEARER, {**BEARER, "x-admin-key": ADMIN_KEY}, {**BEARER, "x-admin-key": "nearly"}):
            texts.append(guarded.call(method, path, headers=headers).text)
    shown = "\n".join(texts) + caplog.text
    assert len(texts) > 60
    assert not [key for key in (KEY, OTHER_KEY, ADMIN_KEY) if key in shown]


def test_s23_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", "of-the-environment")
    found = with_key_from_environment(ServerConfig()).admin_key
    assert found is not None and found.get_secret_value() == "of-the-environment"
    kept = with_key_from_environment(ServerConfig(admin_key="of-the-flag")).admin_key
    assert kept is not None and kept.get_secret_value() == "of-the-flag"


ADMIN_CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/admin/plugins", None),
    ("POST", "/admin/plugins/policy", {"name": "priority"}),
    ("POST", "/admin/reset_prefix_cache", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), ADMIN_CALLS)
def test_s23_admin_routes(make_api: Callable[..., Any], guarded: Any, method: str, path: str, body: Any) -> None:
    """Not there without an admin key; then behind both keys, each in its own place."""
    assert {path for _, path, _ in ADMIN_CALLS} == {p for _, p in routes(guarded.app) if p.startswith("/admin")}
    assert make_api().call(method, path, json=body).status_code == 404
    admin = {"x-admin-key": ADMIN_KEY}
    assert guarded.call(method, path, json=body, headers=admin).status_code == 401
    for wrong in ({}, {"x-admin-key": KEY}, {"x-admin-key": ""}, {"x-admin-key": "clé".encode("latin-1")}):
        reply = guarded.call(method, path, json=body, headers={**BEARER, **wrong})
        assert reply.status_code == 403 and reply.json()["error"]["type"] == "permission_error"
        assert reply.json()["error"]["code"] == "admin_key_required"
    assert not guarded.engine.calls
    assert guarded.call(method, path, json=body, headers={**BEARER, **admin}).status_code == 200
    only_admin = make_api(admin_key=ADMIN_KEY)
    assert only_admin.call(method, path, json=body).status_code == 403
    assert only_admin.call(method, path, json=body, headers=admin).status_code == 200


def test_s23_admin_routes_do_what_they_say(make_api: Callable[..., Any]) -> None:
    api = make_api(admin_key=ADMIN_KEY)
    headers = {"x-admin-key": ADMIN_KEY}
    api.engine.info.inventory = [{"kind": "policy", "name": "fcfs", "state": "active"}]
    assert api.get("/admin/plugins", headers=headers).json() == {"plugins": api.engine.info.inventory}
    body = {"name": "priority", "options": {"a": 1}}
    reply = api.post("/admin/plugins/policy", body, headers=headers)
    assert reply.json()["policy"] == "priority"
    assert api.engine.calls[-1] == ("set_policy", {"name": "priority", "options": {"a": 1}})
    assert api.post("/admin/reset_prefix_cache", {}, headers=headers).json() == {"reset": True}
    refused = api.post("/admin/plugins/policy", {"name": "nope"}, headers=headers)
    assert refused.status_code == 400 and "nope" in refused.json()["error"]["message"]
    for bad in ({}, {"name": 5}, {"name": "fcfs", "options": []}, {"name": "fcfs", "optoins": {}}):
        assert api.post("/admin/plugins/policy", bad, headers=headers).status_code == 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_s23_what_changes_state_needs_json(make_api: Callable[..., Any], content_type: str) -> None:
    """A web page cannot send JSON to another origin without asking first."""
    api = make_api(admin_key=ADMIN_KEY)
    headers = {"x-admin-key": ADMIN_KEY, "content-type": content_type}
    for method, path, _ in ADMIN_CALLS:
        if method == "POST":
            assert api.call(method, path, content=b"{}", headers=headers).status_code == 415
    assert not api.engine.calls


def test_s23_a_dead_engine_is_503_and_another_fault_is_told(make_api: Callable[..., Any]) -> None:
    api = make_api(admin_key=ADMIN_KEY)

    async def call(method: str, **_: Any) -> Any:
        raise faults.pop()

    api.engine.call = call
    faults: list[Exception] = [
        HotswapError("policy x: bad options at /home/me/x.py"),
        EngineDeadError("gone"),
        ValueError("s"),
    ]
    headers = {"x-admin-key": ADMIN_KEY}
    assert api.get("/admin/plugins", headers=headers).status_code == 500
    assert api.get("/admin/plugins", headers=headers).status_code == 503
    told = api.get("/admin/plugins", headers=headers)
    assert told.status_code == 400 and "/home/me" not in told.text


def test_s20_no_cors_and_host_allow_list(make_api: Callable[..., Any]) -> None:
    api = make_api()
    reply = api.call("OPTIONS", "/v1/completions", headers={"origin": "https://evil.example"})
    assert not [name for name in reply.headers if name.startswith("access-control-")]
    assert api.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
    assert ServerConfig().host == "127.0.0.1"


def test_s22_the_answer_s_time_says_nothing_about_the_key(make_api: Callable[..., Any]) -> None:
    """A sanity check of scale only: a right first half takes no longer than a wrong one, within a factor of three."""
    ring = KeyRing(["k" * 64])

    def median(value: bytes) -> float:
        times = []
        for _ in range(300):
            begin = time.perf_counter()
            ring.accepts(value)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    near, far = median(b"Bearer " + b"k" * 63 + b"x"), median(b"Bearer " + b"x" * 64)
    assert near < 3 * far and far < 3 * near


def test_engine_settings_hold_no_secret() -> None:
    assert "admin_key" not in EngineConfig().to_json() and "api_key" not in EngineConfig().to_json()
    assert FakeEngine().health() is None
