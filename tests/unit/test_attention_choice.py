"""Which attention backend is chosen by itself, on which card and with what installed, and what `plugins explain` says of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from installed_fakes import HOPPER, installed

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import AttentionContext, AttentionLayer, CacheSpec
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.errors import PluginError
from hotswap.core.plugin_inventory import explain
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.finding import find_provider

PLUGINS = [
    f"hotswap.plugins.attention.{name}"
    for name in ("paged_cpu", "flash_attn", "flashinfer", "split", "triton_paged", "torch_reference")
]
EVERYTHING = ("fa2", "fa3", "fa4", "flashinfer")
CPU = DeviceInfo("cpu", "a processor")
TURING = DeviceInfo("cuda", "a T4", (7, 5))
AMPERE = DeviceInfo("cuda", "an A100", (8, 0))
BLACKWELL = DeviceInfo("cuda", "a B200", (10, 0))
AMD = DeviceInfo("rocm", "an MI300X")


def context(device: DeviceInfo, **fields: object) -> AttentionContext:
    """A cache of 128 x 8 in bfloat16, blocks of 16, with changes: of the spec, the layer or the context."""
    dtype, size, block = str(fields.pop("dtype", "bfloat16")), fields.pop("size", 128), fields.pop("block", 16)
    assert isinstance(size, int) and isinstance(block, int)
    config = EngineConfig(deterministic=bool(fields.pop("deterministic", False)))
    layer = AttentionLayer(0, 32, 8, size, size, 0.1, **fields)  # type: ignore[arg-type]
    return AttentionContext(
        options=None,
        config=config,
        device=device,
        clock=ManualClock(),
        spec=CacheSpec("full", 8, size, size, dtype),
        block_size=block,
        layers=(layer,),
    )


def manager(*selections: str) -> PluginManager:
    made = PluginManager(builtins=PLUGINS, selections=[("command line", text) for text in selections])
    made.load()
    return made


@pytest.mark.parametrize(
    ("device", "packages", "changes", "chosen"),
    [
        (CPU, (), {}, "paged_cpu"),
        (CPU, EVERYTHING, {}, "paged_cpu"),
        (CPU, (), {"dtype": "float16"}, "torch_reference"),
        (TURING, (), {"dtype": "float16"}, "triton_paged"),
        (TURING, EVERYTHING, {"dtype": "float16"}, "triton_paged"),
        (AMPERE, (), {}, "triton_paged"),
        (AMPERE, ("fa2",), {"block": 256}, "triton_paged"),  # not measured as faster
        (AMPERE, ("fa3",), {}, "triton_paged"),
        (HOPPER, (), {}, "triton_paged"),
        (HOPPER, ("fa2", "fa3"), {}, "triton_paged"),
        (HOPPER, ("fa3",), {"dtype": "float32"}, "triton_paged"),
        (HOPPER, ("fa3",), {"deterministic": True}, "triton_paged"),
        (HOPPER, ("fa4",), {}, "triton_paged"),  # slower there
        (HOPPER, ("flashinfer",), {}, "triton_paged"),
        (BLACKWELL, ("fa3", "fa4", "flashinfer"), {}, "triton_paged"),
        (AMD, EVERYTHING, {}, "triton_paged"),
    ],
)
def test_automatic_choice(device: DeviceInfo, packages: Sequence[str], changes: dict[str, object], chosen: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with installed(*packages):
        assert manager().choose("attention", context(device, **changes)).name == chosen


@pytest.mark.parametrize(
    ("name", "device", "packages", "changes", "said"),
    [
        (
            "flash_attn",
            CPU,
            (),
            {},
            ["NVIDIA cards, the device is cpu", "FlashAttention 3 is not", "FlashAttention 2 is not"],
        ),
        ("flash_attn", TURING, ("fa2", "fa3"), {}, ["FlashAttention 3 needs compute capability 8.0", "a T4 has 7.5"]),
        ("flash_attn", HOPPER, ("fa3",), {"dtype": "float32"}, ["bfloat16 and float16, not float32"]),
        ("flash_attn", HOPPER, ("fa3",), {"size": 260}, ["multiples of 8 up to 256, not 260"]),
        ("flash_attn", HOPPER, ("fa3",), {"size": 84}, ["multiples of 8 up to 256, not 84"]),
        ("flash_attn", HOPPER, ("fa3",), {"block": 64}, ["FlashAttention 3 takes blocks of 1 to 63 tokens, not 64"]),
        ("flash_attn", HOPPER, ("fa2",), {}, ["FlashAttention 2 takes blocks of 256 tokens, not 16 (--block-size)"]),
        ("flash_attn", HOPPER, ("fa3",), {"sinks": object()}, ["it has no attention sinks, which layer 0 uses"]),
        ("flash_attn", HOPPER, ("fa3",), {"deterministic": True}, ["--deterministic"]),
        (
            "flash_attn",
            BLACKWELL,
            ("fa3",),
            {},
            ["needs compute capability 8.0 or newer and below 10.0, a B200 has 10.0"],
        ),
        (
            "flash_attn_4",
            AMPERE,
            ("fa4",),
            {},
            ["needs compute capability 9.0 or newer and below 12.0, an A100 has 8.0"],
        ),
        (
            "flash_attn_4",
            HOPPER,
            ("fa2",),
            {},
            ["FlashAttention 4 is not installed: pip install 'hotswap[flash-attn-4]'"],
        ),
        ("flash_attn_4", HOPPER, ("fa4",), {"size": 72}, ["multiples of 16 up to 256"]),
        ("flash_attn_4", BLACKWELL, ("fa4",), {"size": 256}, ["multiples of 16 up to 128"]),
        ("flashinfer", TURING, (), {"size": 80}, ["not installed", "capability 8.0", "64, 128, 256, not 80"]),
        ("flashinfer", AMD, ("flashinfer",), {}, ["NVIDIA cards, the device is rocm"]),
    ],
)
def test_every_reason_is_named(
    name: str, device: DeviceInfo, packages: Sequence[str], changes: dict[str, object], said: Sequence[str]
) -> None:
    with installed(*packages), pytest.raises(PluginError) as refused:
        manager(f"attention={name}").choose("attention", context(device, **changes))
    for phrase in said:
        assert phrase in str(refused.value)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_4", "flashinfer"])
def test_what_is_not_automatic_is_used_when_named(name: str) -> None:
    with installed("fa3", "fa4", "flashinfer"):
        assert manager(f"attention={name}").choose("attention", context(HOPPER)).name == name


def test_an_old_flash_attention_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.plugins.attention.flash_attn.versions.version", lambda name: "2.5.9.post1")
    with (
        installed("fa2"),
        pytest.raises(PluginError, match=r"FlashAttention 2\.5\.9\.post1 is installed, 2\.6 or newer"),
    ):
        manager("attention=flash_attn").choose("attention", context(AMPERE, block=256))


def test_looking_imports_none_of_them() -> None:
    import sys

    with installed(*EVERYTHING):
        for device in (HOPPER, CPU):
            explain(manager(), "attention", context(device))
        loaded = [
            name
            for name in sys.modules
            if name.partition(".")[0] in ("flash_attn", "flash_attn_interface", "flashinfer")
        ]
    assert not loaded


def test_the_version_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotswap")
    with installed("fa2", "fa3"):
        for block in (16, 256):
            manager("attention=flash_attn").build("attention", context(AMPERE, block=block))
    assert [record.getMessage() for record in caplog.records if "FlashAttention" in record.getMessage()] == [
        "attention: FlashAttention 3 (flash_attn_interface) on an A100, compute capability 8.0",
        "attention: FlashAttention 2 (flash_attn) on an A100, compute capability 8.0",
    ]


@pytest.mark.parametrize("packages", [("fa3",), ()])
def test_explain_says_why(packages: Sequence[str]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with installed(*packages):
        lines = explain(manager(), "attention", context(HOPPER))
    assert any("-> attention: triton_paged (automatic: priority" in line for line in lines)
    assert any("it runs on processors, the device is cuda" in line for line in lines)
    for name in ("flash_attn", "flash_attn_4", "flashinfer"):
        assert any(f"attention '{name}' " in line and ": used only when named" in line for line in lines), lines
    assert any("FlashAttention 3 is not installed" in line for line in lines) is not bool(packages)


def test_its_module_is_what_the_suite_finds() -> None:
    assert find_provider("attention", PLUGINS[1], "flash_attn_4").provider.automatic is False
