"""Attention `split`: what it refuses, and which steps go where."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    BatchGeometry,
    CacheSpec,
    Capabilities,
    KVLayout,
    LayerCache,
)
from hotswap.core.contracts.provider import DeviceInfo, Provider
from hotswap.core.errors import PluginError
from hotswap.core.plugin_manager import PluginManager
from hotswap.plugins.attention.split import SplitOptions

ORDER = ("block", "token", "head", "dim")


class Recorder(AttentionBackend):
    """Writes down what it is asked."""

    def __init__(self, name: str, capabilities: Capabilities, layout: KVLayout) -> None:
        self.name, self.capabilities, self.layout = name, capabilities, layout
        self.calls: list[str] = []

    def prepare(self, geometry: BatchGeometry) -> None:
        self.calls.append("prepare")

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        self.calls.append("write_kv")

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        self.calls.append("forward")
        return query


def recorder(name: str, *, layout: str = "token_major", blocks: tuple[int, ...] = (), **claims: Any) -> Recorder:
    capabilities = Capabilities(**{"dtypes": ("bfloat16", "float16"), **claims})
    return Recorder(name, capabilities, KVLayout(layout, ORDER, ORDER, blocks))


def split(one: Recorder, two: Recorder, block_size: int = 16) -> AttentionBackend:
    """Through the plugin manager, as from `--plugin attention=split,prefill=one,decode=two`."""
    manager = PluginManager(
        builtins=["hotswap.plugins.attention.split"],
        selections=[("command line", f"attention=split,prefill={one.name},decode={two.name}")],
    )
    manager.load()
    built = {one.name: one, two.name: two}
    asked: list[tuple[str, str]] = []

    def resolve(kind: str, name: str) -> object:
        asked.append((kind, name))
        return built[name]

    made = manager.build("attention", context(block_size=block_size, resolve=resolve))
    assert asked == [("attention", one.name), ("attention", two.name)]
    assert isinstance(made, AttentionBackend)
    return made


def context(**fields: object) -> AttentionContext:
    common = {
        "options": None,
        "config": EngineConfig(),
        "device": DeviceInfo("cuda", "a card", (9, 0)),
        "clock": ManualClock(),
    }
    spec = CacheSpec("full", 2, 64, 64, "bfloat16")
    return AttentionContext(**{**common, "spec": spec, **fields})  # type: ignore[arg-type]


def geometry(max_query_len: int) -> BatchGeometry:
    nothing = torch.zeros(2, dtype=torch.int32)
    return BatchGeometry(nothing, nothing, nothing[None], nothing, 2, 1, max_query_len, 8, 16)


@pytest.mark.parametrize(("max_query_len", "decodes"), [(1, True), (2, False), (500, False)])
def test_steps_of_one_token_a_request_go_to_decode(max_query_len: int, decodes: bool) -> None:
    prefill, decode = recorder("one"), recorder("two")
    backend = split(prefill, decode)
    layer = AttentionLayer(0, 2, 2, 64, 64, 1.0)
    tensor = torch.zeros(2, 2, 64)
    for _ in range(2):
        backend.prepare(geometry(max_query_len))
        backend.write_kv(tensor, tensor, (tensor, tensor))
        assert backend.forward(tensor, (tensor, tensor), layer) is tensor
    called, idle = (decode, prefill) if decodes else (prefill, decode)
    assert called.calls == ["prepare", "write_kv", "forward"] * 2
    assert not idle.calls


def test_a_step_does_not_follow_the_one_before() -> None:
    prefill, decode = recorder("one"), recorder("two")
    backend = split(prefill, decode)
    for length in (1, 7, 1):
        backend.prepare(geometry(length))
    assert (len(prefill.calls), len(decode.calls)) == (1, 2)


def test_other_layouts_are_refused_with_both_named() -> None:
    with pytest.raises(
        PluginError, match=r"one lays out the cache as token_major \(keys \[block, token, head, dim\].*two as "
    ):
        split(recorder("one"), recorder("two", layout="token_last"))


def test_blocks_must_suit_both() -> None:
    with pytest.raises(PluginError, match=r"two takes blocks of 256 tokens, not 16"):
        split(recorder("one"), recorder("two", blocks=(256,)))
    backend = split(recorder("one", blocks=(16, 256)), recorder("two", blocks=(256, 512)), block_size=256)
    assert backend.layout.block_sizes == (256,)
    assert split(recorder("one", blocks=(16, 32)), recorder("two")).layout.block_sizes == (16, 32)


@pytest.mark.parametrize(
    ("prefill", "decode", "both"),
    [
        ("any", "any", "any"),
        ("none", "any", "uniform_decode"),
        ("uniform_decode", "any", "uniform_decode"),
        ("none", "uniform_decode", "uniform_decode"),
        ("any", "uniform_decode", "uniform_decode"),
        ("any", "none", "none"),
    ],
)
def test_what_can_be_captured(prefill: str, decode: str, both: str) -> None:
    backend = split(recorder("one", graph_capture=prefill), recorder("two", graph_capture=decode))
    assert backend.capabilities.graph_capture == both


def test_it_claims_what_both_claim() -> None:
    flags = [
        field.name
        for field in dataclasses.fields(Capabilities)
        if field.name not in ("dtypes", "head_sizes", "graph_capture")
    ]
    for flag in flags:
        for one, two in ((True, True), (True, False), (False, True)):
            first: dict[str, Any] = {flag: one}
            second: dict[str, Any] = {flag: two}
            claimed = split(recorder("one", **first), recorder("two", **second)).capabilities
            assert getattr(claimed, flag) is (one and two), flag
    claimed = split(
        recorder("one", dtypes=("float32", "float16"), head_sizes=(64, 128)), recorder("two", head_sizes=(128, 256))
    ).capabilities
    assert (claimed.dtypes, claimed.head_sizes) == (("float16",), (128,))
    assert split(recorder("one"), recorder("two", head_sizes=(64,))).capabilities.head_sizes == (64,)


def test_a_refused_half_is_named() -> None:
    def refused(kind: str, name: str) -> object:
        raise PluginError(f"{kind} {name!r} cannot run here: no reason")

    manager = PluginManager(
        builtins=["hotswap.plugins.attention.split"],
        selections=[("command line", "attention=split,prefill=a,decode=b")],
    )
    manager.load()
    with pytest.raises(PluginError, match="attention 'a' cannot run here"):
        manager.build("attention", context(resolve=refused))


@pytest.mark.parametrize(
    "text", ["attention=split", "attention=split,prefill=a", "attention=split,prefill=split,decode=a"]
)
def test_options_are_checked_at_load(text: str) -> None:
    manager = PluginManager(builtins=["hotswap.plugins.attention.split"], selections=[("command line", text)])
    with pytest.raises(PluginError, match=r"decode|prefill"):
        manager.load()


def test_deterministic_is_refused() -> None:
    manager = PluginManager(
        builtins=["hotswap.plugins.attention.split"],
        selections=[("command line", "attention=split,prefill=a,decode=b")],
    )
    manager.load()
    with pytest.raises(PluginError, match="--deterministic"):
        manager.choose("attention", context(config=EngineConfig(deterministic=True)))


def test_it_is_never_chosen_by_itself() -> None:
    from hotswap.plugins.attention.split import hotswap_attention

    providers: list[Provider[AttentionBackend]] = list(hotswap_attention())
    assert [provider.automatic for provider in providers] == [False]
    assert providers[0].options is SplitOptions
