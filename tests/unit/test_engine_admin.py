"""Calls on a running engine: the policy is swapped between two steps, or nothing happens and one line says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.policy import Policy
from hotswap.core.engine.admin import EngineAdmin
from hotswap.core.engine.client import merge_rows
from hotswap.core.engine.engine_core import EngineCore
from hotswap.core.engine.wire import Call, EngineRequest
from hotswap.core.errors import HotswapError, PluginError, RequestError, UsageError
from hotswap.core.testing.tiny_models import make_tiny_model

PLUGIN = """
from collections import deque
from pydantic import BaseModel, Field
from hotswap.core.contracts import CompatibilityRow, KeyedPolicy, PolicyProvider, VictimRule, Provider, hookimpl

class Options(BaseModel):
    weight: int = Field(1, ge=1)

class Longest(KeyedPolicy):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.heard = set()
    def key(self, view):
        return -view.num_prompt_tokens
    def on_scheduled(self, view, num_tokens):
        self.heard.add("scheduled")
    def on_tokens(self, view, num_tokens):
        self.heard.add("tokens")
    def on_finish(self, view):
        self.heard.add("finish")

class Refuses(Longest):
    def push(self, view):
        raise ZeroDivisionError("cannot count")

class ByPriority(Longest):
    uses_priority = 1

class Loses(Longest):
    def push(self, view):
        pass

@hookimpl
def hotswap_policy():
    row = CompatibilityRow("policy=nocache", "prefix_caching", False, "policy nocache with prefix caching: drop one of them")
    yield PolicyProvider(name="longest", build=lambda c: Longest(c.options.weight), options=Options)
    yield PolicyProvider(name="refuses", build=lambda c: Refuses(1))
    yield PolicyProvider(name="by_priority", build=lambda c: ByPriority(1))
    yield PolicyProvider(name="loses", build=lambda c: Loses(1))
    yield PolicyProvider(name="nocache", build=lambda c: Longest(1), combines=(row,))
    yield PolicyProvider(name="crashes", build=lambda c: 1 / 0)
    yield PolicyProvider(name="nowhere", build=lambda c: Longest(1), default_victim="nobody")
    yield PolicyProvider(name="elsewhere", build=lambda c: Longest(1), unavailable=lambda c: ["the stars are wrong"])
