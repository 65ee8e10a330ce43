"""Writes docs/operators/settings.md from the pydantic models of core/config.py:

    python docs/generate_settings.py

Flags, the config file and that page come from the same models; tests/unit/test_docs.py compares them.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.server.cli.flags import FLAG_ALIASES, SHORT_FLAGS, flag_name, flat_fields, spellings
from hotswap.server.cli.foreign_flags import RENAMED
from hotswap.server.cli.known_flags import KNOWN_FLAGS, KnownFlag

PAGE = Path(__file__).parent / "operators" / "settings.md"
HEAD = """# Settings

Generated from `core/config.py` with `python docs/generate_settings.py`; a test compares them.

Every setting has one name. `max_num_seqs` is the flag `--max-num-seqs` (underscores work too), the key `max-num-seqs`
or `max_num_seqs` of the file that `--config` names, and the keyword `LLM(max_num_seqs=...)`; `--plugin` is
`LLM(plugins=[...])`. Server settings have no keyword: `LLM` has no server. An unknown name is refused, with the nearest
one.

| | on the command line | in the file |
|---|---|---|
| the file | `--config FILE` | |
| a switch | `--enable-x`; off with `--no-enable-x` or `--disable-x` | `enable-x: true` or `false` |
| a number | `8192`, `8k` (8,000), `8K` (8,192) | the same; `auto` for what is chosen when it is not given |
| a list | the flag again for each value; `--served-model-name` and `--api-key` take several at once | a list, or one value |
| an object | JSON, or a key at a time: `--override-generation-config.temperature 0.5` | a mapping, or JSON in quotes |

```yaml
# hotswap serve --config hotswap.yaml
model: ./my-model
max-num-seqs: 64
plugin:
  - policy=priority
```

The file is YAML, as `vllm serve --config` reads it. A flag beats the file, wherever it stands; `plugin` lists add up. A
value that does not fit is refused with the name of the file and the key. Settings that ask for what this version does
not have are refused too: [what combines with what](../plugins/compatibility.md).

`HOTSWAP_API_KEY` in the environment is one more `--api-key`. It is read by `hotswap serve`, and by `hotswap chat --url`.

What a GPU adds is on [gpu.md](gpu.md). On a CPU `--gpu-memory-utilization`, `--enforce-eager`, `--max-graph-tokens` and
`--deterministic` change nothing (the size of the KV cache is on [models.md](models.md#memory); there are no graphs; the bits
are always the same); `--dtype bfloat16` means weights and KV cache, while activations are float32
([why](../architecture.md#differences-from-the-design)).
"""
NOT_YET = """
## Not in this version yet

Known from vLLM, and refused, except with the value in the second column, which changes nothing.

| flag | accepted | |
|---|---|---|
"""
ALWAYS_SO = """
## Without effect here

Flags of vLLM's command lines whose value in the second column says what is so in any case: accepted. Others are refused.

| flag | accepted | |
|---|---|---|
"""
FOREIGN = """
## Flags of other engines

Refused with our name for it. Others, which have no counterpart here, are refused with the reason.
[Moving from vLLM](from_vllm.md) walks through a whole command line.
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
    parts.append(NOT_YET)
    parts.extend(_known_row(known) for known in KNOWN_FLAGS if known.later)
    parts.append(ALWAYS_SO)
    parts.extend(_known_row(known) for known in KNOWN_FLAGS if not known.later)
    parts.append(FOREIGN)
    for engine, table in RENAMED.items():
        parts.append(f"\n### {engine}\n\n| there | here |\n|---|---|\n")
        parts.extend(f"| {_code(names)} | {_flags_as_code(here)} |\n" for names, here in table)
    return "".join(parts)


def _known_row(known: KnownFlag) -> str:
    flag = f"`{known.flag}`" + (f", `{known.short}`" if known.short else "")
    if known.switch:
        accepted = f"`--no-{known.flag[2:]}`" if known.neutral == ("false",) else "given"
    else:
        accepted = "anything" if "*" in known.neutral else _code(" ".join(value for value in known.neutral if value))
    return f"| {flag} | {accepted} | {_flags_as_code(known.reason)} |\n"


def _code(words: str) -> str:
    return " ".join(f"`{word}`" for word in words.split())


def _row(name: str, info: FieldInfo) -> str:
    flag = "`MODEL`, the first argument" if name == "model" else f"`{flag_name(name)}`"
    if name in SHORT_FLAGS:
        flag += f", `{SHORT_FLAGS[name]}`"
    if name in FLAG_ALIASES:
        flag += f", `{FLAG_ALIASES[name]}`"
    value = _value(info.annotation)
    value += "".join(f", `{word}` (= `{meant}`)" for word, meant in spellings(info).items())
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
    return {bool: "switch", int: "integer", float: "number", str: "text", SecretStr: "text"}[annotation]


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
    return re.sub(
        r"`[^`]*`|(?<![\w-])--?[a-z][\w.=-]*", lambda found: found[0] if found[0][0] == "`" else f"`{found[0]}`", text
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
