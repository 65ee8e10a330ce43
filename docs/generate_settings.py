"""Writes docs/operators/settings.md from the pydantic models of core/config.py:

    python docs/generate_settings.py

Flags, the config file and that page come from the same models; tests/unit/test_docs.py compares them.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.server.cli.flags import FOREIGN_FLAGS, SHORT_FLAGS, flag_name, flat_fields

PAGE = Path(__file__).parent / "operators" / "settings.md"
HEAD = """# Settings

Generated from `core/config.py` with `python docs/generate_settings.py`; a test compares them.

Every setting has one name. `max_num_seqs` is the flag `--max-num-seqs` (underscores work too), the key `max-num-seqs`
or `max_num_seqs` of the file that `--config` names, and the keyword `LLM(max_num_seqs=...)`; `--plugin` is
`LLM(plugins=[...])`. Server settings have no keyword: `LLM` has no server. A flag wins over the file. An unknown name is
refused, with the nearest one.

```yaml
# hotswap serve --config hotswap.yaml
model: ./my-model
max-num-seqs: 64
plugin:
  - policy=priority
```

A switch is turned off with `--no-`: `--no-enable-prefix-caching`. A list is filled by giving the flag again. Settings
that ask for what this version does not have are refused: [what combines with what](../plugins/compatibility.md).

`HOTSWAP_API_KEY` in the environment is one more `--api-key`. It is read by `hotswap serve`, and by `hotswap chat --url`.

In this version, on a CPU: `--gpu-memory-utilization` and `--enforce-eager` change nothing (the size of the KV cache is
on [models.md](models.md#memory)); `--dtype bfloat16` means weights and KV cache, while activations are float32
([why](../architecture.md#differences-from-the-design)).
"""
FOREIGN = """
## Flags of other engines

Refused, naming ours:

| there | here |
|---|---|
"""


def page() -> str:
    """The whole page."""
    sections: dict[type[BaseModel], list[str]] = {}
    for config in (EngineConfig, ServerConfig):
        for name, info, section in flat_fields(config):
            sections.setdefault(section, []).append(_row(name, info))
    parts = [HEAD]
    for section, rows in sections.items():
        title = (section.__doc__ or section.__name__).strip().splitlines()[0]
        parts.append(f"\n## {section.__name__}\n\n{title}\n\n| flag | value | default | |\n|---|---|---|---|\n")
        parts.extend(rows)
    parts.append(FOREIGN)
    parts.extend(f"| `{theirs}` | {_flags_as_code(ours)} |\n" for theirs, ours in FOREIGN_FLAGS.items())
    return "".join(parts)


def _row(name: str, info: FieldInfo) -> str:
    flag = "`MODEL`, the first argument" if name == "model" else f"`{flag_name(name)}`"
    if name in SHORT_FLAGS:
        flag += f", `{SHORT_FLAGS[name]}`"
    value = _value(info.annotation)
    bounds = ", ".join(_bounds(info.metadata)) or ", ".join(_bounds(_inner_metadata(info.annotation)))
    return f"| {flag} | {value}{f', {bounds}' if bounds else ''} | {_default(info)} | {info.description} |\n"


def _value(annotation: Any) -> str:
    """What may be given, in words."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_value(member) for member in typing.get_args(annotation) if member is not type(None))
    if origin is typing.Annotated:
        return _value(typing.get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if origin is list:
        return "text, repeatable"
    if origin is dict:
        return "JSON object"
    return {bool: "switch", int: "integer", float: "number", str: "text"}[annotation]


def _inner_metadata(annotation: Any) -> list[Any]:
    """The bounds inside `Annotated[int, Field(ge=1)] | None`."""
    for member in typing.get_args(annotation):
        if typing.get_origin(member) is typing.Annotated:
            return [bound for extra in typing.get_args(member)[1:] for bound in getattr(extra, "metadata", [])]
    return []


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for bound in metadata:
        if isinstance(bound, annotated_types.Ge):
            yield f"at least {bound.ge}"
        elif isinstance(bound, annotated_types.Gt):
            yield f"above {bound.gt}"
        elif isinstance(bound, annotated_types.Le):
            yield f"at most {bound.le}"


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    if default in (None, [], {}):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _flags_as_code(text: str) -> str:
    return " ".join(f"`{word}`" if word.startswith("--") else word for word in text.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
