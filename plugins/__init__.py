"""The built-in plugins. Each file is one that a third party could have written; nothing is imported until asked for."""

from __future__ import annotations

if __name__ != "hotswap.plugins":
    raise ImportError(f"this folder is the package 'hotswap.plugins', not {__name__!r}: write 'import hotswap.plugins'")

# Module paths. A module here is cheap to import: what is heavy, it imports when its `build` is called.
BUILTIN_PLUGINS: tuple[str, ...] = (
    "hotswap.plugins.hardware.cpu",
    "hotswap.plugins.hardware.cuda",
    "hotswap.plugins.hardware.rocm",
    "hotswap.plugins.executors.in_process",
    "hotswap.plugins.executors.inline",
    "hotswap.plugins.schedulers.continuous_batching",
    "hotswap.plugins.schedulers.policies.fcfs",
    "hotswap.plugins.schedulers.policies.priority",
    "hotswap.plugins.schedulers.policies.longest_prefix",
    "hotswap.plugins.schedulers.policies.shortest_first",
    "hotswap.plugins.schedulers.policies.mlfq",
    "hotswap.plugins.schedulers.policies.fair_share",
    "hotswap.plugins.schedulers.policies.deadline",
    "hotswap.plugins.schedulers.victims.newest",
    "hotswap.plugins.schedulers.victims.lowest_priority",
    "hotswap.plugins.schedulers.victims.fewest_blocks_lost",
    "hotswap.plugins.attention.paged_cpu",
    "hotswap.plugins.attention.flash_attn",
    "hotswap.plugins.attention.flashinfer",
    "hotswap.plugins.attention.split",
    "hotswap.plugins.attention.triton_paged",
    "hotswap.plugins.attention.torch_reference",
    "hotswap.plugins.kernels.llvm_cpu",
    "hotswap.plugins.kernels.triton",
    "hotswap.plugins.quantization.none",
    "hotswap.plugins.models.dense_decoder",
    "hotswap.plugins.models.transformers_fallback",
    "hotswap.plugins.loaders.providers",
    "hotswap.plugins.logits.no_repeat_ngram",
    "hotswap.plugins.observers.trace",
    "hotswap.plugins.parsers.hermes",
    "hotswap.plugins.parsers.llama3_json",
)
