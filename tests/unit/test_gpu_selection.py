"""What is found of NVIDIA's and AMD's cards without opening one, and why a platform is refused: fake drivers, fake sysfs, fake
torch builds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.platform import PlatformContext, PlatformProvider
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.errors import PluginError
from hotswap.core.plugin_manager import PluginManager
from hotswap.plugins import BUILTIN_PLUGINS
from hotswap.plugins.hardware import cuda, rocm
from hotswap.plugins.hardware.accelerator.cards import Card, Host, facts, hide, refusals
from hotswap.plugins.hardware.accelerator.kfd import amd_host, gfx_name
from hotswap.plugins.hardware.accelerator.nvml import load_library, nvidia_host
from hotswap.plugins.hardware.accelerator.torch_build import (
    TorchBuild,
    reasons_against_cuda,
    reasons_against_rocm,
    torch_build,
    torch_folder,
)

GIB = 2**30


# A driver's library.


@dataclass
class FakeCard:
    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa1111"
    memory: int = 140 * GIB
    capability: tuple[int, int] = (9, 0)
    mig: int | None = 0  # None: the card knows no slices
    lost: bool = False


@dataclass
class FakeNvml:
    """NVML's functions as ctypes calls them: results go into what `byref` points to."""

    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    driver: int = 13000
    init_status: int = 0
    open_sessions: int = 0

    def nvmlInit_v2(self) -> int:
        self.open_sessions += not self.init_status
        return self.init_status

    def nvmlShutdown(self) -> int:
        self.open_sessions -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = self.driver
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        if self.cards[index.value].lost:
            return 15
        handle._obj.value = index.value + 1
        return 0

    def _card(self, handle: ctypes.c_void_p) -> FakeCard:
        assert handle.value is not None
        return self.cards[handle.value - 1]

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total = self._card(handle).memory
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._card(handle).capability
        return 0

    def nvmlDeviceGetMigMode(self, handle: ctypes.c_void_p, current: Any, pending: Any) -> int:
        mode = self._card(handle).mig
        if mode is None:
            return 3
        current._obj.value = mode
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, buffer: Any, length: ctypes.c_uint) -> int:
        buffer.value = self._card(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, buffer: Any, length: ctypes.c_uint) -> int:
        buffer.value = self._card(handle).uuid.encode()
        return 0

    @property
    def nvmlErrorString(self) -> Any:
        def describe(status: ctypes.c_int) -> bytes:
            return {3: b"Not Supported", 9: b"Driver Not Loaded", 15: b"GPU is lost"}[status.value]

        return describe


def test_the_facts_of_a_card() -> None:
    library = FakeNvml()
    found = nvidia_host(library, {})
    assert found.driver_cuda == (13, 0)
    assert facts(found, "cuda", 0) == DeviceInfo(
        kind="cuda",
        name="NVIDIA H200",
        capability=(9, 0),
        memory_bytes=140 * GIB,
        features=frozenset({"bf16", "fp8_e4m3fn", "tma", "pdl"}),
    )
    assert refusals(found) == []
    assert library.open_sessions == 0


@pytest.mark.parametrize(
    ("capability", "features"),
    [
        ((7, 5), set()),
        ((8, 0), {"bf16"}),
        ((8, 9), {"bf16", "fp8_e4m3fn"}),
        ((12, 0), {"bf16", "fp8_e4m3fn", "tma", "pdl"}),
    ],
)
def test_features_follow_the_compute_capability(capability: tuple[int, int], features: set[str]) -> None:
    (card,) = nvidia_host(FakeNvml([FakeCard(capability=capability, mig=None)]), {}).cards
    assert card.features == features
    assert not card.refusals


def test_reasons_against_a_card() -> None:
    old = nvidia_host(FakeNvml([FakeCard(name="Tesla P100", capability=(6, 0))]), {})
    assert refusals(old) == ["Tesla P100: compute capability 6.0; 7.0 or newer is needed"]
    (sliced,) = refusals(nvidia_host(FakeNvml([FakeCard(mig=1)]), {}))
    assert "cut into slices (MIG)" in sliced
    both = nvidia_host(FakeNvml([FakeCard(mig=1), FakeCard(uuid="GPU-bbbb2222")]), {})
    assert refusals(both) == []  # one can be used, when it is named
    with pytest.raises(PluginError, match=r"device 0, NVIDIA H200: it is cut .*; can be used: device=1"):
        facts(both, "cuda", 0)
    assert facts(both, "cuda", 1).count == 2
    with pytest.raises(PluginError, match="device=2: 2 cards are visible"):
        facts(both, "cuda", 2)


