"""Offline use: `LLM(model).generate(prompts)`. The engine runs in this process; the caller's thread drives the step loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from ..clock import SystemClock
from ..config import DEFAULT_MODEL, EngineConfig
from ..errors import RequestError, UsageError
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.tools import check_tools
from .quiet_gc import collected_rarely

if TYPE_CHECKING:
    from ..plugin_manager import PluginManager

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """An engine in this process.

    model: local path, hub id or `pypi:PACKAGE`; the embedded default when None. plugins: values of `--plugin`, in the same
    syntax. Every other keyword is a setting of the same name as the command line's (`max_num_seqs`, `dtype`, ...).
    Raises UsageError, PluginError or ModelLoadError with one line that says what to do.
    """

    builtins: ClassVar[
        tuple[str, ...]
    ] = ()  # the built-in plugins' modules; the facade's LLM fills it, the core names none

    def __init__(self, model: str | None = None, *, plugins: Sequence[str] = (), **settings: Any) -> None:
        from .assembly import make_manager

        if "plugin" in settings:
            raise UsageError("LLM(plugin=...): write plugins=[...], with the values that --plugin takes")
        config = EngineConfig.from_flat(model=model or DEFAULT_MODEL, plugin=list(plugins), **settings)
        self._start(make_manager(config, self.builtins), config)

    def _start(self, manager: PluginManager, config: EngineConfig) -> None:
        from .assembly import assemble_engine, open_checkpoints, platform_environment, resolve_model
        from .front_end import FrontEnd
        from .request_processors import RequestProcessors

        if "torch" not in sys.modules:  # its runtime reads them when it is loaded; afterwards they would only mislead
            for name, value in platform_environment(manager, config).items():
                os.environ.setdefault(name, value)
        resolved = resolve_model(manager, config, report=None)
        checkpoints = open_checkpoints(manager, config, resolved)
        self._front = FrontEnd(checkpoints.model, config, checkpoints.tokenizer, RequestProcessors.of(manager))
        checkpoints.close()
        self._engine = assemble_engine(manager, config, str(resolved.path), resolved.loader, SystemClock(), report=None)
        self._front.connect(self._engine.info, SystemClock(), seed=config.model.seed, is_engine_process=True)
        self.config = config
        self._num_requests = 0
        self._closed = False

    @property
    def info(self) -> Any:
        """Facts of the running engine: window, blocks, dtype, device, plugins."""
        return self._engine.info

    @property
    def stats(self) -> Any:
        """Counters and gauges of the running engine (`EngineStats`)."""
        return self._engine.core.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts together and returns their outputs in order.

        prompts: texts (special tokens in them are read as such), lists of token ids, or `{"prompt": text}` /
        `{"prompt_token_ids": ids}`; one or a list of them.
        sampling_params: one for all, or one each; the model's defaults when None. use_tqdm: show a progress bar.
        Raises RequestError for a prompt that cannot be served (nothing is run then).
        """
        self._check_open()
        items = _as_list(prompts)
        params = self._params_for(sampling_params, len(items))
        priorities = list(priority) if priority is not None else [0] * len(items)
        if len(priorities) != len(items):
            raise RequestError(f"{len(items)} prompts but {len(priorities)} priorities", param="priority")
        prepared = [self._prepare(item) for item in items]
        return self._run(prepared, params, priorities, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Renders one conversation, or a list of them, through the model's chat template and generates.

        chat_template: another template instead of the model's; it comes from the caller of Python code, so it is trusted.
        add_generation_prompt: None means yes, unless the final message is continued. tools: shown to the model through the
        template; what it writes, calls among it, is returned as text.
        """
        self._check_open()
        tokenizer, template = self._front.tokenizer, self._front.chat_template
        if tokenizer is not None and chat_template is not None:
            template = ChatTemplate.for_tokenizer(chat_template, tokenizer)
        if tokenizer is None or template is None:
            raise UsageError(f"{self.config.model.model} has no chat template: give one with chat_template=")
        conversations = cast(
            Sequence[Sequence[Message]], [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        checked = None if tools is None else check_tools(tools)
        if checked is not None:
            template.need_tools()
        prompts: list[Prompt] = []
        for conversation in conversations:
            rendered = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=checked,
                template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": rendered.text, "prompt_token_ids": tokenizer.encode_chat(rendered)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None when the engine runs without one."""
        return self._front.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """The model author's defaults."""
        return SamplingParams(**self._front.generation_defaults)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False when some are in use."""
        self._check_open()
        return self._engine.core.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Audits the block accounting. Raises HotswapError with the difference when something leaks."""
        self._engine.core.mechanism.check_integrity()

    def shutdown(self) -> None:
        """Frees the device. Idempotent; the object cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._engine.core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this LLM was shut down; make a new one")

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts but {len(params)} sampling_params: give one for all, or one each")
        return params

    def _prepare(self, item: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(item, str):
            return item, self._front.encode(item)
        if isinstance(item, Mapping):
            text = item.get("prompt")
            ids = item.get("prompt_token_ids")
            if ids is not None:
                return text, list(ids)
            if isinstance(text, str):
                return text, self._front.encode(text)
            raise RequestError("a prompt mapping needs 'prompt' or 'prompt_token_ids'", param="prompt")
        return None, list(item)

    def _run(
        self,
        prepared: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        front, core = self._front, self._engine.core
        requests = [
            front.inputs.process(ids, p, priority=rank)
            for (_, ids), p, rank in zip(prepared, params, priorities, strict=True)
        ]
        order: list[RequestOutput] = []
        with _Progress(len(prepared), use_tqdm) as progress, collected_rarely():
            try:
                for (text, _), group in zip(prepared, requests, strict=True):
                    self._num_requests += 1
                    state = front.outputs.add(str(self._num_requests), text, group)
                    order.append(state.total)
                    for request in group:
                        refusal = core.add_request(request)
                        if refusal is not None:
                            raise RequestError(
                                refusal.error or "refused",
                                param=refusal.error_param,
                                code=refusal.error_code,
                                status=refusal.error_status,
                            )
                while core.has_work():
                    self._collect(progress)
            except (RequestError, KeyboardInterrupt):
                self._abandon_rest()
                raise
            except BaseException as error:  # the engine itself failed: nothing can be run on it any more
                self._add_advice(error)
                self.shutdown()
                raise
        for total in order:
            total.outputs.sort(key=lambda output: output.index)
        return order

    def _collect(self, progress: _Progress) -> None:
        gather = self._front.outputs.gather
        for update in self._engine.core.step():
            state = gather(update)
            if state is None:
                continue
            if state.to_abort:
                self._engine.core.abort(state.to_abort)
                state.to_abort = []
            if progress.enabled:
                progress.advance(len(update.new_token_ids), finished=state.finished)

    def _add_advice(self, error: BaseException) -> None:
        """What to change when a step ran out of memory, as a note: the caller may wait for the error's own type."""
        from ..runner.memory_report import explain_step_out_of_memory

        shortage = explain_step_out_of_memory(error, self.config)
        if shortage is not None:
            error.add_note(shortage)

    def _abandon_rest(self) -> None:
        """After Ctrl-C or a refusal: nothing of this call stays in the engine."""
        for state in self._front.outputs.states():
            self._engine.core.abort(self._front.outputs.forget(state))
        try:
            while self._engine.core.has_work():
                self._engine.core.step()
        except BaseException:  # an interrupt in the middle of a step can leave it in pieces
            self.shutdown()
            raise


class _Progress:
    """A bar over requests with the rate of output tokens; nothing when not wanted."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total = total
        self.enabled = enabled
        self._num_tokens = 0

    def __enter__(self) -> _Progress:
        if self.enabled:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self._bar.start()
            self._task = self._bar.add_task("requests", total=self._total, rate="")
        return self

    def __exit__(self, *details: object) -> None:
        if self.enabled:
            self._bar.stop()

    def advance(self, num_tokens: int, *, finished: bool) -> None:
        self._num_tokens += num_tokens
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:.0f} output tokens/s" if elapsed else ""
        self._bar.update(self._task, advance=1 if finished else 0, rate=rate)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a text, a mapping, or a list of token ids; anything else is a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [cast(Sequence[int], items)]
    return cast(list[Prompt], items)
