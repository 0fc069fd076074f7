from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from trainyard.report.history import COLUMNS, Event, RunMetrics, Table
from trainyard.report.pictures import CSS_OF_COLOUR, render_svg, save_png
from trainyard.report.plots import RunCurves, build_plots


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


def curves(name: str = "tiny", n: int = 20, **values: Any) -> RunCurves:
    unigram_loss, train = values.pop("unigram_loss", None), values.pop("train", table(n))
    evaluations = [{"step": n, "tokens": 100 * n, "loss": 2.5}]
    return RunCurves(name, RunMetrics(train, evaluations=evaluations, **values), unigram_loss)


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_there_is_a_plot_of_each_quantity() -> None:
    plots = build_plots([curves()])
    names = ["loss", "learning_rate", "gradient_norm", "throughput", "memory"]
    assert [plot.name for plot in plots] == names
    assert plots[3].description == "tiny: from 256 at 100 tokens to 256 at 2k tokens."


def test_a_loss_scale_is_drawn_where_it_changes() -> None:
    changing = curves(train=table(20, loss_scale=2.0 ** np.arange(20)))
    plot = build_plots([curves("other"), changing])[-1]
    assert (plot.name, plot.figure.axes[0].get_yscale()) == ("loss_scale", "log")


def test_axes_and_legend_say_what_is_drawn() -> None:
    run = curves(events=[Event("restart", 7, "")], unigram_loss=7.25)
    loss, _, norm, throughput, memory = build_plots([run])
    svg = render_svg(loss)
    for text in ("Loss (nats per token)", "tokens consumed", "training", "held out", "restart"):
        assert f">{text}<" in svg
    assert ">token frequencies alone<" in svg
    (axes,) = loss.figure.axes
    drawn = {line.get_label(): line for line in axes.lines}
    assert set(drawn["token frequencies alone"].get_ydata()) == {7.25}
    (restart,) = axes.collections[0].get_segments()
    assert restart[:, 0].tolist() == [700.0, 700.0]
    assert ">3 GiB<" in render_svg(memory)
    assert ">Throughput (tokens/s per device)<" in render_svg(throughput)
    assert norm.figure.axes[0].get_yscale() == "log"


def test_without_frequencies_or_restarts_the_legend_names_none() -> None:
    svg = render_svg(build_plots([curves()])[0])
    assert "frequencies" not in svg
    assert "restart" not in svg


def test_runs_are_told_apart_by_name_and_colour() -> None:
    figure = build_plots([curves("one"), curves("two")])[1].figure
    lines = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert len(set(lines.values())) == 2
    assert legend_of(figure) == ["one", "two"]


def test_what_was_done_again_is_drawn_faintly() -> None:
    figure = build_plots([curves(abandoned=[table(5), table(3)])])[0].figure
    faint = [line for line in figure.axes[0].lines if line.get_label() == "repeated later"]
    assert [len(line.get_xdata()) for line in faint] == [5, 3]
    assert {line.get_alpha() for line in faint} == {0.45}
    assert legend_of(figure).count("repeated later") == 1


def test_restarts_and_rollbacks_are_marked() -> None:
    kinds = ("restart", "rollback", "save failed", "skipped", "skipped", "stop")
    events = [Event(kind, 5 * n, "") for n, kind in enumerate(kinds)]  # type: ignore[arg-type]
    figure = build_plots([curves(events=events), curves("two", events=events)])[1].figure
    marks = ["restart", "rollback", "save failed", "skipped steps"]
    assert legend_of(figure) == ["tiny", "two", *marks]
    at = {each.get_label(): each.get_segments()[0][0, 0] for each in figure.axes[0].collections}
    assert at == {"restart": 0.0, "rollback": 500.0, "save failed": 1000.0}
    (skipped, _) = (x for x in figure.axes[0].lines if x.get_label() == "skipped steps")
    assert skipped.get_xdata().tolist() == [1500.0, 2000.0]


def test_values_that_are_no_number_break_the_line_and_are_marked() -> None:
    loss = np.array([5.0, np.nan, 4.0, np.nan, 3.0, 2.9])
    figure = build_plots([curves(train=table(6, loss=loss))])[0].figure
    line, alone, missing, *_ = figure.axes[0].lines
    assert np.array_equal(line.get_ydata(), loss, equal_nan=True)
    assert alone.get_ydata().tolist() == [5.0, 4.0]
    assert (missing.get_label(), missing.get_xdata().tolist()) == ("not a number", [200.0, 400.0])


def test_a_name_is_neither_a_formula_nor_markup() -> None:
    svg = render_svg(build_plots([curves("$x^2$<script>"), curves("two")])[0])
    assert "$x^2$&lt;script&gt;" in svg
    assert "<script" not in svg


def test_many_points_are_thinned_to_mean_and_range() -> None:
    (axes,) = build_plots([curves(n=5000)])[2].figure.axes
    line = axes.lines[0]
    assert len(line.get_xdata()) == 500
    # Every stretch of ten has nine of 1 and one of 99.
    assert np.allclose(line.get_ydata(), 10.8)
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).y1 == 99.0


def test_the_svg_follows_the_page(tmp_path: Path) -> None:
    svgs = [render_svg(plot) for plot in build_plots([curves(unigram_loss=7.0)])]
    for svg in svgs:
        ElementTree.fromstring(svg)
        assert svg.startswith('<svg role="img" aria-label="')
        assert not any(colour in svg for colour in CSS_OF_COLOUR)
        assert "var(--run-0)" in svg
        assert "://" not in svg
    ids = re.findall(r'\bid="([^"]*)"', "".join(svgs))
    assert len(ids) == len(set(ids))
    targets = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', "".join(svgs))
    assert targets
    assert {a or b for a, b in targets} <= set(ids)


def test_a_png_is_wide_enough_for_print(tmp_path: Path) -> None:
    save_png(build_plots([curves()])[0], tmp_path)
    head = (tmp_path / "loss.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1200, 831)


@pytest.mark.parametrize("n", [0, 1])
def test_a_run_that_has_hardly_begun_can_be_drawn(n: int) -> None:
    run = curves(n=n)
    run.metrics.evaluations.clear()
    svg = render_svg(build_plots([run])[0])
    assert ("nothing logged" in svg) == (n == 0)