def test_reasons_against_a_driver() -> None:
    assert refusals(nvidia_host(None, {})) == ["no NVIDIA driver was found (libnvidia-ml.so.1 cannot be loaded)"]
    silent = FakeNvml(init_status=9)
    assert refusals(nvidia_host(silent, {})) == ["the NVIDIA driver does not answer (nvmlInit_v2: Driver Not Loaded)"]
    assert silent.open_sessions == 0
    assert refusals(nvidia_host(FakeNvml([]), {})) == ["the NVIDIA driver is there, but no card"]


def test_a_library_that_is_too_old() -> None:
    class Old:
        nvmlErrorString = None

    assert refusals(nvidia_host(Old(), {})) == ["the NVIDIA driver does not answer (it is too old to know nvmlInit_v2)"]


def test_a_card_that_does_not_answer_is_passed_over() -> None:
    library = FakeNvml([FakeCard(lost=True), FakeCard(uuid="GPU-bbbb2222")])
    found = nvidia_host(library, {})
    assert [card.uuid for card in found.cards] == ["GPU-bbbb2222"]
    assert library.open_sessions == 0
    (reason,) = refusals(nvidia_host(FakeNvml([FakeCard(lost=True)]), {}))
    assert reason == "card 0 cannot be asked (nvmlDeviceGetHandleByIndex_v2: GPU is lost)"


CARDS = tuple(Card(name, uuid, GIB) for name, uuid in (("a", "GPU-aa11"), ("b", "GPU-ab22"), ("c", "GPU-cc33")))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "abc"),
        ("0,1,2", "abc"),
        ("2,0", "ca"),
        (" 1 ", "b"),
        ("GPU-cc", "c"),
        ("gpu-AB22,0", "ba"),
        ("GPU-a", ""),  # of two cards
        ("1,7,0", "b"),  # what follows a card that is not there is not read
        ("1,-1,0", "b"),
        ("-1", ""),
        ("", ""),
        ("0,0", ""),
        ("0,GPU-aa11", ""),
        ("none", ""),
    ],
)
def test_visible_cards(value: str | None, names: str) -> None:
    shown = hide(Host(CARDS), "CUDA_VISIBLE_DEVICES", value)
    assert "".join(card.name for card in shown.cards) == names
    assert bool(refusals(shown)) == (not names)
    assert all("CUDA_VISIBLE_DEVICES" in reason for reason in refusals(shown))


def test_slices_are_refused_by_name() -> None:
    (reason,) = refusals(nvidia_host(FakeNvml(), {"CUDA_VISIBLE_DEVICES": "MIG-1234"}))
    assert reason.startswith("CUDA_VISIBLE_DEVICES names MIG-1234: slices of a card (MIG) are not supported")


def test_visible_cards_of_a_driver() -> None:
    library = FakeNvml([FakeCard(name="x"), FakeCard(name="y", uuid="GPU-yyyy")])
    assert facts(nvidia_host(library, {"CUDA_VISIBLE_DEVICES": "GPU-yyyy"}), "cuda", 0).name == "y"


# The kernel's files about AMD's cards.


