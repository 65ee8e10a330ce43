"""The shapes of the answers, for the API document and the tests that hold the answers against it.

The routes write their answers as bytes, made for speed; nothing here runs while a request is served.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class Answer(BaseModel):
    """Nothing but what is listed is ever sent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorBody(Answer):
    """message: for a person. param: the field at fault. code: for a program."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every fault, whatever its status."""

    error: ErrorBody


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(description="Prompt tokens whose KV the prefix cache held.")


class Usage(Answer):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(Answer):
    """stop_reason: the stop string or stop token id that ended the choice; null at the end of the sequence."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With prompt_logprobs, not in a stream.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class _Head(Answer):
    id: str
    created: int
    model: str


class CompletionAnswer(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head):
    """One event of a stream. usage: null except in the last event, or in all with continuous_usage_stats."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[dict[str, Any]] | None = None


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatAnswer(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With prompt_logprobs.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class ChatChunk(_Head):
    """One event of a stream. usage: as in CompletionChunk."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids, in the first event.")


class ModelCard(Answer):
    """max_model_len: the window that this server serves, which may be smaller than the model's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling_params: dict[str, Any] = Field(description="What a request that says nothing is sampled with.")


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(None, description="With return_token_strs.")


class DetokenizeAnswer(Answer):
    prompt: str


class HealthAnswer(Answer):
    status: Literal["ok"]


class VersionAnswer(Answer):
    version: str


class PluginList(Answer):
    """plugins: the rows of `hotswap plugins --json`, of the engine process."""

    plugins: list[dict[str, Any]]


class PolicyAnswer(Answer):
    """What is at work from now on."""

    policy: str
    distribution: str
    version: str
    victim: str


class ResetAnswer(Answer):
    """reset: false when cached prefixes are in use and nothing was forgotten."""

    reset: bool
