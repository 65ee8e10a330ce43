"""Quantization `none`: plain floating-point weights in the model's dtype, packed once for the chosen linear kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.quantization import QuantizationContext, QuantizationMethod, QuantizationProvider


def _build(context: QuantizationContext) -> QuantizationMethod:
    from .method import PlainQuantization

    return PlainQuantization(context)


def _is_plain(hf_config: dict[str, Any]) -> bool:
    return not hf_config.get("quantization_config")


@hookimpl
def hotswap_quantization() -> Iterator[QuantizationProvider]:
    yield QuantizationProvider(
        name="none",
        build=_build,
        detect=_is_plain,
        summary="Plain floating-point weights, packed for the linear kernel.",
    )