def write_node(root: Path, number: int, properties: dict[str, int], memory: int = 0) -> None:
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    (folder / "mem_banks/0").mkdir(parents=True)
    (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
    (folder / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {memory}\nflags 0\n")


MI300 = {"simd_count": 1216, "gfx_target_version": 90402, "drm_render_minor": 128, "unique_id": 0xABCD}
MI210 = {"simd_count": 416, "gfx_target_version": 90010, "drm_render_minor": 129, "unique_id": 0x1234}


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    write_node(tmp_path, 0, {"cpu_cores_count": 64, "simd_count": 0}, memory=512 * GIB)
    write_node(tmp_path, 1, MI300, memory=192 * GIB)
    write_node(tmp_path, 10, MI210, memory=64 * GIB)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    product = tmp_path / "sys/class/drm/renderD128/device/product_name"
    product.parent.mkdir(parents=True)
    product.write_text("AMD Instinct MI300X OAM\n")
    return tmp_path


def test_the_facts_of_amd_cards(amd: Path) -> None:
    found = amd_host(amd, {})
    assert facts(found, "rocm", 0) == DeviceInfo(
        kind="rocm",
        name="AMD Instinct MI300X OAM",
        memory_bytes=192 * GIB,
        count=2,
        features=frozenset({"gfx942", "bf16", "fp8_e4m3fnuz"}),
    )
    second = facts(found, "rocm", 1)
    assert (second.name, second.memory_bytes, second.features) == (
        "AMD gfx90a",
        64 * GIB,
        frozenset({"gfx90a", "bf16"}),
    )


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ["gfx942", "gfx90a"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["gfx90a"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000abcd"}, ["gfx942"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["gfx90a", "gfx942"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx90a"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gfx90a"]),  # HIP counts what is left
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_visible_amd_cards(amd: Path, environment: dict[str, str], names: list[str]) -> None:
    found = amd_host(amd, environment)
    assert [next(name for name in card.features if name.startswith("gfx")) for card in found.cards] == names


def test_reasons_against_an_amd_host(amd: Path, tmp_path: Path) -> None:
    assert refusals(amd_host(tmp_path / "elsewhere", {})) == [
        "no AMD driver was found (the kernel has no /sys/class/kfd)"
    ]
    (amd / "dev/kfd").unlink()
    assert refusals(amd_host(amd, {})) == ["/dev/kfd cannot be opened; the user must be in the groups render and video"]
    for name in ("1", "10"):
        (amd / f"sys/class/kfd/kfd/topology/nodes/{name}/properties").unlink()
    assert refusals(amd_host(amd, {})) == ["the AMD driver is there, but no card"]


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110001, "gfx1101"), (90500, "gfx950")]
)
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


# torch's build.


def write_torch(folder: Path, cuda: str, hip: str, annotated: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kind = ": Optional[str]" if annotated else ""
    (folder / "version.py").write_text(
        f"from typing import Optional\n__version__ = '2.11.0'\ndebug = False\ncuda{kind} = {cuda}\n"
        f"git_version = 'abc'\nhip{kind} = {hip}\nrocm{kind} = None\n"
    )
    return folder


@pytest.mark.parametrize("annotated", [True, False])
def test_torch_build(tmp_path: Path, annotated: bool) -> None:
    assert torch_build(write_torch(tmp_path, "'13.0'", "None", annotated)) == TorchBuild("2.11.0", cuda="13.0")
    assert torch_build(write_torch(tmp_path, "None", '"6.4.43482"', annotated)) == TorchBuild("2.11.0", hip="6.4.43482")
    assert torch_build(write_torch(tmp_path, "None", "None", annotated)) == TorchBuild("2.11.0")
    assert torch_build(None) is None
    assert torch_build(tmp_path / "missing") is None


def test_torch_build_is_what_torch_says() -> None:
    import torch

    assert torch_build(torch_folder()) == TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


def test_reasons_against_a_torch_build() -> None:
    with_cuda, with_hip, bare = TorchBuild("2.11.0", "13.0"), TorchBuild("2.11.0", hip="6.4"), TorchBuild("2.11.0+cpu")
    assert reasons_against_cuda(with_cuda, (13, 0)) == []
    assert reasons_against_cuda(TorchBuild("2.11.0", "12.9"), (12, 2)) == []  # any driver of the same major version
    assert reasons_against_cuda(with_cuda, (0, 0)) == []  # no driver: that is another reason
    assert reasons_against_cuda(with_cuda, (12, 8)) == [
        "torch 2.11.0 needs a driver for CUDA 13, this one is for 12.8; install a newer driver"
    ]
    assert reasons_against_cuda(bare, (13, 0)) == ["torch 2.11.0+cpu is built without CUDA; install a build with CUDA"]
    assert reasons_against_cuda(with_hip, (13, 0)) == [
        "torch 2.11.0 is built for AMD's cards; install a build with CUDA"
    ]
    assert reasons_against_rocm(with_hip) == []
    assert reasons_against_rocm(with_cuda) == ["torch 2.11.0 is built without ROCm; install a build with it"]
    assert reasons_against_cuda(None, (13, 0)) == reasons_against_rocm(None) == ["torch is not installed"]


# The choice.

NO_CARD = Host(problems=("no driver",))
H200 = nvidia_host(FakeNvml(), {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """machine(nvidia, amd, build): what the hooks find."""

    def made(nvidia: Host, amd: Host, build: TorchBuild) -> PluginManager:
        monkeypatch.setattr(cuda, "_host", lambda visible: nvidia)
        monkeypatch.setattr(rocm, "amd_host", lambda root, environment: amd)
        for module in (cuda, rocm):
            monkeypatch.setattr(module, "torch_build", lambda folder: build)
        manager = PluginManager(builtins=BUILTIN_PLUGINS)
        manager.load()
        return manager

    yield made


def context() -> PlatformContext:
    return PlatformContext(
        options=None, config=EngineConfig(), device=DeviceInfo("host", "host"), clock=ManualClock(), role="api"
    )


def test_a_machine_with_a_card_takes_it(machine: Any, amd: Path) -> None:
    with_cuda, with_hip = TorchBuild("2.11.0", "13.0"), TorchBuild("2.11.0", hip="6.4")
    assert machine(H200, NO_CARD, with_cuda).choose("platform", context()).name == "cuda"
    assert machine(NO_CARD, amd_host(amd, {}), with_hip).choose("platform", context()).name == "rocm"
    # torch's build decides between two drivers.
    assert machine(H200, amd_host(amd, {}), with_cuda).choose("platform", context()).name == "cuda"
    assert machine(H200, amd_host(amd, {}), with_hip).choose("platform", context()).name == "rocm"


def test_a_machine_without_one_takes_its_processors(machine: Any) -> None:
    assert machine(NO_CARD, NO_CARD, TorchBuild("2.11.0", "13.0")).choose("platform", context()).name == "cpu"
    assert machine(H200, NO_CARD, TorchBuild("2.11.0+cpu")).choose("platform", context()).name == "cpu"


def test_a_named_platform_does_not_fall_back(machine: Any) -> None:
    manager = machine(NO_CARD, NO_CARD, TorchBuild("2.11.0+cpu"))
    with pytest.raises(PluginError, match=r"cannot run here: no driver; torch 2.11.0\+cpu is built without CUDA"):
        manager.choose_anew("platform", "cuda", context(), where="--plugin platform=cuda")


def test_the_inventory_says_why(machine: Any) -> None:
    rows = {
        (row.kind, row.name): row for row in machine(NO_CARD, NO_CARD, TorchBuild("2.11.0+cpu")).inventory(context())
    }
    assert rows["platform", "cuda"].state == "rejected"
    assert rows["platform", "cuda"].reasons == [
        "no driver",
        "torch 2.11.0+cpu is built without CUDA; install a build with CUDA",
    ]
    assert rows["platform", "rocm"].reasons[1:] == ["torch 2.11.0+cpu is built without ROCm; install a build with it"]


def test_plugins_command_sees_the_card(machine: Any) -> None:
    from types import SimpleNamespace

    from hotswap.server.cli.plugins_command import inventory_context

    settings: Any = SimpleNamespace(build=lambda model: EngineConfig())
    seen = inventory_context(machine(H200, NO_CARD, TorchBuild("2.11.0", "13.0")), settings).device
    assert (seen.kind, seen.name, seen.capability) == ("cuda", "NVIDIA H200", (9, 0))
    seen = inventory_context(machine(NO_CARD, NO_CARD, TorchBuild("2.11.0", "13.0")), settings).device
    assert seen.kind == "cpu"


def test_environment_leaves_what_the_operator_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*cuda.ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    (provider,) = cuda.hotswap_platform()
    assert isinstance(provider, PlatformProvider)
    assert provider.environment() == cuda.ENVIRONMENT
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert provider.environment().keys() == {"CUBLAS_WORKSPACE_CONFIG"}


@pytest.mark.skipif(load_library() is not None, reason="this machine has an NVIDIA driver")
@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="this machine has an AMD driver")
def test_here() -> None:
    """Without a driver: both refuse, and neither has imported torch to find out (the conformance suite checks that)."""
    for module in (cuda, rocm):
        (provider,) = module.hotswap_platform()
        assert any("driver was found" in reason for reason in provider.unavailable(context()))
        with pytest.raises(PluginError, match="0 cards are visible"):
            assert provider.facts is not None
            provider.facts(None)
