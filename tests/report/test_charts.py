from __future__ import annotations

import hashlib
import struct
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.report.charts import build_charts, thin_out
from trainyard.report.metrics import COLUMNS, Event, RunMetrics, Table
from trainyard.report.pictures import save_png
from trainyard.report.run_view import RunView

from .conftest import make_view

UPLOT_SHA256 = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
"""Of dist/uPlot.iife.min.js in uplot-1.6.32.tgz of the npm registry."""


def table(n: int, **values: Any) -> Table:
    steps = np.arange(1.0, n + 1)
    columns = {key: np.full(n, np.nan) for key in COLUMNS} | {
        "step": steps,
        "tokens": 100 * steps,
        "loss": 2.0 + 8.0 / steps,
        "learning_rate": np.full(n, 1e-3),
        "gradient_norm": np.where(steps % 10, 1.0, 99.0),
        "tokens_per_second_per_device": np.full(n, 256.0),
        "memory_bytes": np.full(n, 3.0 * 2**30),
        "loss_scale": np.ones(n),
    }
    return Table(columns | values)


def curves(name: str = "tiny", n: int = 20, **values: Any) -> RunView:
    unigram_loss, train = values.pop("unigram_loss", None), values.pop("train", table(n))
    evaluations = [{"step": n, "tokens": 100 * n, "loss": 2.5}]
    metrics = RunMetrics(train, evaluations=evaluations, **values)
    return make_view(metrics, name=name, evaluation={"unigram_loss": unigram_loss})


def test_there_is_a_chart_of_each_quantity() -> None:
    charts = build_charts([curves()])
    names = ["loss", "learning_rate", "gradient_norm", "throughput", "memory"]
    assert [chart.name for chart in charts] == names
    assert charts[3].description == "tiny: from 256 at 100 tokens to 256 at 2k tokens."
    assert (charts[4].title, charts[4].series[0].y[0]) == (
        "Peak memory (GiB, device or process)",
        3,
    )


def test_a_loss_scale_is_drawn_where_it_changes() -> None:
    changing = curves(train=table(20, loss_scale=2.0 ** np.arange(20)))
    chart = build_charts([curves("other"), changing])[-1]
    assert (chart.name, chart.is_logarithmic) == ("loss_scale", True)


def test_one_chart_has_both_losses_the_lines_to_compare_with_and_what_was_repeated() -> None:
    series = build_charts([curves(unigram_loss=7.25, abandoned=[table(5), table(3)])])[0].series
    assert [(one.label, one.style, len(one.x)) for one in series] == [
        ("tiny", "line", 20),
        ("repeated later", "faint", 5),
        ("repeated later", "faint", 3),
        ("held out", "points", 1),
        ("token frequencies alone: 7.25", "dashed", 2),
    ]
    assert (series[-1].x.tolist(), series[-1].y.tolist()) == ([0, 2000], [7.25, 7.25])


def test_runs_are_told_apart_by_name_and_colour() -> None:
    series = build_charts([curves("one"), curves("two")])[0].series
    assert {one.label: one.colour for one in series} == {
        **{"one": "run-0", "one, held out": "run-3", "two": "run-1", "two, held out": "run-4"}
    }


def test_restarts_and_rollbacks_are_marked() -> None:
    kinds = ("restart", "rollback", "save failed", "skipped", "skipped", "stop")
    events = [Event(kind, 5 * n, "") for n, kind in enumerate(kinds)]  # type: ignore[arg-type]
    marks = build_charts([curves(events=events), curves("two", events=events)])[1].marks
    at = {"restart": [0], "rollback": [500], "save failed": [1000], "skipped steps": [1500, 2000]}
    assert [one.label for one in marks] == [label for label in at for _ in range(2)]
    assert {one.label: one.x.tolist() for one in marks} == at


def test_values_that_are_no_number_break_the_line_and_are_marked() -> None:
    loss = np.array([5.0, np.nan, 4.0, np.nan, 3.0, 2.9])
    chart = build_charts([curves(train=table(6, loss=loss))])[0]
    assert chart.as_json()["series"][0]["y"] == [5.0, None, 4.0, None, 3.0, 2.9]
    (mark,) = chart.marks
    assert (mark.label, mark.x.tolist()) == ("not a number", [200.0, 400.0])


def test_many_points_are_thinned_to_mean_and_range() -> None:
    mean, high, low = build_charts([curves(n=20_000)])[2].series
    assert len(mean.x) == 2000
    # Every stretch of ten has nine of 1 and one of 99.
    assert np.allclose(mean.y, 10.8)
    assert (high.style, low.style, set(high.y), set(low.y)) == ("high", "low", {99.0}, {1.0})


