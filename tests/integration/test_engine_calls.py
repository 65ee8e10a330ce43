"""A real engine process behind its client: the policy swapped under load, observers closed at the end, one cause of death."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.engine.assembly import make_manager
from hotswap.core.engine.client import EngineClient
from hotswap.core.engine.start import start_engine
from hotswap.core.errors import HotswapError, PluginError, RequestError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.core.trace import read_trace
from hotswap.plugins import BUILTIN_PLUGINS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def config_for(model: str, *plugins: str) -> EngineConfig:
    return EngineConfig.from_flat(
        model=model, plugin=list(plugins), max_model_len=128, kv_cache_memory_bytes=2**21, max_num_seqs=4
    )


def managed(config: EngineConfig) -> PluginManager:
    return make_manager(config, BUILTIN_PLUGINS)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


async def collect(client: EngineClient, prompt: list[int], count: int, **fields: Any) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    tokens: list[int] = []
    async for delta in client.generate(prompt, params, request_id="label", **fields):
        assert delta.error is None
        tokens += delta.outputs[0].token_ids
    return tokens


def states(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    active: dict[str, set[str]] = {}
    for row in rows:
        if row["state"] == "active":
            active.setdefault(row["kind"], set()).add(row["name"])
    return active


def test_calls_and_the_end(model: str, tmp_path: Path) -> None:
    """One process for all of it: to start one takes seconds."""
    trace = tmp_path / "trace.jsonl"
    config = config_for(model, f"observer=trace,path={trace}", "no_repeat_ngram")

    async def scenario() -> None:
        client = start_engine(config, lambda: managed(config))
        await client.start()
        try:
            await serve(client)
            for _ in range(100):
                if client._heartbeat.stalled_seconds:
                    break
                await asyncio.sleep(0.1)
            assert 0 < client._heartbeat.stalled_seconds < 60 and client.health() is None
        finally:
            await client.shutdown()

    async def serve(client: EngineClient) -> None:
        active = states(client.info.inventory)
        assert active["policy"] == {"fcfs"} and active["victim"] == {"newest"}
        assert active["loader"] == {"safetensors"} and active["source"] == {"local"}
        assert active["observer"] == {"trace"} and active["logits_processor"] == {"no_repeat_ngram"}
        prompts = [[5 + i, 6, 7] for i in range(10)]
        expected = [await collect(client, prompt, 40) for prompt in prompts]
        with pytest.raises(RequestError, match="does not serve by priority"):
            await collect(client, [5], 2, priority=1)
        tasks = [asyncio.create_task(collect(client, prompt, 40)) for prompt in prompts]
        for name in ("longest_prefix", "mlfq", "fcfs", "shortest_first", "priority"):
            await asyncio.sleep(0.02)
            answer = await client.call("set_policy", name=name, options={})
            assert answer["policy"] == name
        assert (answer["distribution"], answer["victim"]) == ("hotswap", "lowest_priority")
        assert await asyncio.gather(*tasks) == expected
        assert client.info.uses_priority and states(client.info.inventory)["policy"] == {"priority"}
        assert states(await client.call("inventory")) == states(client.info.inventory)
        assert len(await collect(client, [5], 2, priority=1)) == 2
        with pytest.raises(HotswapError, match=r"^unknown policy 'nope' \(set_policy\)"):
            await client.call("set_policy", name="nope")
        assert await client.call("check_integrity") is True
        stats = await client.call("stats")
        assert stats["num_observer_faults"] == 0 and stats["num_bad_frames"] == 0
        named = SamplingParams(max_tokens=8, detokenize=False, logits_processors={"no_repeat_ngram": {"size": 1}})
        async for _ in client.generate([5, 6], named, request_id="x"):
            pass
        with pytest.raises(RequestError, match="allowed: no_repeat_ngram"):
            await anext(aiter(client.generate([5], named.clone(logits_processors={"os": {}}), request_id="x")))

    run(scenario())
    rows = read_trace(trace)
    assert len(rows) == 22
    assert {row.output_tokens for row in rows[:20]} == {40}
    assert any(row.priority == 1 for row in rows)


def test_an_observer_is_closed_when_the_parent_vanishes(model: str, tmp_path: Path) -> None:
    plugin = tmp_path / "closing.py"
    plugin.write_text(
        "from pathlib import Path\n"
        "from hotswap.core.contracts import Observer, Provider, hookimpl\n"
        "class Closing(Observer):\n"
        "    def close(self):\n"
        f"        Path({str(tmp_path / 'closed')!r}).touch()\n"
        "@hookimpl\n"
        "def hotswap_observer():\n"
        "    yield Provider(name='closing', build=lambda context: Closing())\n"
    )
    config = config_for(model, str(plugin))

    async def scenario() -> None:
        client = start_engine(config, lambda: managed(config))
        await client.start()
        process = client._process
        assert process._child.stdin is not None
        process._child.stdin.close()  # as the kernel does when this process is killed
        assert await asyncio.to_thread(process.wait) == 0
        await client.shutdown()

    run(scenario())
    assert (tmp_path / "closed").exists()


def test_a_start_that_fails_says_why_once(model: str, tmp_path: Path) -> None:
    code = "import sys; from hotswap.server.cli.main import main; sys.exit(main())"
    path = tmp_path / "no such folder" / "t"
    serve = ["serve", model, "--port", "0", "--plugin", f"observer=trace,path={path}", "--max-model-len", "64"]
    result = subprocess.run(
        [sys.executable, "-c", code, *serve],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert result.returncode == PluginError.exit_code
    assert result.stderr.count(f"cannot write {path}") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert json.dumps(result.stdout) == '""'
