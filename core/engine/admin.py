"""Administrative calls on a running engine: answered between two steps, on the scheduling thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..compatibility import refuse_incompatible
from ..config import EngineConfig
from ..contracts.policy import PolicyContext, PolicyProvider
from ..contracts.provider import BuildContext
from ..contracts.victim import VictimContext, VictimRule
from ..errors import HotswapError, PluginError, UsageError
from ..plugin_discovery import root_cause
from ..plugin_manager import Choice, PluginManager
from .engine_core import EngineCore
from .wire import Call, EngineInfo

if TYPE_CHECKING:
    from ..contracts.policy import Policy

logger = logging.getLogger("hotswap.engine")

ContextMaker = Callable[[type[Any]], Any]


class EngineAdmin:
    """make_context: a kind's context with the common fields filled. info: kept true; `info_changed` says that it changed."""

    def __init__(
        self,
        manager: PluginManager,
        core: EngineCore,
        info: EngineInfo,
        config: EngineConfig,
        make_context: ContextMaker,
    ) -> None:
        self._manager = manager
        self._core = core
        self._config = config
        self._make_context = make_context
        self.info = info
        self.info_changed = False

    def answer(self, call: Call) -> Any:
        """The result of a call (see wire.Call). Raises HotswapError in one line; then nothing has changed."""
        if call.method == "reset_prefix_cache":
            return self._core.reset_prefix_cache()
        if call.method == "stats":
            return msgspec.to_builtins(self._core.stats())
        if call.method == "check_integrity":
            self._core.mechanism.check_integrity()
            return True
        if call.method == "inventory":
            return self._inventory()
        if call.method == "set_policy":
            return self._set_policy(call.arguments)
        raise UsageError(f"unknown call {call.method!r:.80}")

    def set_policy(self, name: str, options: dict[str, Any] | None = None) -> dict[str, str]:
        """Swaps the policy, and the victim rule with it when the operator named none and the new policy asks for another.
        Raises HotswapError."""
        context = self._make_context(PolicyContext)
        choice = self._manager.choose_anew("policy", name, context, options, where="set_policy")
        victim_choice = self._victim_of(choice)
        self._check_combination(choice, victim_choice)
        policy: Policy = self._manager.build_choice(choice, context)
        victim: VictimRule | None = None
        if victim_choice is not None:
            victim = self._manager.build_choice(victim_choice, self._make_context(VictimContext))
        before = type(self._core.mechanism.policy).__name__
        try:
            self._core.set_policy(policy, victim)
        except HotswapError:
            raise
        except Exception as error:  # the new policy's own code; the old one goes on
            raise PluginError(f"{choice.described} failed to take over: {root_cause(error)}") from error
        self._manager.adopt(choice)
        if victim_choice is not None:
            self._manager.adopt(victim_choice)
        self.info.uses_priority = bool(policy.uses_priority)  # the plugin's own word: another type would not decode
        self.info.inventory = self._inventory()
        self.info_changed = True
        victim_name = self._manager.chosen["victim", None].name
        logger.info("policy %s takes over from %s (victim rule %s)", choice.described, before, victim_name)
        return {
            "policy": choice.name,
            "distribution": choice.distribution,
            "version": choice.version,
            "victim": victim_name,
        }

    def _set_policy(self, arguments: dict[str, Any]) -> dict[str, str]:
        name, options = arguments.get("name"), arguments.get("options")
        if not isinstance(name, str) or not name:
            raise UsageError("set_policy: 'name' must be the name of a policy")
        if options is not None and not (isinstance(options, dict) and all(isinstance(key, str) for key in options)):
            raise UsageError("set_policy: 'options' must be an object")
        return self.set_policy(name, options)

    def _victim_of(self, choice: Choice) -> Choice | None:
        """The victim rule that comes with a policy; None when the one in force stays."""
        provider = choice.provider
        if self._manager.is_explicit("victim") or not isinstance(provider, PolicyProvider):
            return None
        in_force = self._manager.chosen.get(("victim", None))
        if in_force is not None and in_force.name == provider.default_victim:
            return None
        where = f"default_victim of {choice.described}"
        context = self._make_context(VictimContext)
        return self._manager.choose_anew("victim", provider.default_victim, context, where=where)

    def _check_combination(self, policy: Choice, victim: Choice | None) -> None:
        active = {kind: choice for (kind, _), choice in self._manager.chosen.items() if kind in ("policy", "victim")}
        active["policy"] = policy
        if victim is not None:
            active["victim"] = victim
        others = {
            (kind, choice.name)
            for (kind, _), choice in self._manager.chosen.items()
            if kind not in ("policy", "victim")
        }
        plugins = others | {(kind, choice.name) for kind, choice in active.items()}
        refuse_incompatible(self._config, model_dtype=self.info.dtype, plugins=plugins, more_rows=self._manager.rows())

    def _inventory(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(row) for row in self._manager.inventory(self._make_context(BuildContext))]
