"""`hotswap plugins`: what is installed, active, rejected, blocked or failed, and why. Needs no model and opens no
device. `check` tries one against its kind's contract, `new` writes one to start from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.kinds import KINDS
from hotswap.core.contracts.platform import PlatformProvider
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
    parser.add_argument(
        "action",
        nargs="?",
        choices=["explain", "check", "new"],
        help="explain KIND: why its choice is what it is; check NAME: run its kind's conformance suite on a plugin; "
        "new KIND NAME: write a package to start from",
    )
    parser.add_argument(
        "subject", nargs="?", metavar="KIND|NAME", help=f"NAME, KIND=NAME or a file; or a kind: {', '.join(KINDS)}"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the plugin that `new` writes")
    parser.add_argument("--dir", metavar="DIR", default=".", help="where `new` writes the package (default: here)")
    parser.add_argument("--details", action="store_true", help="with check: all about each failure")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=_FIELDS.__contains__)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, EngineConfig)
    asked = settings.build(EngineConfig).log_level
    if arguments.json and arguments.action is not None:
        raise UsageError(f"--json is of the list of plugins; {arguments.action} has no such form")
    given = "log_level" in {**settings.config_file, **settings.command_line}
    configure_logging(asked if given else "warning")
    if arguments.action == "check":
        return _check(arguments, settings)
    if arguments.action == "new":
        return _new(arguments, settings)
    if arguments.name is not None:
        raise UsageError(f"explain takes one KIND, got {arguments.subject} and {arguments.name}")
    if arguments.action == "explain" and arguments.subject not in KINDS:
        raise _no_such_kind("explain KIND", arguments.subject)
    manager = settings.manager(tolerate_conflicts=True)
    context = inventory_context(manager, settings)
    if arguments.action == "explain":
        print("\n".join(explain(manager, arguments.subject, context)))
        return 0
    rows = manager.inventory(context)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(rows), indent=2))
    else:
        _print_table(rows)
    return 0


def _check(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.subject is None or arguments.name is not None:
        raise UsageError(
            "check takes one plugin: check NAME, check KIND=NAME or check ./file.py (see: hotswap plugins)"
        )
    from .check_plugin import check

    return check(arguments.subject, settings, details=arguments.details)


def _new(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.subject not in KINDS:
        raise _no_such_kind("new KIND NAME", arguments.subject)
    if arguments.name is None:
        raise UsageError(f"new {arguments.subject} NAME: name the plugin, such as my_{arguments.subject}")
    from .new_plugin import write_package

    taken = {found.name: found.origin.owner for found in settings.manager().providers(arguments.subject)}
    folder = write_package(arguments.subject, arguments.name, Path(arguments.dir), taken=taken)
    print(f"wrote {folder}; to go on:")
    print(f"  pip install -e '{folder}[testing]'")
    print(f"  hotswap plugins check {arguments.subject}={arguments.name}")
    print(f"  python -m pytest {folder}")
    return 0


def _no_such_kind(usage: str, given: str | None) -> UsageError:
    if given is None:
        return UsageError(f"{usage}: name a kind (kinds: {', '.join(KINDS)})")
    return UsageError(f"{usage}: unknown kind {given!r}{nearest(given, KINDS)} (kinds: {', '.join(KINDS)})")


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
    facts = cast(PlatformProvider, chosen.provider).facts
    if facts is None:
        return dataclasses.replace(context, device=dataclasses.replace(context.device, kind=chosen.name))
    return dataclasses.replace(context, device=facts(chosen.options))


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
