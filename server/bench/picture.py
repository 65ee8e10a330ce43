"""Pictures of results: cumulative curves of TTFT, ITL and E2E, and the run over time. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hotswap.core.errors import UsageError

FORMATS: Final = (".png", ".svg", ".pdf")
# Distinguishable also without colour vision (Okabe and Ito's palette).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES: Final = ("-", "--", "-.", ":")
STYLE_SHEET: Final[Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "hotswap",
}
GREY: Final = "#666666"
LONG_TAIL: Final = 10.0  # times the median: from there on an axis is logarithmic
LOG_DECADE: Final = 10.0  # how far below the median such an axis begins; what is smaller is drawn there
MANY_DECADES: Final = 1000.0  # an axis that spans as much has room for the powers of ten only
_CURVES: Final = (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E"))


def check_picture(path: Path, flag: str = "--picture") -> None:
    """Raises UsageError, before anything is run, for what cannot be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{flag} {path}: its name must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(f"{flag} needs matplotlib: pip install 'hotswap[bench]' (or pip install matplotlib)") from None


def draw(path: Path, documents: Sequence[Mapping[str, Any]], labels: Sequence[str], title: str) -> None:
    """One result, or several over each other. Raises UsageError without matplotlib."""
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE_SHEET):
        figure = Figure(figsize=(11, 7.4), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(3, 3, height_ratios=(1.35, 1, 1))
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", fontweight="bold")
        for column, (name, heading) in enumerate(_CURVES):
            draw_curves(figure.add_subplot(grid[0, column]), documents, labels, name, heading)
        upper = figure.add_subplot(grid[1, :])
        lower = figure.add_subplot(grid[2, :], sharex=upper)
        _draw_timeline(upper, documents, "output_tokens_per_second", "output tokens/s")
        _draw_timeline(lower, documents, "concurrency", "requests in flight")
        upper.tick_params(labelbottom=False)
        lower.set_xlabel("seconds since the first request")
        if len(documents) > 1:
            handles, names = upper.get_legend_handles_labels()
            figure.legend(
                handles, labels[: len(names)], loc="outside lower left", ncols=min(4, len(labels)), frameon=False
            )
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def draw_curves(
    axes: Any, documents: Sequence[Mapping[str, Any]], labels: Sequence[str], name: str, heading: str
) -> None:
    """Share of the samples that took at most so long. A logarithmic axis when a few took very much longer than most."""
    axes.set_title(heading, loc="left", fontsize=10)
    axes.set_xlabel("ms")
    curves = [(n, found) for n, document in enumerate(documents) if (found := document["results"].get(name))]
    if not curves:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", color=GREY, transform=axes.transAxes)
        axes.set_yticks([])
        return
    largest = max(1e3 * found["max"] for _, found in curves)
    typical = max(min(1e3 * found["p50"] for _, found in curves), largest * 1e-6, 1e-6)
    smallest = typical / LOG_DECADE if largest > LONG_TAIL * typical else 0.0
    for number, found in curves:
        quantiles = [max(1e3 * value, smallest) for value in found["quantiles"]]
        shares = [step / (len(quantiles) - 1) for step in range(len(quantiles))]
        axes.plot(quantiles, shares, **line_look(number), lw=1.8)
    if smallest:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_xscale("log")
        subs = (1.0, 2.0, 5.0) if largest < MANY_DECADES * smallest else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1.0], ["0", "25 %", "50 %", "75 %", "90 %", "100 %"])
    if len(curves) == 1:
        _mark_percentiles(axes, curves[0][1])


def _mark_percentiles(axes: Any, found: Mapping[str, Any]) -> None:
    points = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)]
    for name, share in points:
        axes.plot([1e3 * found[name]], [share], "o", ms=4, color=COLOURS[0])
    lines = "\n".join(f"{name}  {1e3 * found[name]:.4g} ms" for name, _ in points)
    axes.text(0.97, 0.06, lines, ha="right", va="bottom", fontsize=8, color="#333333", transform=axes.transAxes)


def _draw_timeline(axes: Any, documents: Sequence[Mapping[str, Any]], name: str, heading: str) -> None:
    axes.set_title(heading, loc="left", fontsize=10)
    for number, document in enumerate(documents):
        line = document.get("timeline")
        if line is None:
            continue
        width, values = line["width"], line[name]
        edges = [width * step for step in range(len(values) + 1)]
        edges[-1] = max(edges[-2], min(edges[-1], document["results"]["duration"]))
        if len(documents) == 1:
            axes.stairs(values, edges, fill=True, color=COLOURS[0], alpha=0.18)
        axes.stairs(values, edges, baseline=None, lw=1.5, **line_look(number), label=str(number))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


def line_look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[(number // len(COLOURS)) % len(STYLES)]}
