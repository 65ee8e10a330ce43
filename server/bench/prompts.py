"""Prompts of a wanted length, without meaning: the same seed gives the same prompts, whichever engine is asked.

Where the server tokenizes for us, lengths are true; elsewhere one word is taken for one token, and the server's usage
says what it was.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

from hotswap.core.errors import UsageError

from .workload import PlannedRequest

# Short, common words: nearly every vocabulary has them as one token each, with the space before.
_TEXT: Final = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
kid body information back parent face others level office door health person art war history party result
change morning reason research girl guy moment air teacher force education
"""
WORDS: Final = tuple(_TEXT.split())
_FIT_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent: token ids or a text (completions), or messages (chat)."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier turn of a conversation: what was asked, and what was really answered."""

    prompt: Prompt
    answer: str
    answer_ids: list[int] | None
    prompt_tokens: int
    output_tokens: int


class PromptMaker(Protocol):
    """how: one sentence for the report."""

    how: str

    async def make(self, request: PlannedRequest, before: Turn | None) -> Prompt:
        """The prompt of a request. before: its conversation's last turn, None for the first."""
        ...


def _sources(seed: int, request: PlannedRequest) -> tuple[Random, Random]:
    """Of the shared prefix's words, and of the request's own."""
    return Random(f"{seed}/prefix/{request.prefix}"), Random(f"{seed}/request/{request.index}")


class TokenIdPrompts:
    """Random token ids out of `pool`, sent as ids: exactly as long as planned.

    tokenize: text -> ids, for an answer whose ids the server did not send.
    """

    how = "token ids, drawn at random from those of common words: prompt lengths are exact"

    def __init__(
        self, pool: Sequence[int], seed: int, tokenize: Callable[[str], Awaitable[list[int]]] | None = None
    ) -> None:
        if len(pool) < 2:
            raise UsageError("the tokenizer has too few tokens to make prompts of")
        self._pool = sorted(pool)
        self._seed = seed
        self._tokenize = tokenize

    async def make(self, request: PlannedRequest, before: Turn | None) -> Prompt:
        of_prefix, own = _sources(self._seed, request)
        if before is None:
            ids = [of_prefix.choice(self._pool) for _ in range(request.prefix_tokens)]
            missing = request.prompt_tokens - len(ids)
        else:
            answer = before.answer_ids
            if answer is None:
                if self._tokenize is None:
                    raise UsageError("a conversation in token ids needs the answers' ids")
                answer = await self._tokenize(before.answer) if before.answer else []
            ids = [*(before.prompt.token_ids or ()), *answer]
            missing = request.new_tokens or max(1, request.prompt_tokens - len(ids))
        return Prompt(token_ids=tuple(ids + [own.choice(self._pool) for _ in range(missing)]))


class WordPrompts:
    """Random common words as one text."""

    how = "words, one taken for one token: the server's usage says how long prompts really were"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def make(self, request: PlannedRequest, before: Turn | None) -> Prompt:
        of_prefix, own = _sources(self._seed, request)
        if before is None:
            words = [of_prefix.choice(WORDS) for _ in range(request.prefix_tokens)]
            missing = request.prompt_tokens - len(words)
            history = " ".join(words)
        else:
            missing = request.new_tokens or max(1, request.prompt_tokens - before.prompt_tokens - before.output_tokens)
            history = f"{before.prompt.text or ''}{before.answer}"
        new = " ".join(own.choice(WORDS) for _ in range(missing))
        return Prompt(text=f"{history} {new}" if history and new else history + new)


class ChatPrompts:
    """Messages of random common words; a shared prefix is the system message.

    count: messages -> prompt tokens as the server counts them, template included: texts are then grown or cut until the
    prompt has the planned length, or as near as words come. None: one word is taken for one token.
    """

    def __init__(self, seed: int, count: Callable[[Sequence[dict[str, Any]]], Awaitable[int]] | None = None) -> None:
        self._seed = seed
        self._count = count
        self._prefixes: dict[str, str] = {}
        self.how = (
            "chat messages of common words, fitted to the planned length with /tokenize (the template counts)"
            if count is not None
            else "chat messages of words, one taken for one token and the template not counted: the server's usage says "
            "how long prompts really were"
        )

    async def make(self, request: PlannedRequest, before: Turn | None) -> Prompt:
        of_prefix, own = _sources(self._seed, request)
        history: list[dict[str, Any]] = []
        if before is not None:
            history = [*(before.prompt.messages or ()), {"role": "assistant", "content": before.answer}]
            known = before.prompt_tokens + before.output_tokens
            wanted = known + request.new_tokens if request.new_tokens else request.prompt_tokens
        else:
            known, wanted = request.prefix_tokens, request.prompt_tokens
            if request.prefix_tokens:
                history = [{"role": "system", "content": await self._prefix(request, of_prefix)}]
        words = [own.choice(WORDS) for _ in range(max(1, wanted - known))]
        if self._count is not None:
            count = self._count
            words = await _fit(lambda tried: count(_with_user(history, tried)), words, wanted, own)
        return Prompt(messages=_with_user(history, words))

    async def _prefix(self, request: PlannedRequest, random: Random) -> str:
        """The text of a shared prefix: as many tokens more than a conversation without it."""
        if request.prefix not in self._prefixes:
            words = [random.choice(WORDS) for _ in range(request.prefix_tokens)]
            if self._count is not None:
                count, message = self._count, {"role": "user", "content": WORDS[0]}
                without = await count([message])
                words = await _fit(
                    lambda tried: count([{"role": "system", "content": " ".join(tried)}, message]),
                    words,
                    without + request.prefix_tokens,
                    random,
                )
            self._prefixes[request.prefix] = " ".join(words)
        return self._prefixes[request.prefix]


async def _fit(
    count: Callable[[Sequence[str]], Awaitable[int]], words: list[str], wanted: int, random: Random
) -> list[str]:
    """The list of words whose count is nearest to `wanted`, out of a few tries; `words` is the first one. Tokens per
    word are taken from the last two tries."""
    best, best_miss = words, math.inf
    before: tuple[int, int] | None = None  # (words, tokens)
    for _ in range(_FIT_ROUNDS):
        tokens = await count(words)
        miss = wanted - tokens
        if abs(miss) < best_miss:
            best, best_miss = words, abs(miss)
        slope = tokens / len(words) if before is None else (tokens - before[1]) / (len(words) - before[0])
        size = max(1, len(words) + round(miss / max(slope, 0.25)))
        if miss == 0 or size == len(words):
            break
        before = (len(words), tokens)
        words = words[:size] + [random.choice(WORDS) for _ in range(size - len(words))]
    return best


def _with_user(history: Sequence[dict[str, Any]], words: Sequence[str]) -> tuple[dict[str, Any], ...]:
    return (*history, {"role": "user", "content": " ".join(words)})


def dataset_prompt(request: PlannedRequest, *, chat: bool) -> Prompt:
    """A dataset's line as it is: a text becomes a user message in chat. Raises UsageError for messages without chat."""
    if request.messages is not None:
        if not chat:
            raise UsageError("the dataset holds messages: use --endpoint chat")
        return Prompt(messages=request.messages)
    if chat:
        return Prompt(messages=({"role": "user", "content": request.text or ""},))
    return Prompt(text=request.text or "")


class DatasetPrompts:
    """The prompts of a file, as they are."""

    how = "the dataset's own prompts: the server's usage says how long they were"

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat

    async def make(self, request: PlannedRequest, before: Turn | None) -> Prompt:
        return dataset_prompt(request, chat=self._chat)
