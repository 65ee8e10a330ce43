"""Rotary scaling out of a GGUF file, in config.json's terms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotswap.core.contracts.loader import ModelLoadError

from .gguf_container import GGUFFile

_MAX_FACTORS = 1 << 16


def rope_parameters(file: GGUFFile, architecture: str, head_dim: int, context: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` (None when there is none). Raises ModelLoadError for a kind that is not known."""

    def real(key: str) -> float | None:
        return file.get(f"{architecture}.rope.{key}", float)

    base = real("freq_base") or 10000.0
    result: dict[str, Any] = {"rope_theta": float(base), "rope_scaling": None}
    if "rope_freqs.weight" in file.tensors:
        result["rope_scaling"] = _llama3_scaling(_factors(file, "rope_freqs.weight"), base, file)
        return result
    if "rope_factors_long.weight" in file.tensors and "rope_factors_short.weight" in file.tensors:
        result["rope_scaling"] = {
            "rope_type": "longrope",
            "type": "longrope",
            "long_factor": _factors(file, "rope_factors_long.weight").tolist(),
            "short_factor": _factors(file, "rope_factors_short.weight").tolist(),
        }
        return result
    kind = file.get(f"{architecture}.rope.scaling.type", str)
    factor = real("scaling.factor") or real("scale_linear")
    if kind in (None, "none") and not (kind is None and factor and factor != 1.0):
        return result
    if factor is None:
        raise ModelLoadError(f"{file.path}: {architecture}.rope.scaling.factor is missing")
    if kind in (None, "linear"):
        result["rope_scaling"] = {"rope_type": "linear", "type": "linear", "factor": factor}
    elif kind == "yarn":
        original = file.get(f"{architecture}.rope.scaling.original_context_length", int) or int(context / factor)
        scaling = {"rope_type": "yarn", "type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if (attention := real("scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        result["rope_scaling"] = scaling
    else:
        raise ModelLoadError(
            f"{file.path}: the rotary scaling {kind!r} ({architecture}.rope.scaling.type) is not supported"
        )
    return result


def _factors(file: GGUFFile, name: str) -> NDArray[np.float32]:
    info = file.tensors[name]
    if info.type.name != "F32" or info.num_elements > _MAX_FACTORS:
        raise ModelLoadError(
            f"{file.path}: the tensor {name} must be a short F32 vector, not {info.type.name} {list(info.shape)}"
        )
    return file.raw(info).view(np.float32).copy()


def _llama3_scaling(factors: NDArray[np.float32], base: float, file: GGUFFile) -> dict[str, Any]:
    """The llama3 parameters behind the per-frequency divisors.

    The rule divides slow frequencies by `factor`, leaves fast ones alone and blends in between:
    1 / divisor = (1 - s) / factor + s with s = (original / wavelength - low) / (high - low). The blend fixes
    original / (high - low) and low / (high - low); with low = 1, as every model has it, that gives high and original.
    """
    values = factors.astype(np.float64)
    count = values.size
    factor = float(values.max())
    if not np.isfinite(values).all() or values.min() < 1.0 - 1e-4:
        raise ModelLoadError(f"{file.path}: rope_freqs.weight does not hold divisors of at least 1")
    if factor < 1.0 + 1e-4:
        return {"rope_type": "default", "type": "default"}
    rotations = base ** (-np.arange(count) / count) / (2 * math.pi)  # 1 / wavelength
    blended = (values > 1.0 + 1e-4) & (values < factor - 1e-4)
    low, high, original = 1.0, 4.0, 8192.0
    if blended.sum() >= 2:
        smooth = (1 / values[blended] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(rotations[blended], smooth, 1)
        high = 1.0 - 1.0 / intercept
        original = slope * (high - low)
        high, original = round(high, 3), float(round(original))
    smooth = np.clip((original * rotations - low) / (high - low), 0.0, 1.0)
    if np.abs(1 / ((1 - smooth) / factor + smooth) - values).max() > 1e-2 * factor:
        raise ModelLoadError(
            f"{file.path}: rope_freqs.weight does not follow the llama3 rule, the only one known for it"
        )
    return {
        "rope_type": "llama3",
        "type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }
