"""`hotswap bench compare A.json B.json [...]`: results of `bench serve` or `bench throughput` beside each other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotswap.core.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from ..bench.comparison import Row


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="*", metavar="FILE", help="results of --json; the first one is the measure")
    parser.add_argument("--label", action="append", metavar="TEXT", help="name of a result, in order; else its file's")
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw all curves over each other: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Raises UsageError."""
    from ..bench.comparison import compare, differences
    from ..bench.picture import check_picture, draw
    from ..bench.report import read_document

    paths = [Path(name) for name in arguments.results]
    if len(paths) < 2:
        raise UsageError("bench compare needs at least two results of bench --json")
    labels = arguments.label or _labels(paths)
    if len(labels) != len(paths):
        raise UsageError(f"{len(paths)} results but {len(labels)} labels")
    if arguments.picture is not None:
        check_picture(Path(arguments.picture))
    documents = [read_document(path) for path in paths]
    table, doubts = compare(documents), differences(documents)
    _print_table(labels, table)
    for doubt in doubts:
        print(f"hotswap: warning: {doubt}", file=sys.stderr)
    if arguments.json is not None:
        value = {
            "kind": "hotswap-bench-comparison",
            "labels": labels,
            "rows": [{"name": r.name, "unit": r.unit, "values": r.values, "ratios": r.ratios} for r in table],
            "warnings": doubts,
        }
        Path(arguments.json).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    if arguments.picture is not None:
        draw(Path(arguments.picture), documents, labels, " and ".join(labels))
    return 0


def _labels(paths: Sequence[Path]) -> list[str]:
    """The files' names, with their folders where the names alone are the same."""
    names = [path.stem for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _print_table(labels: Sequence[str], rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column(labels[0], justify="right")
    for label in labels[1:]:
        table.add_column(label, justify="right")
        table.add_column("ratio", justify="right")
    for row in rows:
        cells = [Text(_number(row.values[0], row.unit))]
        for value, ratio in zip(row.values[1:], row.ratios[1:], strict=True):
            cells += [Text(_number(value, row.unit)), _ratio(ratio, more_is_better=row.more_is_better)]
        table.add_row(Text(row.name + (f", {row.unit}" if row.unit else "")), *cells)
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if not unit and value == int(value) else f"{value:.2f}"


def _ratio(ratio: float | None, *, more_is_better: bool) -> Text:
    from rich.text import Text

    if ratio is None:
        return Text("-", style="dim")
    better = ratio > 1.02 if more_is_better else ratio < 0.98
    worse = ratio < 0.98 if more_is_better else ratio > 1.02
    return Text(f"{ratio:.3f}", style="green" if better else "red" if worse else "")
