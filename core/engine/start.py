"""From settings to a running engine process and its client, in the order that starts it soonest."""

from __future__ import annotations

from ..compatibility import refuse_incompatible
from ..config import EngineConfig
from ..plugin_manager import PluginManager
from .assembly import Report, freeze_manager, open_checkpoints, platform_environment, resolve_model
from .client import EngineClient
from .front_end import FrontEnd
from .launch import EngineProcess, EngineSetup


def start_engine(config: EngineConfig, manager: PluginManager, report: Report | None = None) -> EngineClient:
    """Fetches the model, starts the engine process and reads tokenizer and template meanwhile.

    manager: loaded, with the operator's choices. Features that do not go together are refused first. The client
    still has to be started inside an event loop. Raises PluginError, UsageError or ModelLoadError in one line.
    """
    refuse_incompatible(config)
    environment = platform_environment(manager, config)
    resolved = resolve_model(manager, config, report)
    process = EngineProcess(environment)
    try:
        process.configure(
            EngineSetup(
                config=config.to_json().encode(),
                plugins=freeze_manager(manager),
                model_path=str(resolved.path),
                loader=resolved.loader,
                input_address=process.input_address,
                output_address=process.output_address,
            )
        )
        checkpoints = open_checkpoints(manager, config, resolved)
        front = FrontEnd(checkpoints.model, config, checkpoints.tokenizer)
        checkpoints.close()
        return EngineClient(process, front, config)
    except BaseException:
        process.close(timeout_s=0.5)
        raise
