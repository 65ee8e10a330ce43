"""An OpenAI-compatible server, reached over HTTP: what it is, what it takes, and single questions to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from hotswap.core.errors import HotswapError, UsageError

from .prompts import WORDS

CONNECT_SECONDS: Final = 10.0


def base_url(url: str) -> str:
    """The server's root, without /v1. Raises UsageError."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"--url {url}: an http or https address is needed")
    return base


class Server:
    """Calls on one server. Use as `async with`."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float | None = None) -> None:
        self.base = base_url(url)
        headers = {"accept-encoding": "identity"}  # what is timed is the server, not the unpacking of its words
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self.client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(CONNECT_SECONDS, read=timeout, write=timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.client.aclose()

    async def get(self, path: str) -> Any:
        """JSON, or None when the path is not served. Raises HotswapError when nobody is there, or on another refusal."""
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `get`."""
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            reply = await self.client.request(method, f"{self.base}{path}", json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise Unreachable(f"no server answers at {self.base}: {type(error).__name__}") from None
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.base}{path}: {type(error).__name__}") from None
        if reply.status_code in (404, 405, 501):
            return None
        if not reply.is_success:
            raise Refused(reply.status_code, f"{self.base}{path}", refusal_text(reply.content))
        try:
            return reply.json()
        except ValueError:
            raise HotswapError(f"{self.base}{path} does not answer with JSON: is this an OpenAI server?") from None

    async def models(self) -> list[dict[str, Any]]:
        """The cards of /v1/models. Raises HotswapError."""
        answer = await self.get("/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise HotswapError(
                f"{self.base}/v1/models does not list models: is this an OpenAI server? (or give --model)"
            )
        return cards

    async def tokenize(self, model: str, text: str, *, special: bool = False) -> list[int]:
        """Raises HotswapError."""
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        tokens = (await self.post("/tokenize", body) or {}).get("tokens")
        if not isinstance(tokens, list):
            raise HotswapError(f"{self.base}/tokenize gives no tokens")
        return tokens

    async def count_messages(self, model: str, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a chat prompt, template included. Raises HotswapError."""
        count = (await self.post("/tokenize", {"model": model, "messages": list(messages)}) or {}).get("count")
        if not isinstance(count, int):
            raise HotswapError(f"{self.base}/tokenize does not count messages")
        return count


class Unreachable(HotswapError):
    """There is no server, or the connection to it broke."""


class Refused(HotswapError):
    """The server answered with an error status."""

    def __init__(self, status: int, where: str, message: str) -> None:
        super().__init__(f"{where} refuses ({status}): {message}")
        self.status = status
        self.message = message


def refusal_text(content: bytes) -> str:
    """What an error body says, in OpenAI's shape or another."""
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if isinstance(value, dict):
        error = value.get("error", value.get("detail", value.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return " ".join(str(message).split())[:300]
    return " ".join(content[:300].decode("utf-8", "replace").split()) or "no reason given"


@dataclass(slots=True)
class ServerFacts:
    """What a server is and takes, as far as asking tells.

    software: "hotswap 0.1", "vllm", ... from its own words. token_pool: ids of common words, when /tokenize is there and
    prompts may be token ids. counts_messages: /tokenize takes messages. extras: which request fields it takes.
    """

    url: str
    model: str
    software: str = "unknown"
    max_model_len: int | None = None
    has_tokenize: bool = False
    counts_messages: bool = False
    token_pool: list[int] = field(default_factory=list)
    extras: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


EXTRAS: Final[dict[str, dict[str, Any]]] = {
    "include_usage": {"stream_options": {"include_usage": True}},
    "continuous_usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "ignore_eos": {"ignore_eos": True},
    "return_token_ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 1},
    "chat_logprobs": {"logprobs": True, "top_logprobs": 1},
    "priority": {"priority": 1},
    "user": {"user": "bench"},
}


async def ask_about(
    server: Server, *, model: str | None, chat: bool, want: Sequence[str], want_ids: bool = True, warm: bool = True
) -> ServerFacts:
    """Learns what the run needs to know. want: names of EXTRAS that it would use. warm: send it a request, so that it is
    known to answer, and which extras it takes. Raises HotswapError."""
    facts = await _card(server, model)
    version = await _or_none(server.get("/version"))
    if isinstance(version, dict) and version.get("version"):
        facts.software = f"{facts.software} {version['version']}".removeprefix("unknown ")
    await _learn_tokenizer(server, facts, chat=chat, want_ids=want_ids)
    if warm:
        await learn_extras(server, facts, chat=chat, want=want)
    return facts


async def _card(server: Server, model: str | None) -> ServerFacts:
    try:
        cards = await server.models()
    except (Refused, Unreachable):
        raise
    except HotswapError:
        if model is None:
            raise
        return ServerFacts(server.base, model, notes=["/v1/models is not served; the model's name is the one given"])
    if not cards and model is None:
        raise HotswapError(f"{server.base}/v1/models lists no model: give --model")
    card = next((card for card in cards if card.get("id") == model), None)
    if card is None and model is not None:
        known = ", ".join(repr(card.get("id")) for card in cards)
        raise UsageError(f"--model {model}: this server has {known or 'no model'}")
    card = card or cards[0]
    window = card.get("max_model_len")
    return ServerFacts(
        server.base,
        str(card.get("id")),
        software=str(card.get("owned_by") or "unknown"),
        max_model_len=window if isinstance(window, int) else None,
    )


async def _or_none(call: Any) -> Any:
    """The answer of a path that a server need not have."""
    try:
        return await call
    except HotswapError:
        return None


async def _learn_tokenizer(server: Server, facts: ServerFacts, *, chat: bool, want_ids: bool) -> None:
    ids = await _or_none(server.tokenize(facts.model, " " + " ".join(WORDS)))
    if not ids:
        return
    facts.has_tokenize = True
    if chat:
        message = [{"role": "user", "content": "hello"}]
        facts.counts_messages = isinstance(await _or_none(server.count_messages(facts.model, message)), int)
    elif want_ids:
        body = {"model": facts.model, "prompt": ids[:4], "max_tokens": 1, "temperature": 0}
        if await _or_none(server.post("/v1/completions", body)):
            facts.token_pool = sorted(set(ids))


async def learn_extras(server: Server, facts: ServerFacts, *, chat: bool, want: Sequence[str]) -> None:
    """Which of the wanted EXTRAS the endpoint takes: all together, and when that is refused, each by itself. Raises
    HotswapError when it does not answer without them either."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"model": facts.model, "max_tokens": 1, "temperature": 0, "stream": True}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    together = dict(body)
    for name in want:
        together |= EXTRAS[name]
    if await _takes(server, path, together) is None:
        facts.extras |= dict.fromkeys(want, True)
        return
    refusal = await _takes(server, path, body)
    if refusal is not None:
        raise refusal
    for name in want:
        facts.extras[name] = await _takes(server, path, body | EXTRAS[name]) is None


async def _takes(server: Server, path: str, body: Mapping[str, Any]) -> Refused | None:
    """None when the server answers, whatever the answer; its refusal otherwise. Raises HotswapError."""
    try:
        reply = await server.client.post(f"{server.base}{path}", json=body)
    except httpx.HTTPError as error:
        raise HotswapError(f"no answer from {server.base}{path}: {type(error).__name__}") from None
    if reply.is_success:
        return None
    return Refused(reply.status_code, f"{server.base}{path}", refusal_text(reply.content))