def test_a_png_is_wide_enough_for_print(tmp_path: Path) -> None:
    run = curves("$x^2$" + "x" * 99, n=5000, events=[Event("restart", 7, "")], unigram_loss=7.0)
    for n in (0, 1):  # a run that has hardly begun can be drawn
        begun = curves(n=n)
        begun.metrics.evaluations.clear()
        (chart,) = build_charts([begun])[:1]
        assert len(chart.series) == n
        save_png(chart, tmp_path)
    save_png(build_charts([run])[0], tmp_path)
    head = (tmp_path / "loss.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1200, 900)


EVEN, UNEVEN, DYING = [5.0, 5, 5, 5], [2.0, 2, 8, 8], [0.0, 4, 4, 12]


def load_maps(loads: dict[int, list[list[float]]], **values: Any) -> list[Any]:
    run = curves(expert_loads={step: np.array(load) for step, load in loads.items()}, **values)
    return build_charts([run])[5:]


def test_maps_show_each_block_and_each_expert_of_the_worst() -> None:
    """The first half of training, when block 0 was the worst, does not choose the block."""
    loads = {5: [[0.0, 0, 0, 20], EVEN], 10: [EVEN, UNEVEN], 20: [EVEN, DYING]}
    blocks, experts = load_maps(loads)
    assert blocks.load_map.values.tolist() == [[4, 1, 1], [1, 1.6, 2.4]]
    assert experts.load_map.values.T.tolist() == [[1] * 4, [0.4, 0.4, 1.6, 1.6], [0, 0.8, 0.8, 2.4]]
    assert (blocks.load_map.most, experts.load_map.most) == (4, 4)
    assert experts.title == "Experts of block 1, the least balanced"
    assert "busiest expert of block 1 has 2 times the mean load, that of block 0 1" in (
        experts.description
    )
    assert experts.series[0].x.tolist() == [0, 500, 1000, 2000]
    assert experts.as_json()["load_map"]["values"][0] == [1, 0.4, 0]


def test_maps_of_long_runs_add_up_neighbours_and_ignore_other_shapes() -> None:
    loads = {step: [EVEN if step % 2 else UNEVEN] for step in range(1, 401)}
    blocks, experts = load_maps({0: [EVEN, EVEN], **loads}, n=400)
    assert blocks.load_map.values.shape == (1, 200)
    assert (experts.load_map.values.T == [0.7, 0.7, 1.3, 1.3]).all()
    assert experts.load_map.most == 2  # noise looks like noise
    assert experts.series[0].x[[1, -1]].tolist() == [200, 40_000]


def test_a_map_as_png(tmp_path: Path) -> None:
    for chart in load_maps({10: [EVEN, UNEVEN], 20: [EVEN, DYING]}):
        assert save_png(chart, tmp_path).stat().st_size > 10_000


def test_the_library_is_the_one_of_the_registry() -> None:
    library = files("trainyard.report").joinpath("uplot/uPlot.iife.min.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() == UPLOT_SHA256


NAN = np.nan


@pytest.mark.parametrize(
    ("y", "n_points", "n_in_each", "mean", "low", "high"),
    [
        ([4, 6, 5, 9, 3, 3], 3, 2, [5, 7, 3], [4, 5, 3], [6, 9, 3]),
        ([1, NAN, NAN, NAN, 5, 7], 3, 2, [1, NAN, 6], [1, NAN, 5], [1, NAN, 7]),
        ([0, 2, 4, 6, 8], 5, 1, *3 * [[0, 2, 4, 6, 8]]),
        ([], 5, 1, [], [], []),
    ],
    ids=["thinned", "gaps", "few", "none"],
)
def test_stretches_have_mean_and_range(
    y: list[float], n_points: int, n_in_each: int, mean: Any, low: Any, high: Any
) -> None:
    thin = thin_out(np.arange(1.0, len(y) + 1), np.array(y, float), n_points)
    assert thin.n_in_each == n_in_each
    assert n_in_each == 1 or thin.x.tolist() == [1.5, 3.5, 5.5]
    for found, expected in ((thin.mean, mean), (thin.low, low), (thin.high, high)):
        np.testing.assert_array_equal(found, expected)


def test_no_spike_of_a_long_curve_is_lost() -> None:
    y = np.ones(1_000_003)
    y[[0, 7, 500_000, -1]] = [5, -3, 99, 42]
    thin = thin_out(np.arange(len(y), dtype=float), y, 500)
    assert (len(thin.x), thin.n_in_each) == (500, 2001)
    assert set(thin.high) == {1, 5, 99, 42}
    assert (thin.low.min(), thin.high[-1]) == (-3, 42)
    assert np.isclose(np.average(thin.mean), y.mean(), rtol=1e-3)
