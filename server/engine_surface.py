"""What the server needs of an engine, as a type: core.engine.client.EngineClient has it, and so has a fake in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hotswap.core.contracts.tool_parser import ToolParser
    from hotswap.core.engine.wire import EngineInfo, EngineStats
    from hotswap.core.outputs import RequestOutput
    from hotswap.core.sampling_params import SamplingParams
    from hotswap.core.text.chat_template import ChatTemplate
    from hotswap.core.text.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """The part of core.engine.client.EngineClient that the HTTP side uses."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def tool_parser(self) -> ToolParser | None: ...
    @property
    def generation_defaults(self) -> dict[str, Any]: ...
    @property
    def state(self) -> str: ...

    def health(self) -> str | None: ...

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def call(self, method: str, **arguments: Any) -> Any:
        """An administrative call (wire.Call). Raises HotswapError with the engine's own words."""
        ...

    async def shutdown(self) -> None: ...
