"""Kind `loader`: reads a checkpoint format. Opening one costs no torch import; only reading weights does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..errors import ModelLoadError
from .model import WeightSpec
from .provider import BuildContext, Provider

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Checkpoint", "Loader", "LoaderContext", "ModelLoadError", "Provider", "TokenizerSpec", "WeightSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderContext(BuildContext):
    """What the `build` of a loader gets."""


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Everything that the text layer needs to build a tokenizer. Plain data: it may cross a process boundary.

    tokenizer_json: the content of a `tokenizer.json`, in the format of the `tokenizers` library.
    add_bos, add_eos: whether encoding with special tokens starts with BOS, ends with EOS; None leaves it to the
        post-processor in `tokenizer_json`.
    special_tokens: the named ones a chat template may print ("bos_token", "eos_token", ...), by name.
    """

    tokenizer_json: bytes
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


class Checkpoint(ABC):
    """An open checkpoint. Owned by its opener, who closes it; tensors already handed out stay valid.

    The attributes are filled by the loader and are not changed afterwards.

    path: what was opened.
    config: the content of config.json, in HuggingFace's names whatever the format.
    generation_config: the content of generation_config.json; empty when there is none.
    chat_template: the default Jinja template, or None.
    eos_token_ids: the union of what config, generation config and tokenizer call end of sequence, sorted.
    needs_remote_code: whether the checkpoint names Python code of its own (`auto_map`). Nobody runs it here.
    total_bytes: size of the stored tensors.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    needs_remote_code: bool
    total_bytes: int

    @abstractmethod
    def tokenizer_spec(self) -> TokenizerSpec | None:
        """The tokenizer, or None when the checkpoint has none.

        Raises ModelLoadError when it has one of an unknown kind.
        """

    @abstractmethod
    def weight_names(self) -> list[str]:
        """Every tensor's name in HuggingFace terms, in storage order. Needs no torch."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, CPU tensor), each tensor once, in storage order; `names` limits which are read.

        dtype: floating-point tensors of two or more bytes an element are converted to it; integers and 8-bit floats,
        which mean something only to a quantization method, come as stored. None converts nothing.
        Raises ModelLoadError naming the file or tensor.
        """

    def weights_for(
        self, specs: Iterable[WeightSpec], dtype: torch.dtype, seed: int, device: str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights of a model that expects `specs`. A stored checkpoint yields what it holds; one that makes its weights up
        makes these, from `seed`, on `device`."""
        return self.weights(dtype)

    @abstractmethod
    def close(self) -> None:
        """Frees files and maps. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Loader(ABC):
    """Recognises and opens one checkpoint format.

    Called in the API process (config, tokenizer) and in workers (weights).
    """

    name: str

    @abstractmethod
    def accepts(self, path: Path) -> bool:
        """Whether `path`, an existing folder or file, is in this loader's format.

        Looks at names and magic bytes only.
        """

    @abstractmethod
    def open(self, path: Path, *, trust_remote_code: bool = False) -> Checkpoint:
        """Opens it. Reads metadata, no tensors. Raises ModelLoadError naming the file and what is wrong with it."""

    def open_metadata(self, path: Path) -> Checkpoint:
        """Opens it for its tokenizer and config alone: weights may be absent, and are not looked at."""
        return self.open(path)
