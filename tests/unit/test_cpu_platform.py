"""The CPU platform: what hosts and cgroups of both versions grant, read from files that the tests write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotswap.core.clock import ManualClock
from hotswap.core.config import CacheConfig, EngineConfig
from hotswap.core.contracts.attention import CacheSpec, KVLayout
from hotswap.core.contracts.platform import PlatformContext
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.errors import ModelLoadError, UsageError
from hotswap.core.runner.kv_cache import MemoryTable, allocate_cache, bytes_per_block, group_layers, plan_cache
from hotswap.plugins.hardware import cpu
from hotswap.plugins.hardware.cpu.host import cpu_features, cpu_model, host_memory, usable_cores
from hotswap.plugins.hardware.cpu.platform import KV_CACHE_SHARE, MAX_KV_CACHE_BYTES, CpuPlatform
from hotswap.plugins.hardware.cpu.threads import thread_environment

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total: int, available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"}


def test_memory_without_cgroups(tmp_path: Path) -> None:
    memory = host_memory(write(tmp_path, meminfo(64 * GIB, 20 * GIB)))
    assert (memory.total, memory.available) == (64 * GIB, 20 * GIB)


def test_memory_in_a_cgroup_of_version_2_counts_droppable_pages(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        meminfo(64 * GIB, 50 * GIB)
        | {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
        },
    )
    memory = host_memory(root)
    assert (memory.total, memory.available) == (8 * GIB, 5 * GIB)


def test_memory_in_a_cgroup_of_version_1_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        meminfo(64 * GIB, 50 * GIB)
        | {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "cache 1\ntotal_inactive_file 0\n",
        },
    )
    memory = host_memory(root)
    assert (memory.total, memory.available) == (6 * GIB, 5 * GIB)


def test_version_1_says_no_limit_with_a_huge_number(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert host_memory(write(tmp_path, meminfo(16 * GIB, 9 * GIB) | files)).available == 9 * GIB


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert host_memory(write(tmp_path, meminfo(16 * GIB, 9 * GIB) | files)).available == 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/cpu.max": "max 100000\n",
                "sys/fs/cgroup/cpu.max": "100000 100000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_cores_are_limited_by_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 3, 5}, raising=False)
    assert usable_cores(write(tmp_path, files)) == cores


def test_model_and_features_of_x86_and_arm(tmp_path: Path) -> None:
    x86 = "processor: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16\n"
    root = write(tmp_path / "x86", {"proc/cpuinfo": x86})
    assert cpu_model(root) == "AMD EPYC 9B14"
    assert cpu_features(root) == {"avx2", "fma", "avx512", "avx512_bf16", "amx_bf16"}
    arm = write(tmp_path / "arm", {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16 i8mm sve\n"})
    assert cpu_features(arm) == {"neon", "arm_bf16", "arm_i8mm", "sve"}
    assert cpu_features(tmp_path / "none") == frozenset()


def test_this_host_is_described() -> None:
    info = CpuPlatform().probe()
    assert info.kind == "cpu" and info.name and info.memory_bytes > 2**28 and info.count >= 1


def test_kv_cache_takes_4_gib_or_40_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["hotswap.plugins.hardware.cpu.platform"]
    for available, expected in ((100 * GIB, MAX_KV_CACHE_BYTES), (5 * GIB, int(5 * GIB * KV_CACHE_SHARE))):
        monkeypatch.setattr(module, "host_memory", lambda a=available: type("M", (), {"total": 1, "available": a}))
        assert CpuPlatform().kv_cache_bytes(0.9) == expected


@pytest.mark.parametrize(
    ("stored", "served"),
    [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32"), ("q4_1", "bfloat16")],
)
def test_default_dtype(stored: str, served: str) -> None:
    assert CpuPlatform().default_dtype(stored) == served


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_memory_is_zero_and_taken_only_when_touched(dtype: torch.dtype) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    tensor = CpuPlatform().empty_kv_cache((2**18, 4, 16, 64), dtype)  # 2 or 4 GiB
    assert resident() - before < 2**26
    assert tensor.shape == (2**18, 4, 16, 64) and tensor.is_contiguous()
    tensor[1000] = 1.0
    assert float(tensor[999:1002].sum()) == 4 * 16 * 64
    assert resident() - before < 2**26


def test_the_thread_environment_adds_what_the_operator_has_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert thread_environment() == {"OMP_NUM_THREADS": str(usable_cores()), "OMP_WAIT_POLICY": "PASSIVE"}
    assert CpuPlatform().probe().count == usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert thread_environment() == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert CpuPlatform().probe().count == 7


def test_the_hook_offers_the_platform_without_torch() -> None:
    code = (
        "import sys; from hotswap.plugins.hardware.cpu import hotswap_platform as hook; provider = next(hook());"
        "provider.environment(); assert 'torch' not in sys.modules; print(provider.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=_child_env())
    assert (done.returncode, done.stdout.strip()) == (0, "cpu"), done.stderr


def _child_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_options_reach_the_platform() -> None:
    provider = next(cpu.hotswap_platform())
    assert provider.options is cpu.CpuOptions
    context = PlatformContext(
        options=cpu.CpuOptions(num_threads=3),
        config=EngineConfig(),
        device=DeviceInfo("host", "host"),
        clock=ManualClock(),
    )
    assert provider.build(context).probe().count == 3


# Sizing of the cache.

FULL = CacheSpec("full", num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")
WINDOW = CacheSpec("window", 3, 64, 64, "bfloat16", window=16)
NONE = CacheSpec("none", 0, 0, 0, "bfloat16")


def test_layers_of_one_spec_form_a_group() -> None:
    groups = group_layers([FULL, WINDOW, FULL, NONE, WINDOW])
    assert [(group.spec, group.layers) for group in groups] == [(FULL, (0, 2)), (WINDOW, (1, 4))]
    assert bytes_per_block(groups, 16) == 4 * 16 * 3 * 128 * 2


def test_the_cache_is_sized_by_override_then_bytes_then_measurement() -> None:
    groups = group_layers([FULL] * 30)
    block = 30 * 16 * 3 * 128 * 2
    assert plan_cache(groups, CacheConfig(num_gpu_blocks_override=7, kv_cache_memory_bytes=1), 0).num_blocks == 7
    given = plan_cache(groups, CacheConfig(kv_cache_memory_bytes=10 * block + 5), 0)
    assert (given.num_blocks, given.total_bytes, given.num_tokens) == (9, 10 * block, 144)
    measured = plan_cache(groups, CacheConfig(), 4 * GIB)
    assert measured.num_blocks == 4 * GIB // block - 1 and measured.total_bytes <= 4 * GIB
    assert (given.reason, measured.reason) == ("--kv-cache-memory-bytes", "measured free memory")


def test_a_cache_too_small_for_a_block_says_what_to_change() -> None:
    groups = group_layers([FULL] * 30)
    with pytest.raises(UsageError, match=r"takes 737,280 .*--kv-cache-memory-bytes.*--block-size"):
        plan_cache(groups, CacheConfig(kv_cache_memory_bytes=500_000), 0)
    with pytest.raises(ModelLoadError, match="keeps anything"):
        plan_cache(group_layers([NONE]), CacheConfig(), GIB)


def test_tensors_have_the_null_block_and_the_backends_layout() -> None:
    layout = KVLayout("token_last", ("block", "head", "dim", "token"), ("block", "head", "token", "dim"), (16, 32))
    groups = group_layers([FULL, FULL])
    plan = plan_cache(groups, CacheConfig(num_gpu_blocks_override=5), 0)
    caches = allocate_cache(CpuPlatform(), groups, [layout], plan)
    assert sorted(caches) == [0, 1]
    key, value = caches[1]
    assert (tuple(key.shape), tuple(value.shape)) == ((6, 3, 64, 16), (6, 3, 16, 64))
    assert key.dtype == torch.bfloat16
    assert sum(t.numel() * t.element_size() for pair in caches.values() for t in pair) == plan.total_bytes
    small = plan_cache(groups, CacheConfig(num_gpu_blocks_override=5, block_size=8), 0)
    with pytest.raises(UsageError, match=r"--block-size 8.*accepts 16, 32"):
        allocate_cache(CpuPlatform(), groups, [layout], small)


def test_the_memory_table_adds_up() -> None:
    table = MemoryTable()
    table.add("weights", GIB // 4)
    table.add("KV cache", 4 * GIB)
    assert table.lines() == ["weights      0.250 GiB", "KV cache     4.000 GiB", "total        4.250 GiB"]
