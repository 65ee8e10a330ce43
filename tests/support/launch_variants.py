"""Which variants of the Triton kernels serving launches that were not launched before it. Without a card: launches are
recorded, and torch's references compute.

    python tests/support/launch_variants.py

prints JSON. The environment must not ask for Triton's interpreter, which has no variants.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import AttentionLayer, LayerCache
from hotswap.core.contracts.kernels import KernelContext, LinearKernel, PackedWeight
from hotswap.core.contracts.plan import NewRequest, ScheduledRequest, StepPlan
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.layers.ops import OpTable
from hotswap.core.runner.graphs import decode_sizes
from hotswap.core.runner.kv_cache import CachePlan, allocate_cache, group_layers
from hotswap.core.runner.largest_step import LargestStep
from hotswap.core.runner.model_runner import ModelRunner, RunnerLimits
from hotswap.core.runner.step_context import GroupCache
from hotswap.core.runner.transfer import Transfers
from hotswap.core.runner.trial_sampling import SamplingDemands
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.forward_harness import model_context, quantization_context
from hotswap.core.testing.templates.platform import MyPlatform, MyPlatformOptions
from hotswap.plugins.attention.triton_paged.backend import TritonPagedAttention
from hotswap.plugins.kernels.triton import hotswap_kernels
from hotswap.plugins.models.dense_decoder.model import DenseDecoder
from hotswap.plugins.quantization.none.method import PlainQuantization

CARD = DeviceInfo(kind="cuda", name="a card", capability=(9, 0))
MAX_ROWS, MAX_TOKENS, MAX_LEN, BLOCK = 12, 160, 8192, 16
GRAPH_TOKENS = 64
WIDTH = 5000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": WIDTH,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class Recorder:
    """Takes the place of every launch: keeps what the kernel would be compiled for."""

    def __init__(self) -> None:
        self.launched: set[tuple[str, str]] = set()
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            binder = self._binders.get(kernel.cache_key)
            if binder is None:
                binder = create_function_from_signature(kernel.signature, kernel.params, self._backend)
                self._binders[kernel.cache_key] = binder
            _, specialization, options = binder(*args, debug=False, instrumentation_mode="", **kwargs)
            self.launched.add((f"{kernel.__module__}.{kernel.__name__}", f"{specialization} {options}"))

        JITFunction.run = run


@dataclass
class Both:
    """Launches the kernel, which is recorded, and answers as the reference does."""

    kernel: Callable[..., Any]
    reference: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        self.kernel(*args)
        return self.reference(*args)


class BothLinear(LinearKernel):
    def __init__(self, kernel: LinearKernel, reference: LinearKernel) -> None:
        self.kernel, self.reference = kernel, reference

    def pack(self, weight: Tensor) -> PackedWeight:
        return self.kernel.pack(weight)

    def apply(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        self.kernel.apply(x, weight, bias, out_dtype)
        return self.reference.apply(x, weight, bias, out_dtype)

    def apply_gated(self, x: Tensor, weight: PackedWeight, op: str) -> Tensor | None:
        if self.kernel.apply_gated(x, weight, op) is None:
            return None
        gated: Tensor = getattr(OpTable.reference(), op)(self.reference.apply(x, weight, None))
        return gated

    def add_product(self, x: Tensor, weight: PackedWeight, residual: Tensor) -> bool:
        return self.kernel.add_product(x, weight, residual)  # torch's library adds


class Attention(TritonPagedAttention):
    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        return super().forward(query, cache, layer).zero_()


def triton_ops() -> OpTable:
    providers = {provider.op: provider for provider in hotswap_kernels()}
    reference = OpTable.reference()
    table: dict[str, Any] = {}
    for op in (field.name for field in fields(OpTable)):
        context = KernelContext(
            options=None, config=EngineConfig(), device=CARD, clock=SystemClock(), op=op, dtype="bfloat16"
        )
        make = BothLinear if op == "linear" else Both
        table[op] = make(providers[op].build(context), getattr(reference, op))
    return OpTable(**table)


class Server:
    """A model with its runner, and steps of made-up requests."""

    def __init__(self) -> None:
        self.ops, self.transfers = triton_ops(), Transfers()
        quantization = PlainQuantization(quantization_context(ops=self.ops, dtype=torch.bfloat16))
        self.model = DenseDecoder(
            model_context(MODEL, quantization, ops=self.ops, dtype=torch.bfloat16, max_model_len=MAX_LEN)
        )
        self.model.load_weights((spec.name, torch.randn(spec.shape) * 0.02) for spec in self.model.weight_specs())
        self.platform = MyPlatform(MyPlatformOptions())
        groups = group_layers(self.model.cache_specs())
        self.groups = [GroupCache(group, Attention(CARD)) for group in groups]
        plan = CachePlan(MAX_LEN // BLOCK, BLOCK, 0, "a test")
        layouts = [served.backend.layout for served in self.groups]
        caches = allocate_cache(self.platform, groups, layouts, plan)
        limits = RunnerLimits(MAX_ROWS, MAX_LEN, BLOCK, WIDTH)
        self.runner = ModelRunner(
            self.model, self.groups, caches, limits, self.ops, self.transfers, processed_logprobs=True
        )
        self.random = random.Random(1)
        self.served: list[int] = []
        self.num_steps = 0

    def trial(self) -> LargestStep:
        demands = SamplingDemands(max_logprobs=40, processed_logprobs=True)
        given = (self.model, self.groups, self.ops, self.platform, self.transfers)
        return LargestStep(*given, BLOCK, MAX_LEN, demands)

    def step(self, tokens: list[int]) -> None:
        """A row for each number of tokens, of a request that has had a prefix of any length."""
        pick = self.random
        new, rows = [], []
        self.num_steps += 1
        for at, count in enumerate(tokens):
            before = pick.choice((0, pick.randrange(100), pick.randrange(MAX_LEN - 200)))
            request_id = self.num_steps * 1000 + at
            known = before + count
            blocks = [[1] * -(-known // BLOCK)]
            prompt = pick.choice((known, max(known - 3, 1)))
            new.append(NewRequest(request_id, [5] * known, prompt, self.params(), blocks, before))
            rows.append(ScheduledRequest(request_id, count, before, pick.random() < 0.8 or count == 1))
        plan = StepPlan(self.num_steps, new, self.served, rows, sum(tokens))
        self.served = [request.request_id for request in new]
        self.runner.execute(plan)
        self.runner.sample(plan, None)

    def params(self) -> SamplingParams:
        pick = self.random
        settings: dict[str, Any] = {"temperature": pick.choice((0.0, 0.7)), "eos_token_ids": [2], "seed": 3}
        for name, value in (
            ("top_p", 0.9),
            ("top_k", 20),
            ("min_p", 0.1),
            ("repetition_penalty", 1.2),
            ("frequency_penalty", 0.5),
            ("logit_bias", {4: 1.0, 6: 100.0}),
            ("allowed_token_ids", [4, 5, 6]),
            ("bad_words_token_ids", [[1], [2, 3]]),
            ("min_tokens", 3),
            ("logprobs", pick.choice((0, 3, 40))),
            ("prompt_logprobs", pick.choice((0, 1, 40))),
        ):
            if pick.random() < 0.25:
                settings[name] = value
        return SamplingParams(**settings)


def steps(pick: random.Random, count: int) -> Iterator[list[int]]:
    """Tokens of each row, of all the kinds of steps that there are."""
    for _ in range(count):
        rows = pick.randint(1, MAX_ROWS)
        kind = pick.choice(([1], [1, 2], [1, 1, 7], [1, 9, 30], [3, 4], [100]))
        tokens = [pick.choice(kind) for _ in range(rows)]
        while sum(tokens) > MAX_TOKENS:
            tokens.pop()
        yield tokens
    yield [MAX_TOKENS]
    yield [MAX_TOKENS - MAX_ROWS + 1] + [1] * (MAX_ROWS - 1)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    recorder = Recorder()
    recorder.install()
    server = Server()
    step = server.trial()
    step.run(MAX_TOKENS, MAX_ROWS)
    largest = set(recorder.launched)
    step.warm_up(MAX_TOKENS, MAX_ROWS, GRAPH_TOKENS)
    for size in decode_sizes(MAX_ROWS):  # the capture of these graphs launches it
        step.decode(size, size)
    beside_graphs = set(recorder.launched)
    step.warm_up(MAX_TOKENS, MAX_ROWS, 0)
    warm = set(recorder.launched)
    all_steps = list(steps(server.random, 80))

    def served(chosen: list[list[int]]) -> set[tuple[str, str]]:
        recorder.launched.clear()
        for tokens in chosen:
            server.step(tokens)
        return set(recorder.launched)

    large = served([tokens for tokens in all_steps if sum(tokens) > GRAPH_TOKENS])
    small = served([tokens for tokens in all_steps if sum(tokens) <= GRAPH_TOKENS])
    found = {
        "served": small | large,
        "missed": (small | large) - warm,
        "missed beside graphs": large - beside_graphs,
        "missed without a warm-up": (small | large) - largest,
    }
    print(json.dumps({name: sorted(variants) for name, variants in found.items()}))


if __name__ == "__main__":
    main()
