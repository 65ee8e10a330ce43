"""What both front ends share: a checkpoint's tokenizer and template, defaults, and the two processors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..clock import Clock
from ..config import EngineConfig
from ..contracts.loader import Checkpoint
from ..contracts.tool_parser import ToolParser
from ..errors import RequestError, UsageError
from ..sampling_params import SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .input_processor import InputLimits, InputProcessor
from .output_processor import OutputProcessor
from .request_processors import RequestProcessors
from .wire import EngineInfo

# generation_config.json's names -> ours; names absent here have no meaning for sampling.
_GENERATION_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class FrontEnd:
    """Built once the checkpoint is open; `connect` completes it when the engine's facts are known. No torch here."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        tokenizer_checkpoint: Checkpoint | None = None,
        processors: RequestProcessors | None = None,
    ) -> None:
        """processors: the logits processors that a request may name."""
        self._config = config
        self._processors = processors
        text_source = tokenizer_checkpoint or checkpoint
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self.tool_parser: ToolParser | None = None  # set by start_engine, which has the plugins
        if not config.model.skip_tokenizer_init:
            spec = text_source.tokenizer_spec()
            if spec is None:
                raise UsageError(
                    f"{text_source.path} has no tokenizer: give one with --tokenizer FOLDER, or serve token ids only "
                    "with --skip-tokenizer-init"
                )
            self.tokenizer = Tokenizer(spec)
            template = _template_text(config.model.chat_template) or text_source.chat_template
            if template is not None:
                self.chat_template = ChatTemplate.for_tokenizer(template, self.tokenizer)
        self.eos_token_ids = tuple(sorted({*checkpoint.eos_token_ids, *text_source.eos_token_ids}))
        self.generation_defaults = generation_defaults(checkpoint.generation_config, config)
        ceiling = config.model.override_generation_config.get("max_new_tokens")
        self._limits = InputLimits(config.max_logprobs, ceiling)

    def connect(
        self, info: EngineInfo, clock: Clock, *, seed: int | None = None, is_engine_process: bool = False
    ) -> None:
        """Called once, with the engine's facts. seed: makes requests without a seed of their own repeatable.
        is_engine_process: whether the engine, with its own checks, is in this process."""
        self.info = info
        limits = replace(self._limits, checks_prompt_ids=not is_engine_process)
        self.inputs = InputProcessor(info, self.tokenizer, self.eos_token_ids, clock, limits, seed, self._processors)
        self.outputs = OutputProcessor(self.tokenizer)

    def refresh(self, info: EngineInfo) -> None:
        """The engine's facts changed while it serves."""
        self.info = info
        self.inputs.refresh(info)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a raw prompt that the caller of Python code wrote, who is trusted: special tokens in it are tokens.
        Raises RequestError without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer: send token ids", param="prompt")
        return self.tokenizer.encode(prompt, allow_special=True)


def generation_defaults(generation_config: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Sampling defaults, under SamplingParams' names: the model author's, replaced by the operator's.

    A null means "not said". `do_sample` is not read: a client that sends no temperature expects OpenAI's default.
    Raises UsageError for a default that no request could use.
    """
    author = {} if config.model.generation_config == "none" else generation_config
    override = config.model.override_generation_config
    unknown = sorted(override.keys() - _GENERATION_NAMES.keys())
    if unknown:
        raise UsageError(
            f"--override-generation-config: {', '.join(map(repr, unknown))} is no sampling default; "
            f"there are {', '.join(_GENERATION_NAMES)}"
        )
    merged = {**author, **override}
    defaults = {ours: merged[theirs] for theirs, ours in _GENERATION_NAMES.items() if merged.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:  # now, and not in every request that relies on it
        raise UsageError(
            f"sampling defaults: {error.message}; correct it with --override-generation-config, or ignore the model's "
            "generation_config.json with --generation-config none"
        ) from error
    return defaults


def _template_text(value: str | None) -> str | None:
    """`--chat-template` is a file when such a file exists, else the template itself."""
    if value is None:
        return None
    if "{" not in value:
        path = Path(value)
        if not path.is_file():
            raise UsageError(f"--chat-template {value}: no such file, and it is no template either (no '{{')")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"--chat-template {value}: not a text in UTF-8") from error
    return value
