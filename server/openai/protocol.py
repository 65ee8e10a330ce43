"""The honoured fields of each request, as strict pydantic models: no value is coerced ("5" is not 5, true is not 1, 5.0
is not 5).

Ranges are not checked here but in SamplingParams and the engine's input processor, which every front end goes through.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from hotswap.core.errors import RequestError
from hotswap.core.text.messages import ROLE
from hotswap.core.text.tools import TOOL_NAME

from .fields import check_fields

ModelT = TypeVar("ModelT", bound="StrictModel")
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
# What prompts.py and core.text.messages accept, for the API document.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"role": {"type": "string", "pattern": f"^{ROLE.pattern}$"}, "content": _CONTENT},
                    "required": ["role", "content"],
                },
                {
                    "type": "object",
                    "properties": {"role": {"const": "assistant"}, "content": {"anyOf": [_CONTENT, {"type": "null"}]}},
                    "required": ["role", "tool_calls"],
                },
            ]
        }
    ),
]


# What core.text.tools and tools.py accept.
Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                        "strict": {"enum": [False, None]},
                    },
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        }
    ),
]
ToolChoice = Annotated[Any, WithJsonSchema({"enum": ["none", "auto", None]})]


class StrictModel(BaseModel):
    """Unknown fields are judged before (fields.py), so they are ignored here."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class StreamOptions(StrictModel):
    """continuous_usage_stats: usage in every chunk, when include_usage is set as well."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    """A last event with the call's usage."""
    continuous_usage_stats: bool | None = None
    """Usage in every event."""
    include_obfuscation: bool | None = None
    """Accepted, without effect."""


class ResponseFormat(StrictModel):
    type: str


class SamplingFields(StrictModel):
    """What both generating routes share. None means "not said": the model's default, then SamplingParams' own."""

    model: str | None = None
    """A served name; the first one when absent."""
    n: int | None = None
    """Choices of each prompt."""
    temperature: Number | None = None
    """0 takes the most probable token."""
    top_p: Number | None = None
    """Draw from the most probable tokens that together have this probability."""
    top_k: int | None = None
    """Draw from this many most probable tokens; 0 and -1 mean all."""
    min_p: Number | None = None
    """Leave out tokens less probable than this share of the most probable one."""
    presence_penalty: Number | None = None
    """Taken from the logit of every token that the answer has already."""
    frequency_penalty: Number | None = None
    """The same, times how often."""
    repetition_penalty: Number | None = None
    """Divides the logits of tokens that prompt or answer have already; 1 is off."""
    seed: Int64 | None = None
    """Makes the draw repeatable; -1 and null draw a fresh one."""
    max_tokens: int | None = None
    """The longest answer in tokens."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens."""
    min_tokens: int | None = None
    """No end before this many tokens."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token."""
    stop: str | list[str] | None = None
    """Texts that end the answer: one, or up to 16."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the answer."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop text in the answer."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; true when absent."""
    spaces_between_special_tokens: bool | None = None
    """A space between special tokens that are shown; true when absent."""
    logit_bias: dict[str, Number] | None = None
    """Token id to what is added to its logit, -100 to 100."""
    bad_words: list[str] | None = None
    """Texts that the answer must not hold."""
    allowed_token_ids: list[int] | None = None
    """Draw from these tokens only."""
    prompt_logprobs: int | None = None
    """Alternatives to report at each position of the prompt; not in a stream."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens of the prompt, its last ones."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in logprobs as `token_id:N`."""
    return_token_ids: bool | None = None
    """Add token_ids and prompt_token_ids to the answer."""
    add_special_tokens: bool | None = None
    """Put BOS before a text prompt where the tokenizer does so; true when absent."""
    stream: bool | None = None
    """Answer in server-sent events."""
    stream_options: StreamOptions | None = None
    """With stream only."""
    user: Annotated[str, Field(max_length=512)] | None = None
    """Who asks; a policy may read it."""
    priority: Int64 | None = None
    """With a policy that reads it: lower goes first."""
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""
    request_id: str | None = None
    """A label that becomes part of the answer's id."""
    response_format: ResponseFormat | None = None
    """Only text in this version."""
    logits_processors: dict[str, dict[str, Any]] | list[str] | None = None
    """Active logits_processor plugins that this request names: a list, or name to options."""


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` is checked by prompts.py, whose messages say more than a union's."""

    prompt: Prompt = None
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    echo: bool | None = None
    """Begin the answer with the prompt."""
    suffix: str | None = None
    """Refused unless empty: no model here fills in the middle."""
    logprobs: int | None = None
    """Alternatives to report at each position."""


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions. The messages' content is checked by core.text.messages, for every front end."""

    messages: list[Message]
    """The conversation."""
    logprobs: bool | None = None
    """Report log-probabilities."""
    top_logprobs: int | None = None
    """Alternatives to report at each position; needs logprobs."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of the assistant's turn; true when absent."""
    continue_final_message: bool | None = None
    """Go on from the last message instead of answering it."""
    echo: bool | None = None
    """Begin the answer with the last message, if the assistant wrote it."""
    chat_template: str | None = None
    """Refused unless --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further arguments of the model's template; others are ignored."""
    documents: list[dict[str, Any]] | None = None
    """Handed to the model's template."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice = None
    """auto when absent and there are tools; none, and null, hide them."""
    parallel_tool_calls: bool | None = None
    """false: at most one call in an answer."""


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    """A served name; the first one when absent."""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Put BOS before a text prompt where the tokenizer does so; true when absent."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    """Shown to the model, as in a chat."""


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    """A served name; the first one when absent."""
    tokens: list[int]


@functools.cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(model.model_fields)


def parse_request(model: type[ModelT], body: dict[str, Any], *, allow_unknown: bool) -> ModelT:
    """Raises RequestError (400) naming the field. No value of the client is repeated in the message."""
    check_fields(body, _field_names(model), allow_unknown=allow_unknown)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _translate(error) from None


# pydantic's error types -> our sentences; its own messages may repeat the input.
_SENTENCES = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "extra_forbidden": "is not a field of this object",
    "greater_than_equal": "is too small",
    "less_than_equal": "is too large",
    "string_too_long": "is too long",
}


def _translate(error: ValidationError) -> RequestError:
    fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
    location = [part for part in fault["loc"] if part not in ("str", "list[str]")]
    path = ""
    for part in location[:6]:
        text = part if isinstance(part, int) or (len(part) <= 64 and part.isascii() and part.isprintable()) else "?"
        path += f"[{text}]" if isinstance(part, int) else f".{text}" if path else str(text)
    if path.startswith("stop") and (path == "stop" or path[4] == "["):
        return RequestError("stop must be a string or a list of strings", param="stop")
    if path.startswith("logits_processors"):
        what = "logits_processors must be a list of names, or an object of options by name"
        return RequestError(what, param="logits_processors")
    return RequestError(
        f"{path} {_SENTENCES.get(fault['type'], 'is not valid')}", param=path or None, code="invalid_type"
    )


def check_response_format(value: ResponseFormat | None) -> None:
    """Only text, until structured outputs are served. Raises RequestError (400)."""
    if value is not None and value.type != "text":
        known: tuple[Literal["json_object", "json_schema", "structural_tag"], ...] = (
            "json_object",
            "json_schema",
            "structural_tag",
        )
        what = (
            f"response_format {value.type} is not served by this version"
            if value.type in known
            else "response_format.type is unknown"
        )
        raise RequestError(f"{what}; only text is", param="response_format", code="unsupported_parameter")
