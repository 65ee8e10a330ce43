"""Rotary position embeddings: which frequencies a config asks for, and the table of cosines and sines that the `rope`
op reads.
 Definitions follow transformers' `modeling_rope_utils` (default, linear, dynamic NTK, YaRN, LongRoPE, Llama 3), with
one difference that serving needs: where transformers changes the frequencies while a sequence grows (dynamic,
longrope), they are chosen here once per process, from the longest context that will be served. Keys already in the
cache then never go stale, and a request's result does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelLoadError

_NEEDS_ORIGINAL_WINDOW = ("yarn", "longrope", "llama3")
_KNOWN_TYPES = ("default", "linear", "dynamic", *_NEEDS_ORIGINAL_WINDOW)
_ALIASES = {"su": "longrope"}  # the name that the first Phi-3 checkpoints used
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_EXTRA = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "truncate",
}
_HARMLESS = frozenset({"finetuned"})  # found in old configs; says how the model was made, not how it is run


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotation, in one spelling whatever the checkpoint's. Hashable, so that layers can share tables.

    rotary_dim: how many of a head's first dimensions are rotated. max_position: the config's `max_position_embeddings`.
    original_max_position: the window before scaling. extra: the other scaling parameters, sorted by name.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    factor: float | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """One of the extra parameters; `default` when it is absent or null."""
        return dict(self.extra).get(name, default)


def rope_config(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
    default_original_max_position: int | None = None,
    default_max_position: int = 2048,
) -> RopeConfig:
    """Reads the rotation out of a config.json.

    Knows `rope_parameters` (transformers 5, flat or one entry per layer type) and `rope_scaling` beside `rope_theta`
    (transformers 4), and both names of the type's key, `rope_type` and `type`. `layer_type` picks the entry of a
    nested one. Raises ModelLoadError on an unknown type or a missing parameter.
    """
    parameters = _parameters(config, layer_type)
    kind = _kind(parameters)
    missing = [name for name in _REQUIRED[kind] if parameters.get(name) is None]
    if missing:
        raise ModelLoadError(f"config.json: rope type {kind!r} needs {', '.join(missing)}, which it does not give")
    theta = _first(parameters.get("rope_theta"), config.get("rope_theta"), default_theta)
    partial = _first(parameters.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or rotary_dim <= 0:
        raise ModelLoadError(
            f"config.json: {rotary_dim} rotary dimensions (head_dim {head_dim} times {partial}); give an even count"
        )
    max_position = int(_first(config.get("max_position_embeddings"), default_max_position))
    original = max_position
    if kind in _NEEDS_ORIGINAL_WINDOW:
        # The field beside the parameters wins over the one inside, as in transformers (Phi-3 sets both).
        candidates = (config.get("original_max_position_embeddings"), default_original_max_position)
        original = int(_first(*candidates, parameters.get("original_max_position_embeddings"), max_position))
    result = RopeConfig(
        kind=kind,
        theta=float(theta),
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
        factor=None if parameters.get("factor") is None else float(parameters["factor"]),
        extra=_extra(parameters),
    )
    _check_factor_lists(result)
    return result


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    chosen = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(chosen, Mapping):
        raise ModelLoadError(f"config.json: rope parameters must be an object, not {chosen!r}")
    if layer_type is not None and isinstance(chosen.get(layer_type), Mapping):
        nested: Mapping[str, Any] = chosen[layer_type]
        return nested
    return chosen


def _kind(parameters: Mapping[str, Any]) -> str:
    kind = _first(parameters.get("rope_type"), parameters.get("type"), "default")
    kind = _ALIASES.get(kind, kind)
    if kind == "yarn" and parameters.get("short_factor") is not None:
        kind = "longrope"  # as some Phi-3 checkpoints call it
    if kind not in _KNOWN_TYPES:
        raise ModelLoadError(f"config.json: unknown rope type {kind!r}; known: {', '.join(_KNOWN_TYPES)}")
    return str(kind)


def _extra(parameters: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    read_elsewhere = {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
    }
    items = []
    for name, value in sorted(parameters.items()):
        if name in read_elsewhere or name in _HARMLESS or value is None:
            continue
        if name not in _EXTRA:
            raise ModelLoadError(f"config.json: rope parameter {name}={value!r} is not known, and may not be ignored")
        items.append((name, tuple(value) if isinstance(value, list) else value))
    return tuple(items)


def _check_factor_lists(config: RopeConfig) -> None:
    if config.kind != "longrope":
        return
    for name in ("short_factor", "long_factor"):
        values = config.get(name)
        if not isinstance(values, tuple) or len(values) != config.rotary_dim // 2:
            found = len(values) if isinstance(values, tuple) else repr(values)
            raise ModelLoadError(f"config.json: rope {name} needs {config.rotary_dim // 2} numbers, found {found}")


def _first(*candidates: Any) -> Any:
    """The first that is not None."""
    return next((value for value in candidates if value is not None), None)


def inverse_frequencies(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """The float32 [rotary_dim / 2] inverse frequencies and the factor on cosines and sines, for contexts up to
    `max_model_len`."""
    if config.kind == "dynamic":
        return _plain(_dynamic_base(config, max_model_len), config.rotary_dim), 1.0
    if config.kind == "yarn":
        return _yarn(config)
    if config.kind == "longrope":
        return _longrope(config, max_model_len)
    plain = _plain(config.theta, config.rotary_dim)
    if config.kind == "linear":
        plain /= config.factor or 1.0
    elif config.kind == "llama3":
        plain = _llama3(plain, config)
    return plain, 1.0


def _plain(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _dynamic_base(config: RopeConfig, max_model_len: int) -> float:
    factor, dim = config.factor or 1.0, config.rotary_dim
    length = max(max_model_len, config.max_position)
    stretch = (factor * length / config.max_position) - (factor - 1)
    return float(config.theta * stretch ** (dim / (dim - 2)))


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    dim, base, window = config.rotary_dim, config.theta, config.original_max_position
    factor = config.factor if config.factor is not None else config.max_position / window

    def dimension_of(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original window."""
        return (dim * math.log(window / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension_of(config.get("beta_fast", 32) or 32), dimension_of(config.get("beta_slow", 1) or 1)
    if config.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001  # avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1 - ramp  # 1: fast dimensions, left alone; 0: slow ones, interpolated
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies = (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep
    return frequencies, _yarn_attention_factor(config, factor)


def _yarn_attention_factor(config: RopeConfig, factor: float) -> float:
    given = config.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = config.get("mscale"), config.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _longrope(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    window = config.original_max_position
    factor = config.factor if config.factor is not None else config.max_position / window
    scale = config.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(window))
    stretch = torch.tensor(config.get("long_factor" if max_model_len > window else "short_factor"), dtype=torch.float32)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    return 1.0 / (stretch * config.theta**exponents), float(scale)


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    factor, window = config.factor or 1.0, config.original_max_position
    low, high = config.get("low_freq_factor"), config.get("high_freq_factor")
    wavelength = 2 * math.pi / plain
    slow = torch.where(wavelength > window / low, plain / factor, plain)
    blend = (window / wavelength - low) / (high - low)
    blended = (1 - blend) * slow / factor + blend * slow
    between = (wavelength >= window / high) & (wavelength <= window / low)
    return torch.where(between, blended, slow)


def cos_sin_table(config: RopeConfig, max_model_len: int, device: str | torch.device = "cpu") -> Tensor:
    """float32 [max_model_len, rotary_dim]: a row holds the cosines of one position, then its sines."""
    frequencies, scale = inverse_frequencies(config, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
    angles = positions.unsqueeze(1) * frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(scale)


class RopeTables:
    """Builds each distinct table once; layers that rotate alike share it."""

    def __init__(self, max_model_len: int, device: str | torch.device = "cpu") -> None:
        self._max_model_len = max_model_len
        self._device = device
        self._tables: dict[RopeConfig, Tensor] = {}

    def get(self, config: RopeConfig) -> Tensor:
        """float32 [max_model_len, rotary_dim] on the device."""
        if config not in self._tables:
            self._tables[config] = cos_sin_table(config, self._max_model_len, self._device)
        return self._tables[config]
