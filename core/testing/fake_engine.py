"""An engine without a model: what EngineClient offers the server, with scripted tokens and faults on demand.

Checks, defaults, detokenizing and stop strings are the real ones; only the device is left out.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel

from ..clock import SystemClock
from ..contracts.plan import PositionLogprobs
from ..contracts.scheduler import RequestUpdate
from ..contracts.tool_parser import ToolParser
from ..engine.delta_stream import DeltaStream
from ..engine.input_processor import InputLimits, InputProcessor
from ..engine.output_processor import OutputProcessor, RequestState
from ..engine.request_processors import RequestProcessors
from ..engine.tool_parsing import GuardedToolParser
from ..engine.wire import EngineInfo, EngineRequest, EngineStats
from ..errors import EngineDeadError, HotswapError, RequestError
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer, TokenizerSpec
from .tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, save_byte_tokenizer

EOS_ID = 3
BLOCK_SIZE = 16
Script = Callable[
    [list[int], int], list[int]
]  # (prompt, number of the choice) -> the tokens drawn before end-of-sequence


def byte_tokenizer(*, add_bos: bool = False) -> Tokenizer:
    """The tiny models' byte tokenizer: four special tokens, 256 bytes, a few merges."""
    with tempfile.TemporaryDirectory() as folder:
        data = (save_byte_tokenizer(folder) / "tokenizer.json").read_bytes()
    named = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[EOS_ID]}
    return Tokenizer(TokenizerSpec(data, bos_id=0, eos_id=EOS_ID, add_bos=add_bos, special_tokens=named))


