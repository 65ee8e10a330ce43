"""What lies beside the weights in a HuggingFace folder: config, generation config, tokenizer, chat template.

No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.contracts.loader import Checkpoint, ModelLoadError, TokenizerSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_JSON_BYTES = 256 << 20
_MAX_ADDED_BYTES = 8 << 20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class FolderMetadata:
    """The parsed files of a folder, and what follows from them together."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    chat_template: str | None

    @property
    def needs_remote_code(self) -> bool:
        """Whether any of the files names Python code of the repository's own."""
        return "auto_map" in self.config or "auto_map" in self.tokenizer_config

    def tokenizer_spec(self) -> TokenizerSpec | None:
        """The folder's tokenizer; None when there is no trace of one."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (self.folder / name).is_file()]
            if others:
                raise ModelLoadError(
                    f"{self.folder}: has {others[0]} but no tokenizer.json, the only form that can be read; "
                    "give another folder's tokenizer with --tokenizer"
                )
            return None
        content = path.read_bytes()
        named = named_special_tokens(self.folder, self.tokenizer_config)

        def token_id(name: str) -> int | None:
            found = _token_id(content, path, named[name]) if name in named else None
            return _first_int(self.config.get(name + "_id")) if found is None else found

        return TokenizerSpec(
            content,
            bos_id=token_id("bos_token"),
            eos_id=token_id("eos_token"),
            unk_id=token_id("unk_token"),
            pad_id=token_id("pad_token"),
            special_tokens=named,
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """The union of config (text part included), generation config and tokenizer."""
        found = _ints(self.config.get("eos_token_id"), self.generation_config.get("eos_token_id"))
        if isinstance(text := self.config.get("text_config"), Mapping):
            found |= _ints(text.get("eos_token_id"))
        tokenizer = self.folder / "tokenizer.json"
        eos = named_special_tokens(self.folder, self.tokenizer_config).get("eos_token")
        if eos is not None and tokenizer.is_file():
            found |= _ints(_token_id(tokenizer.read_bytes(), tokenizer, eos))
        return tuple(sorted(found))


def read_folder(folder: Path, *, config_needed: bool = True) -> FolderMetadata:
    """Raises ModelLoadError when config.json is missing or a file is not what it should be."""
    if config_needed and not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: has no config.json, so it is not a model in HuggingFace's form")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    return FolderMetadata(
        folder=folder,
        config=read_json(folder / "config.json"),
        generation_config=read_json(folder / "generation_config.json"),
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path}: over {MAX_JSON_BYTES >> 20} MiB, too large for what it should be")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def named_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like as strings, out of tokenizer_config.json, else special_tokens_map.json."""
    fallback = read_json(folder / "special_tokens_map.json")
    out: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = tokenizer_config.get(name, fallback.get(name))
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
    return out


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The default template: a file of its own before the entry in tokenizer_config.json."""
    if (path := folder / "chat_template.jinja").is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: not a text in UTF-8") from error
    value = read_json(folder / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{folder}: chat_template must be a string or a list of named templates")
    return value


def _token_id(content: bytes, path: Path, token: str) -> int | None:
    """The id of `token` in a tokenizer.json. Its vocabulary is parsed only when `added_tokens` does not have it."""
    match = re.search(rb'"added_tokens"\s*:\s*', content)
    try:
        if match is not None:
            part = content[match.end() : match.end() + _MAX_ADDED_BYTES].decode("utf-8", "replace")
            entries, _ = json.JSONDecoder().raw_decode(part)
            for entry in entries:
                if entry["content"] == token:
                    return int(entry["id"])
        vocabulary = json.loads(content)["model"]["vocab"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if isinstance(vocabulary, list):  # Unigram: pairs of piece and score
        return next((i for i, entry in enumerate(vocabulary) if entry[0] == token), None)
    found = vocabulary.get(token)
    return found if isinstance(found, int) else None


def _first_int(value: Any) -> int | None:
    values = value if isinstance(value, list) else [value]
    return next((item for item in values if type(item) is int), None)


def _ints(*values: Any) -> set[int]:
    def flat(items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            if isinstance(item, list):
                yield from item
            else:
                yield item

    return {item for item in flat(values) if type(item) is int and item >= 0}


class MetadataCheckpoint(Checkpoint):
    """The metadata of a HuggingFace folder whose weights are not looked at."""

    def __init__(self, folder: Path, *, config_needed: bool = True) -> None:
        """config_needed: False for a folder that only a tokenizer is wanted of."""
        metadata = read_folder(folder, config_needed=config_needed)
        self.path = folder
        self.config = metadata.config
        self.generation_config = metadata.generation_config
        self.chat_template = metadata.chat_template
        self.eos_token_ids = metadata.eos_token_ids()
        self.needs_remote_code = metadata.needs_remote_code
        self.total_bytes = 0
        self._metadata = metadata

    def tokenizer_spec(self) -> TokenizerSpec | None:
        return self._metadata.tokenizer_spec()

    def weight_names(self) -> list[str]:
        return []

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""
