"""From settings to a running engine process and its client, in the order that starts it soonest."""

from __future__ import annotations

from collections.abc import Callable

from ..compatibility import refuse_incompatible
from ..config import EngineConfig
from ..plugin_manager import PluginManager
from .assembly import (
    Report,
    freeze_manager,
    front_rows,
    open_checkpoints,
    platform_environment,
    refuse_combinations,
    resolve_model,
)
from .client import EngineClient
from .front_end import FrontEnd
from .launch import EngineProcess, EngineSetup
from .request_processors import RequestProcessors
from .tool_parsing import choose_tool_parser


def start_engine(
    config: EngineConfig, make_manager: Callable[[], PluginManager], report: Report | None = None
) -> EngineClient:
    """Starts the engine process, fetches the model and reads tokenizer and template.

    The process is started first of all: it imports what it needs while this one still chooses plugins and finds the model.
    make_manager: gives the loaded manager with the operator's choices. Features that do not go together are refused. The
    client still has to be started inside an event loop. Raises PluginError, UsageError or ModelLoadError in one line.
    """
    process = EngineProcess()
    try:
        refuse_incompatible(config)
        manager = make_manager()
        refuse_combinations(manager, config)
        environment = platform_environment(manager, config)
        resolved = resolve_model(manager, config, report)
        process.configure(
            EngineSetup(
                config=config.to_json().encode(),
                plugins=freeze_manager(manager),
                environment=environment,
                model_path=str(resolved.path),
                loader=resolved.loader,
                input_address=process.input_address,
                output_address=process.output_address,
            )
        )
        checkpoints = open_checkpoints(manager, config, resolved)
        front = FrontEnd(checkpoints.model, config, checkpoints.tokenizer, RequestProcessors.of(manager))
        checkpoints.close()
        front.tool_parser = choose_tool_parser(
            manager, config, front.chat_template.source if front.chat_template is not None else None
        )
        return EngineClient(process, front, config, front_rows(manager, config))
    except BaseException:
        process.close(timeout_s=0.5)
        raise
