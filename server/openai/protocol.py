"""The honoured fields of each request, as strict pydantic models: no value is coerced ("5" is not 5, true is not 1, 5.0
is not 5).

Ranges are not checked here but in SamplingParams and the engine's input processor, which every front end goes through.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hotswap.core.errors import RequestError

from .fields import check_fields

ModelT = TypeVar("ModelT", bound="StrictModel")
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class StrictModel(BaseModel):
    """Unknown fields are judged before (fields.py), so they are ignored here."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class StreamOptions(StrictModel):
    """continuous_usage_stats: usage in every chunk, when include_usage is set as well."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(StrictModel):
    type: str


class SamplingFields(StrictModel):
    """What both generating routes share. None means "not said": the model's default, then SamplingParams' own."""

    model: str | None = None
    n: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Int64 | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` is checked by prompts.py, whose messages say more than a union's."""

    prompt: Any = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions. The messages' content is checked by core.text.messages, for every front end."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tool_choice: Any = None


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
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
