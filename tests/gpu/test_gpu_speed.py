"""How fast: the scripts of benchmarks/ run on the card, and their figures are held against the card's ceilings of the same run.

On an H200 they are held against absolute figures too. `make test-gpu` runs this file after the others and alone, since nothing
else may use the card meanwhile. It takes about five minutes. What is asked is in tests/support/speed_figures.py.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from speed_figures import FIGURES, SPEED_LINES, Bench, Ceilings, Figure, Row, W, details, table, values_of

LEAST_BYTES = 70 << 30
"""Weights of 16 GB and the largest KV cache asked for, 34 GB, with room to spare."""

SMALL_SHAPE_SHARE = 0.25

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_speed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="speed is measured alone: run it without -n"),
]


def needs_h200(figure: Figure) -> None:
    if not figure.is_a_ratio and "H200" not in torch.cuda.get_device_name():
        pytest.skip("the figure is of an H200")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Row]]]:
    """Run -> its rows. Whatever has come in is shown as a table in the end, whether tests failed or not."""
    runs: dict[str, list[Row]] = {}
    yield runs
    ceilings = Ceilings.from_rows(runs["ceilings"]) if "ceilings" in runs else None
    lines = table({run: values_of(rows) for run, rows in runs.items()}, ceilings)
    told = [line for rows in runs.values() for line in details(rows)]
    request.config.stash[SPEED_LINES] = [torch.cuda.get_device_name(), *lines, *told]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory, found: dict[str, list[Row]]) -> Callable[..., list[Row]]:
    """`measure(run, script, *arguments)`: the rows. The card's memory is given back to the script first."""
    if torch.cuda.get_device_properties(0).total_memory < LEAST_BYTES:
        pytest.skip("the card's memory is too small for these workloads")
    bench = Bench(tmp_path_factory.mktemp("speed"))

    def measured(run: str, script: str, *arguments: str, shape: str = "") -> list[Row]:
        gc.collect()
        torch.cuda.empty_cache()
        model = ["--model", str(bench.model(shape, W.SHAPES[shape]))] if shape else []
        found[run] = bench.run(script, *model, *arguments)
        bench.record(run, found[run])
        return found[run]

    return measured


Measure = Callable[..., list[Row]]
Values = dict[str, float]


@pytest.fixture(scope="module")
def ceilings(measure: Measure) -> Ceilings:
    return Ceilings.from_rows(measure("ceilings", "ceilings.py"))


@pytest.fixture(scope="module")
def llama8b(measure: Measure) -> Values:
    suites = ["--suites", "decode,prefill,mix512,prefix,noshare", "--batches", "1,8,12,32,48,64,128,200,256"]
    return values_of(measure("llama8b", "compare.py", *suites, shape="llama8b"))


def decode_at(measure: Measure, context: int, batches: str, reps: int) -> Values:
    suites = ["--suites", "decode", "--context", str(context), "--batches", batches, "--reps", str(reps)]
    longer = ["--args", json.dumps({"max_model_len": 33000})] if context > 3000 else []
    return values_of(measure(f"context{context}", "compare.py", *suites, *longer, shape="llama8b"))


@pytest.fixture(scope="module")
def context100(measure: Measure) -> Values:
    return decode_at(measure, 100, "8,64,256", 2)


@pytest.fixture(scope="module")
def context8000(measure: Measure) -> Values:
    return decode_at(measure, 8000, "1,8,32", 2)


@pytest.fixture(scope="module")
def context32000(measure: Measure) -> Values:
    return decode_at(measure, 32000, "1,4", 1)


@pytest.fixture(scope="module")
def smol135m(measure: Measure) -> Values:
    return values_of(measure("smol135m", "compare.py", "--suites", "decode", "--batches", "1,64,256", shape="smol135m"))


@pytest.fixture(scope="module")
def start_up_rows(measure: Measure) -> list[Row]:
    return measure("start_up", "gpu/startup.py", "--modes", "offline")


@pytest.fixture(scope="module")
def start_up(start_up_rows: list[Row]) -> Values:
    return values_of(start_up_rows)


@pytest.fixture(scope="module")
def profile(measure: Measure) -> Values:
    return values_of(measure("profile", "gpu/profile_steps.py", "--batches", "1,64,256"))


def of(figures: list[Figure]) -> list[object]:
    return [pytest.param(figure, id=figure.id) for figure in figures]


def wanted() -> list[object]:
    """Missed figures are expected to fail, with the figure reached as the reason; a pass of one shows as XPASS, a script that
    breaks or gives no such figure as an error."""

    def marks(figure: Figure) -> list[pytest.MarkDecorator]:
        if not figure.missed:
            return []
        return [pytest.mark.xfail(reason=figure.missed, raises=AssertionError, strict=False)]

    return [pytest.param(figure, id=figure.id, marks=marks(figure)) for figure in FIGURES if figure.wanted is not None]


def value_of(figure: Figure, request: pytest.FixtureRequest) -> float:
    values: Values = request.getfixturevalue(figure.run)
    return values[figure.name]


@pytest.mark.parametrize("figure", of([figure for figure in FIGURES if figure.allowed is not None]))
def test_share_of_the_ceilings(figure: Figure, ceilings: Ceilings, request: pytest.FixtureRequest) -> None:
    value = value_of(figure, request)
    share = figure.share_of(value, ceilings)
    assert share >= figure.least_share, f"{value:g} {figure.unit} is {share:.1%} of what this card allows"


@pytest.mark.parametrize("figure", wanted())
def test_wanted_figure(figure: Figure, request: pytest.FixtureRequest) -> None:
    needs_h200(figure)
    assert figure.wanted is not None
    value = value_of(figure, request)
    assert figure.is_within(value, figure.wanted), f"{value:g} {figure.unit}, wanted {figure.wanted:g}"


@pytest.mark.parametrize("figure", of([figure for figure in FIGURES if figure.missed]))
def test_reached_figure_is_kept(figure: Figure, request: pytest.FixtureRequest) -> None:
    """Where what was wanted was missed, what was reached may not be lost."""
    needs_h200(figure)
    value = value_of(figure, request)
    assert figure.is_within(value, figure.kept), f"{value:g} {figure.unit}, reached before: {figure.reached:g}"


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_a_small_shape_is_not_slowed_by_the_host(batch: int, smol135m: Values, llama8b: Values) -> None:
    """SmolLM2 has 2 % of the 8B shape's parameters: launches and Python are what its steps take time for."""
    small, large = smol135m[f"decode-{batch}"], llama8b[f"decode-{batch}"]
    assert small <= SMALL_SHAPE_SHARE * large, f"{small:g} ms beside {large:g} ms"


def test_where_the_start_up_goes(start_up_rows: list[Row]) -> None:
    """The parts are told and add up; graphs are captured; a second start finds the kernels compiled."""
    first, second = (row["seconds"] for row in start_up_rows)
    for seconds in (first, second):
        assert seconds["graphs"] > 0 and seconds["weights"] > 0 and seconds["largest step"] > 0
        parts = sum(part for name, part in seconds.items() if name != "total")
        assert parts == pytest.approx(seconds["total"], abs=0.1)
    assert second["total"] < first["total"]
