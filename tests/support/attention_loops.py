"""What each loop over keys of the Triton prefill kernel computes, compiled for an H200 without one.

    python tests/support/attention_loops.py

prints JSON: variant -> how often each float32 instruction stands in each loop. The environment must not ask for Triton's
interpreter, which compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hotswap.plugins.attention.triton_paged.prefill_kernel import prefill_kernel
from hotswap.plugins.attention.triton_paged.tuning import Sizes, pack, prefill_shape

GROUP, DIM, PAGE = 4, 64, 16
# What the loops share; masks (selp, setp) are what they may differ in.
ARITHMETIC = ("add", "sub", "mul", "fma", "neg", "max", "div", "ex2", "cvt")
SPLIT = re.compile(r"\n(?=\$L__BB\d+_\d+:)")
INSTRUCTION = re.compile(r"^\s*(?:@\S+\s+)?([a-z]\w*)((?:\.\w+)*)", re.MULTILINE)


def loops(window: int = 0, soft_cap: bool = False, alibi: bool = False) -> list[dict[str, int]]:
    """The kernel of --deterministic, in bfloat16."""
    shape = prefill_shape(Sizes("hopper", DIM, DIM, 2, 2), deterministic=True)
    packing = pack(GROUP, shape.rows)
    given: dict[str, Any] = {
        "NUM_HEADS": GROUP,
        "GROUP": GROUP,
        "HEADS": packing.heads,
        "HEAD_PARTS": packing.parts,
        "TOKENS": packing.tokens,
        "BLOCK_M": shape.rows,
        "BLOCK_N": shape.block_n,
        "BLOCK_DK": DIM,
        "BLOCK_DV": DIM,
        "DIM_K": DIM,
        "DIM_V": DIM,
        "PAGE": PAGE,
        "QUERY_TOKEN": 6 * DIM,
        "QUERY_HEAD": DIM,
        "CAUSAL": True,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "SINKS": False,
        "ALIBI": alibi,
        "UPCAST": False,
        "PDL": True,
        "sinks_ptr": None,
    }
    for name in ("KEY", "VALUE"):
        given |= {f"{name}_BLOCK": PAGE * DIM, f"{name}_TOKEN": DIM, f"{name}_HEAD": DIM}
    if not alibi:
        given["slopes_ptr"] = None
    types = {"table_stride": "i32", "scale": "fp32", "cap_scale": "fp32", "slopes_ptr": "*fp32"}
    types |= dict.fromkeys(("tiles_ptr", "table_ptr"), "*i32")
    types |= dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr"), "*bf16")
    names = prefill_kernel.arg_names
    compiled = compile(
        ASTSource(
            fn=prefill_kernel,
            signature={name: "constexpr" if name in given else types[name] for name in names},
            constexprs=given,
            attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": shape.warps, "num_stages": shape.stages},
    )
    counts = []
    for block in SPLIT.split(compiled.asm["ptx"]):
        found = [(name, rest) for name, rest in INSTRUCTION.findall(block) if rest.endswith("f32")]
        if any(name == "ex2" for name, _ in found):
            counts.append(Counter(name for name, _ in found if name in ARITHMETIC))
    return [dict(count) for count in counts]


def main() -> None:
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "soft cap and window": {"soft_cap": True, "window": 100},
        "ALiBi": {"alibi": True},
    }
    print(json.dumps({name: loops(**given) for name, given in variants.items()}))


if __name__ == "__main__":
    main()
