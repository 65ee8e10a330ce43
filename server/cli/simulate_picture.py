"""The picture of `hotswap simulate`: policies side by side. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..bench.picture import COLOURS, STYLE_SHEET, check_picture, draw_curves, line_look

_CURVES: Final = (("ttft", "TTFT"), ("e2e", "E2E"))


def draw(path: Path, document: Mapping[str, Any]) -> None:
    """Cumulative curves of TTFT and E2E, bars of goodput (of throughput without an SLO). document: as --json prints it. Raises
    UsageError without matplotlib."""
    check_picture(path, "--plot")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs, labels = document["runs"], [run["policy"] for run in document["runs"]]
    with rc_context(STYLE_SHEET):
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(
            f"{document['model']['name']} on {document['device']}, simulated: {document['workload']['source']}",
            fontsize=10,
            x=0.01,
            ha="left",
            fontweight="bold",
        )
        first, second, third = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
        for axes, (name, heading) in zip((first, second), _CURVES, strict=True):
            draw_curves(axes, runs, labels, name, heading)
        _bars(third, runs, labels)
        if len(runs) > 1:
            handles = [Line2D([], [], **line_look(number)) for number in range(len(runs))]
            figure.legend(handles, labels, loc="outside lower left", ncols=min(5, len(labels)), frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _bars(axes: Any, runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    goodputs = [run["results"]["goodput"] for run in runs]
    if all(goodputs):
        limits = ", ".join(f"{name} {limit:g} s" for name, limit in goodputs[0]["limits"].items())
        heading, values = "goodput", [found["requests_per_second"] for found in goodputs]
    else:
        heading, limits, values = "throughput", "", [run["results"]["request_throughput"] for run in runs]
    axes.set_title(heading, loc="left", fontsize=10)
    axes.set_xlabel("requests/s" + (f" within {limits}" if limits else ""))
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
    axes.barh(range(len(runs)), values, color=colours, height=0.6)
    axes.set_yticks(range(len(runs)), labels)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.2f}", (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.margins(x=0.18)
