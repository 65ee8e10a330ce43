"""A model that says what it is told to: `--plugin hotswap.core.testing.scripted_model`, and checkpoints for it.

It runs in the real engine, with the real cache, attention and sampler; only the network is replaced by a script. The
script of a request is found by its first prompt token, which the model recalls through the paged KV cache: a request
whose blocks are mixed up, lost or not computed says somebody else's words, or stops the engine.

    folder = make_scripted_model(tmp_path, {"A": "one two", "B": [72, 73, {"base": 0.0, "70": 5.0, "71": 5.0}]})
    LLM(str(folder), plugins=[PLUGIN]).generate("A")  # "one two", then end of sequence
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..contracts.hooks import hookimpl
from ..contracts.model import Model, ModelContext, ModelProvider
from .tiny_models import VOCAB_SIZE, save_byte_tokenizer

PLUGIN = "hotswap.core.testing.scripted_model"
ARCHITECTURE = "HotswapScriptedForCausalLM"
SCRIPT_FILE = "script.json"  # beside config.json: the script when the plugin's options name none
SEAL = "script.seal"  # the only tensor, since every checkpoint has some
EOS_ID = 3
# The first prompt token is the first byte of the first message, and nothing is added.
PLAIN_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Row = int | dict[str, float]


class Part(BaseModel):
    """What requests with one first prompt token say.

    rows: one an output token: a token id, drawn for certain, or the whole row of logits: token id -> logit, and "base"
    for all others (0 when left out; "-inf" and "nan" are numbers here). After the last row comes end of sequence.
    prompt_tokens: how long their prompt is, so where the first row belongs; the script's own when None.
    """

    model_config = ConfigDict(extra="forbid")

    rows: list[Row]
    prompt_tokens: int | None = Field(None, ge=1)


class Script(BaseModel):
    """parts: by first prompt token, in decimal. default: of every other one. margin: by how much a row that is a token
    id prefers it. dtype: what the logits are rounded to, as a network of that type would give them."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    parts: dict[str, Part] = Field(default_factory=dict)
    default: Part = Field(default_factory=lambda: Part(rows=[]))
    prompt_tokens: int = Field(1, ge=1)
    margin: float = 100.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @classmethod
    def read(cls, path: str | Path) -> Script:
        return cls.model_validate_json(Path(path).read_bytes())


class ScriptedOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    script: Script | str | None = Field(
        None, description="The script, or the file that holds it; script.json in the model's folder when not given."
    )
    instant: int | None = Field(
        None, ge=0, description="Say this token for ever, in no time: no attention, no script, nothing in the cache."
    )


def _build(context: ModelContext) -> Model:
    from .scripted_network import InstantModel, ScriptedModel

    options = context.options
    if not isinstance(options, ScriptedOptions):
        raise TypeError(f"expected the options of the scripted model, got {type(options).__name__}")
    if options.instant is not None:
        return InstantModel(context, options.instant)
    script = options.script
    if not isinstance(script, Script):
        script = Script.read(script or Path(context.model_path) / SCRIPT_FILE)
    return ScriptedModel(context, script)


@hookimpl
def hotswap_model() -> Iterator[ModelProvider]:
    yield ModelProvider(
        name="scripted",
        build=_build,
        options=ScriptedOptions,
        architectures=(ARCHITECTURE,),
        summary="forces a given list of tokens, or rows of logits, by the first prompt token; for tests",
    )


def make_scripted_model(
    folder: str | Path,
    parts: Mapping[str | int, str | Sequence[Row] | Part] | None = None,
    *,
    default: str | Sequence[Row] = (),
    prompt_tokens: int = 1,
    max_model_len: int = 256,
    eos_token_ids: Sequence[int] = (EOS_ID,),
    generation_config: Mapping[str, Any] | None = None,
    chat_template: str = PLAIN_CHAT_TEMPLATE,
    vocab_size: int = VOCAB_SIZE,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Path:
    """Writes a checkpoint of the scripted model with the tiny models' byte tokenizer into `folder`, and returns it.

    parts: by first prompt token: an id, or a text that begins with it. A text as rows is its tokens. default: of every
    other request. vocab_size: the width of the logits. dtype: of the logits (see Script).
    """
    from ..contracts.loader import TokenizerSpec
    from ..text.tokenizer import Tokenizer

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_byte_tokenizer(folder)
    tokenizer = Tokenizer(TokenizerSpec((folder / "tokenizer.json").read_bytes(), bos_id=0, eos_id=EOS_ID))

    def part(rows: str | Sequence[Row] | Part) -> Part:
        if isinstance(rows, Part):
            return rows
        if isinstance(rows, str):
            return Part(rows=list(tokenizer.encode(rows, add_special_tokens=False)))
        return Part(rows=list(rows))

    def key(name: str | int) -> str:
        return str(tokenizer.encode(name, add_special_tokens=False)[0] if isinstance(name, str) else name)

    script = Script(
        parts={key(name): part(rows) for name, rows in (parts or {}).items()},
        default=part(default),
        prompt_tokens=prompt_tokens,
        dtype=dtype,
    )
    (folder / SCRIPT_FILE).write_text(script.model_dump_json(indent=1))
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "hotswap_scripted",
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        "bos_token_id": 0,
        "eos_token_id": list(eos_token_ids),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(dict(generation_config or {})))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": chat_template}, indent=1))
    _write_seal(folder / "model.safetensors")
    return folder


def _write_seal(path: Path) -> None:
    """One float32 zero in safetensors' form: length of the header, header, data."""
    header = json.dumps({SEAL: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