class FakeEngine:
    """Satisfies server.state.ServedEngine.

    script: the tokens of each choice; the prompt backwards when None. step_seconds: between two tokens of a choice; all
        choices
    of all requests run side by side. Attributes may be changed between requests:
    `state`; `gate` (an Event that every step waits for; clear it to hold the engine); `fail_after` (tokens, then the
    request's own error); `refuse` (raised at admission). `aborted` and `finished` hold the internal ids of requests
    that ended so.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        step_seconds: float = 0.0,
        max_model_len: int = 256,
        generation_defaults: dict[str, Any] | None = None,
        chat_template: str | None = CHAT_TEMPLATE,
        max_tokens_ceiling: int | None = None,
        add_bos: bool = False,
        tool_parser: ToolParser | None = None,
        uses_priority: bool = False,
        logits_processors: Mapping[str, type[BaseModel]] | None = None,
    ) -> None:
        """uses_priority: as under a policy that serves by priority. logits_processors: those that requests may name, with
        the model of their arguments; they are checked, and change nothing."""
        self.tool_parser = None if tool_parser is None else GuardedToolParser(tool_parser, type(tool_parser).__name__)
        tokenizer = byte_tokenizer(add_bos=add_bos)
        self.tokenizer: Tokenizer | None = tokenizer
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.chat_template = ChatTemplate(
                chat_template,
                named_special_tokens=tokenizer.named_special_tokens,
                special_tokens=list(tokenizer.special_tokens),
            )
        self.generation_defaults = generation_defaults or {}
        self.info = EngineInfo(
            model="fake",
            architecture="FakeForCausalLM",
            dtype="float32",
            max_model_len=max_model_len,
            max_prompt_len=max_model_len - 1,
            logits_width=VOCAB_SIZE,
            num_blocks=64,
            block_size=BLOCK_SIZE,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            device="cpu",
            uses_priority=uses_priority,
        )
        self.stats = EngineStats()
        self.state: str = "ready"
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_after: int | None = None
        self.refuse: RequestError | None = None
        self.aborted: list[int] = []
        self.finished: list[int] = []
        self.requests: list[EngineRequest] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._script = script or (lambda prompt, choice: prompt[::-1])
        self._step_seconds = step_seconds
        self._inputs = InputProcessor(
            self.info,
            tokenizer,
            (EOS_ID,),
            SystemClock(),
            InputLimits(max_tokens_ceiling=max_tokens_ceiling),
            processors=RequestProcessors(logits_processors),
        )
        self._outputs = OutputProcessor(tokenizer)
        self._cached: set[tuple[str | None, tuple[int, ...]]] = set()
        self._death: str | None = None
        self._streams: dict[int, DeltaStream] = {}

    async def start(self) -> EngineInfo:
        """As EngineClient.start; `state` may be "starting" before."""
        if self._death is None:
            self.state = "ready"
        return self.info

    def kill(self) -> None:
        self.die("killed")

    def health(self) -> str | None:
        return self._death

    def die(self, cause: str) -> None:
        """The engine process is gone: requests in flight fail, new ones are refused."""
        self._death = cause
        self.state = "dead"
        for stream in self._streams.values():
            stream.fail(EngineDeadError(cause))

    async def call(self, method: str, **arguments: Any) -> Any:
        """As EngineClient.call, for a plugin world with the policies fcfs and priority. `calls` holds what was asked."""
        self.calls.append((method, arguments))
        if method == "stats":
            return msgspec.to_builtins(self.stats)
        if method == "inventory":
            return self.info.inventory
        if method == "reset_prefix_cache":
            self._cached.clear()
            return True
        if method == "set_policy" and arguments["name"] in ("fcfs", "priority"):
            self.info.uses_priority = arguments["name"] == "priority"
            victim = "lowest_priority" if self.info.uses_priority else "newest"
            return {"policy": arguments["name"], "distribution": "hotswap", "version": "0", "victim": victim}
        raise HotswapError(f"there is no {arguments.get('name', method)!r}")

    async def shutdown(self) -> None:
        self.die("the server is shutting down")

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As EngineClient.generate."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self.refuse is not None:
            raise self.refuse
        requests = self._inputs.process(prompt_token_ids, params, priority=priority, user=user, cache_salt=cache_salt)
        self.requests.extend(requests)
        state = self._outputs.add(request_id, prompt, requests)
        stream = self._streams[id(state)] = DeltaStream()
        tasks = [
            asyncio.create_task(self._run(request, number, stream, self._cached_tokens(request)))
            for number, request in enumerate(requests)
        ]
        self.stats.num_running += len(tasks)
        try:
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            self._close(state, requests, tasks)

    def _close(self, state: RequestState, requests: list[EngineRequest], tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        running = self._outputs.forget(state)
        self.aborted.extend(running)
        self.finished.extend(request.request_id for request in requests if request.request_id not in running)
        self.stats.num_running -= len(tasks)
        self._streams.pop(id(state), None)

    def _cached_tokens(self, request: EngineRequest) -> int:
        """Whole blocks seen before under the same salt, the last token never counted; remembers this prompt's."""
        ids = request.prompt_token_ids
        keys = [(request.cache_salt, tuple(ids[:end])) for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE)]
        hits = [len(key[1]) for key in keys if key in self._cached]
        self._cached.update(keys)
        return min(max(hits, default=0), len(ids) - 1)

    async def _run(self, request: EngineRequest, number: int, stream: DeltaStream, num_cached: int) -> None:
        sampling = request.sampling
        limit = sampling.max_tokens or 0
        tokens = self._script(request.prompt_token_ids, number)[:limit]
        steps: list[tuple[list[int], str | None]] = [([token], None) for token in tokens]
        if limit == 0 or len(tokens) == limit:
            steps = [*steps[:-1], (tokens[-1:], "length")]
        else:
            steps.append(([EOS_ID], "stop"))
        for count, (new, reason) in enumerate(steps):
            await self.gate.wait()
            await asyncio.sleep(self._step_seconds)
            update = RequestUpdate(request.request_id, new, reason, num_cached_tokens=num_cached)
            if self.fail_after is not None and count >= self.fail_after:
                update = RequestUpdate(
                    request.request_id, [], "error", error="the forward pass failed at 0x7f00", error_status=500
                )
            if sampling.logprobs is not None:
                update.logprobs = [_position(token, sampling.logprobs) for token in update.new_token_ids]
            if sampling.prompt_logprobs is not None and count == 0:
                update.prompt_logprobs = [_position(i, sampling.prompt_logprobs) for i in request.prompt_token_ids[1:]]
            routed = self._outputs.apply(update)
            if routed is None:
                return
            stream.put(routed[1])
            if update.finish_reason == "error":
                return


def _position(token_id: int, num_alternatives: int) -> PositionLogprobs:
    """The token, and the ids that follow it as alternatives; an impossible one (minus infinity) among them."""
    others = [(token_id + 1 + n) % VOCAB_SIZE for n in range(max(0, num_alternatives - 1))]
    values = [-0.5, *(-1.0 - n for n in range(len(others)))]
    if len(values) > 2:
        values[-1] = float("-inf")
    return PositionLogprobs([token_id, *others], values, list(range(1, len(values) + 1)))