"""
SETTINGS: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "policies.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def llm(model: str, plugin: str) -> Iterator[LLM]:
    with LLM(model, plugins=[plugin, "policy=longest"], **SETTINGS) as engine:
        assert ask(engine, "set_policy", name="fcfs")["victim"] == "newest"
        engine._engine.admin.info_changed = False
        yield engine


def admin_of(llm: LLM) -> EngineAdmin:
    return llm._engine.admin


def core_of(llm: LLM) -> EngineCore:
    return llm._engine.core


def ask(llm: LLM, method: str, **arguments: Any) -> Any:
    return admin_of(llm).answer(Call(1, method, arguments))


def active(llm: LLM, kind: str) -> list[str]:
    return [row["name"] for row in ask(llm, "inventory") if row["kind"] == kind and row["state"] == "active"]


def add(llm: LLM, request_id: int, count: int = 4, max_tokens: int = 8) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    assert core_of(llm).add_request(EngineRequest(request_id, [5] * count, sampling, float(request_id))) is None


def finish(llm: LLM) -> tuple[list[int], dict[int, list[int]]]:
    """The order of ends, and the tokens of each request, from here on."""
    order: list[int] = []
    tokens: dict[int, list[int]] = {}
    while core_of(llm).has_work():
        for update in core_of(llm).step():
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finish_reason is not None:
                order.append(update.request_id)
    return order, tokens


def test_the_policy_is_swapped_while_requests_run_and_wait(llm: LLM) -> None:
    for request_id in range(6):
        add(llm, request_id, count=4 + request_id)
    core = core_of(llm)
    seen = [update for _ in range(3) for update in core.step()]
    answer = ask(llm, "set_policy", name="longest", options={"weight": 3})
    assert answer == {"policy": "longest", "distribution": answer["distribution"], "version": "", "victim": "newest"}
    policy = cast(Any, core.mechanism.policy)
    shared = core.scheduler.policy is policy
    assert shared and policy.weight == 3 and len(policy) == 4
    assert active(llm, "policy") == ["longest"] and admin_of(llm).info_changed
    assert [row["name"] for row in llm.info.inventory if row["kind"] == "policy" and row["state"] == "active"] == [
        "longest"
    ]
    order, tokens = finish(llm)
    for update in seen:
        tokens[update.request_id] = update.new_token_ids + tokens.get(update.request_id, [])
    assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [{0, 1}, {4, 5}, {2, 3}], "two seats, the longest prompts next"
    assert {len(found) for found in tokens.values()} == {8}
    assert policy.heard == {"scheduled", "tokens", "finish"}
    llm.check_integrity()


def test_the_victim_rule_comes_along_unless_the_operator_named_one(llm: LLM, model: str) -> None:
    assert ask(llm, "set_policy", name="priority")["victim"] == "lowest_priority"
    assert active(llm, "victim") == ["lowest_priority"]
    assert type(core_of(llm).scheduler.victim).__name__ == "LowestPriority"
    assert ask(llm, "set_policy", name="fcfs", options={})["victim"] == "newest"
    with LLM(model, plugins=["victim=newest"], **SETTINGS) as named:
        assert ask(named, "set_policy", name="priority")["victim"] == "newest"


def test_priorities_count_only_while_the_policy_uses_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, detokenize=False)
    with pytest.raises(RequestError, match="does not serve by priority") as caught:
        llm.generate([[5, 6]], params, priority=[1], use_tqdm=False)
    assert caught.value.param == "priority"
    assert llm.generate([[5, 6]], params, priority=[0], use_tqdm=False)
    ask(llm, "set_policy", name="by_priority")
    assert llm.info.uses_priority is True, "a plugin's 1 would not decode in the API process"
    ask(llm, "set_policy", name="priority")
    assert llm.info.uses_priority is True
    assert llm.generate([[5, 6]], params, priority=[1], use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "longes"}, "unknown policy 'longes' (set_policy); did you mean 'longest'"),
        ({"name": "longest", "options": {"weight": 0}}, "option 'weight': should be greater than or equal to 1, got 0"),
        ({"name": "longest", "options": {"wait": 1}}, "has no option 'wait'"),
        ({"name": "fcfs", "options": {"a": 1}}, "takes no options"),
        ({"name": "refuses"}, "policy 'refuses' of policies.py failed to take over: ZeroDivisionError: cannot count"),
        ({"name": "loses"}, "policy Loses holds 0 of the 2 requests pushed into it"),
        ({"name": "crashes"}, "policy 'crashes' of policies.py failed to build: ZeroDivisionError"),
        ({"name": "nowhere"}, "unknown victim 'nobody' (default_victim of policy 'nowhere' of policies.py)"),
        ({"name": "elsewhere"}, "cannot run here: the stars are wrong"),
        ({"name": "nocache"}, "policy nocache with prefix caching: drop one of them"),
        ({"name": ""}, "'name' must be the name of a policy"),
        ({}, "'name' must be the name of a policy"),
        ({"name": "longest", "options": [1]}, "'options' must be an object"),
    ],
)
def test_a_refusal_is_one_line_and_changes_nothing(llm: LLM, arguments: dict[str, Any], expected: str) -> None:
    for request_id in range(4):
        add(llm, request_id)
    core = core_of(llm)
    core.step()
    before: tuple[Policy, Any] = core.mechanism.policy, core.scheduler.victim
    with pytest.raises(HotswapError) as caught:
        ask(llm, "set_policy", **arguments)
    message = str(caught.value)
    assert expected in message.replace(str(Path.cwd()) + "/", "") and "\n" not in message
    assert (core.mechanism.policy, core.scheduler.victim) == before and core.scheduler.policy is before[0]
    assert active(llm, "policy") == ["fcfs"] and not admin_of(llm).info_changed
    order, _ = finish(llm)
    assert sorted(order) == [0, 1, 2, 3]


def test_a_scheduler_that_keeps_its_policy_keeps_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(llm)
    before = core.mechanism.policy

    class Keeps(type(core.scheduler)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "victim" and value is not self.victim:
                raise PluginError("this scheduler goes with one victim rule")
            super().__setattr__(name, value)

    monkeypatch.setattr(core.scheduler, "__class__", Keeps)
    add(llm, 1)
    with pytest.raises(PluginError, match="goes with one victim rule"):
        ask(llm, "set_policy", name="priority")
    assert core.mechanism.policy is before and core.scheduler.policy is before
    assert active(llm, "policy") == ["fcfs"] and finish(llm)[0] == [1]


def test_a_broken_pool_is_an_answer_and_not_the_end(llm: LLM) -> None:
    assert ask(llm, "check_integrity") is True
    pool = core_of(llm).mechanism.kv.pool
    pool.ref_counts[3] += 1
    with pytest.raises(HotswapError, match="block 3 has reference count 1"):
        ask(llm, "check_integrity")
    pool.ref_counts[3] -= 1
    with pytest.raises(UsageError, match="unknown call 'no_such'"):
        ask(llm, "no_such")
    assert ask(llm, "stats")["num_running"] == 0
    assert ask(llm, "reset_prefix_cache") is True


def test_a_plugin_forbids_a_combination_at_start(model: str, plugin: str) -> None:
    with pytest.raises(UsageError, match=r"^policy nocache with prefix caching: drop one of them$"):
        LLM(model, plugins=[plugin, "policy=nocache"], **SETTINGS)
    with LLM(model, plugins=[plugin, "policy=nocache"], enable_prefix_caching=False, **SETTINGS) as engine:
        assert active(engine, "policy") == ["nocache"]


def test_what_a_stronger_source_overrides_forbids_nothing(plugin: str) -> None:
    from hotswap.core.engine.assembly import refuse_combinations
    from hotswap.core.plugin_manager import PluginManager
    from hotswap.plugins import BUILTIN_PLUGINS

    def manager(**by_source: str) -> PluginManager:
        given = [("command line", plugin), *((source.replace("_", " "), raw) for source, raw in by_source.items())]
        made = PluginManager(builtins=BUILTIN_PLUGINS, selections=given)
        made.load()
        return made

    refuse_combinations(manager(command_line="policy=longest", config_file="policy=nocache"), EngineConfig())
    with pytest.raises(UsageError, match="policy nocache with prefix caching"):
        refuse_combinations(manager(command_line="policy=nocache", config_file="policy=fcfs"), EngineConfig())


@pytest.mark.parametrize("row", ["('policy=other', 'x', False, 'no')", "3"])
def test_a_row_must_be_about_its_own_plugin(model: str, tmp_path: Path, row: str) -> None:
    made = f"CompatibilityRow{row}" if row.startswith("(") else row
    path = tmp_path / "wrong.py"
    path.write_text(
        "from hotswap.core.contracts import CompatibilityRow, PolicyProvider, hookimpl\n"
        "@hookimpl\ndef hotswap_policy():\n"
        f"    yield PolicyProvider(name='wrong', build=lambda c: None, combines=({made},))\n"
    )
    with pytest.raises(PluginError, match="not about itself: write CompatibilityRow\\('policy=wrong'"):
        LLM(model, plugins=[str(path)], **SETTINGS)


def test_explain_shows_what_combines(plugin: str) -> None:
    from hotswap.core.clock import SystemClock
    from hotswap.core.contracts.provider import BuildContext, DeviceInfo
    from hotswap.core.plugin_inventory import explain
    from hotswap.core.plugin_manager import PluginManager
    from hotswap.plugins import BUILTIN_PLUGINS

    manager = PluginManager(
        builtins=BUILTIN_PLUGINS, selections=[("command line", plugin), ("command line", "policy=longest")]
    )
    manager.load()
    context = BuildContext(options=None, config=EngineConfig(), device=DeviceInfo("cpu", "x"), clock=SystemClock())
    lines = explain(manager, "policy", context)
    assert "    with prefix_caching: refused: policy nocache with prefix caching: drop one of them" in lines
    assert "    with victim=newest: works: the newest request yields, whatever its class" in lines


def test_plugin_and_not_plugins() -> None:
    with pytest.raises(UsageError, match=r"LLM\(plugin=...\): write plugins=\[...\]"):
        LLM("x", plugin=["policy=fcfs"])


def test_one_inventory_of_two_processes() -> None:
    engine = [{"kind": "policy", "name": "a"}, {"kind": "loader", "name": "b"}, {"kind": "loader", "name": "c"}]
    own = [{"kind": "loader", "name": "b", "state": "active"}, {"kind": "loader", "name": "c"}]
    assert merge_rows(engine, own) == [engine[0], *own]
    assert merge_rows(engine, ()) == engine
