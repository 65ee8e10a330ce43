"""hotswap: an inference engine for open-weight language models that can be taken apart with `--plugin`.

from hotswap import LLM, SamplingParams
outputs = LLM().generate("The capital of France is", SamplingParams(temperature=0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.version import __version__

if TYPE_CHECKING:
    from ._facade import LLM as LLM
    from .core.outputs import CompletionOutput as CompletionOutput
    from .core.outputs import RequestOutput as RequestOutput
    from .core.sampling_params import SamplingParams as SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for, so that `hotswap --help` and the API process stay light."""
    if name == "LLM":
        from ._facade import LLM

        return LLM
    if name == "SamplingParams":
        from .core.sampling_params import SamplingParams

        return SamplingParams
    if name in ("RequestOutput", "CompletionOutput"):
        from .core import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module 'hotswap' has no attribute {name!r}")
