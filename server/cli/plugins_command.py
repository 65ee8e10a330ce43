"""`hotswap plugins`: what is installed, active, rejected, blocked or failed, and why. Needs no model and opens no
device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.kinds import KINDS
from hotswap.core.contracts.provider import BuildContext
from hotswap.core.errors import PluginError, UsageError
from hotswap.core.host import guess_device
from hotswap.core.plugin_inventory import explain
from hotswap.core.plugin_selection import nearest

from .flags import add_flags
from .main import configure_logging
from .settings import Settings, add_config_flag, read_settings

if TYPE_CHECKING:
    from hotswap.core.plugin_inventory import InventoryRow
    from hotswap.core.plugin_manager import PluginManager

_FIELDS = {
    *EngineConfig.model_fields["plugins"].annotation.model_fields,  # type: ignore[union-attr]  # a Section
    "load_format",
    "quantization",
    "log_level",
}
_STATE_STYLES = {"active": "green", "available": "", "rejected": "yellow", "blocked": "yellow", "failed": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["explain"], help="explain KIND: why its choice is what it is")
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=_FIELDS.__contains__)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, EngineConfig)
    asked = settings.build(EngineConfig).log_level
    given = "log_level" in {**settings.config_file, **settings.command_line}
    configure_logging(asked if given else "warning")
    if arguments.action == "explain" and arguments.kind not in KINDS:
        kind = arguments.kind or ""
        raise UsageError(f"explain {kind}: name a kind{nearest(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    manager = settings.manager(tolerate_conflicts=True)
    context = inventory_context(manager, settings)
    if arguments.action == "explain":
        print("\n".join(explain(manager, arguments.kind, context)))
        return 0
    rows = manager.inventory(context)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(rows), indent=2))
    else:
        _print_table(rows)
    return 0


def inventory_context(manager: PluginManager, settings: Settings) -> BuildContext:
    """What `unavailable` is asked with before there is an engine: this host, seen through the platform that would be
    chosen."""
    context = BuildContext(
        options=None, config=settings.build(EngineConfig), device=guess_device(), clock=SystemClock(), role="api"
    )
    try:
        chosen = manager.choose("platform", context)
    except PluginError:
        return context  # the rows of the platforms say why there is none
    return dataclasses.replace(context, device=dataclasses.replace(context.device, kind=chosen.name))


def _print_table(rows: Sequence[InventoryRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kind", "name", "distribution", "version", "contract", "state"):
        table.add_column(column, overflow="fold")
    for row in rows:
        contract = "" if row.contract is None else str(row.contract)
        cells = (row.kind or "?", row.name, row.distribution, row.version, contract, row.state)
        table.add_row(*cells, style=_STATE_STYLES[row.state])
    # A pipe has no width: what reads it wants whole words.
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    # Below the table: a reason may be longer than a column of it, and is to be copied whole.
    for row in rows:
        for reason in row.reasons:
            console.print(f"{row.kind or 'plugin'} {row.name}: {row.state}: {reason}", soft_wrap=True)
