from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.report.metrics import Metrics
from trainyard.report.plots import CSS_OF_COLOUR, RunCurves, build_plots, render_svg, save_png


def curves(name: str = "tiny", n: int = 20, **values: Any) -> RunCurves:
    train = [
        {
            "step": step,
            "tokens": 100 * step,
            "loss": 2.0 + 8.0 / step,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0 if step % 10 else 99.0,
            "sequences_per_second": 4.0,
        }
        for step in range(1, n + 1)
    ]
    evaluations = [{"step": n, "tokens": 100 * n, "loss": 2.5}]
    metrics = Metrics(train, evaluations, restarts=values.pop("restarts", []))
    return RunCurves(name, metrics, 64, values.pop("unigram_loss", None))


def test_there_is_a_plot_of_each_quantity() -> None:
    plots = build_plots([curves()])
    assert [plot.name for plot in plots] == [
        "loss",
        "learning_rate",
        "throughput",
        "gradient_norm",
    ]
    assert plots[2].description == "tiny: from 256 at 100 tokens to 256 at 2k tokens."


def test_axes_and_legend_say_what_is_drawn() -> None:
    loss, _, throughput, norm = build_plots([curves(restarts=[7], unigram_loss=7.25)])
    svg = render_svg(loss)
    for text in ("Loss (nats per token)", "tokens consumed", "training", "held out", "restart"):
        assert f">{text}<" in svg
    assert ">token frequencies alone<" in svg
    (axes,) = loss.figure.axes
    drawn = {line.get_label(): line for line in axes.lines}
    assert set(drawn["token frequencies alone"].get_ydata()) == {7.25}
    assert set(drawn["restart"].get_xdata()) == {700.0}
    assert ">Throughput (tokens/s)<" in render_svg(throughput)
    assert norm.figure.axes[0].get_yscale() == "log"


def test_without_frequencies_or_restarts_the_legend_names_none() -> None:
    svg = render_svg(build_plots([curves()])[0])
    assert "frequencies" not in svg
    assert "restart" not in svg


def test_runs_are_told_apart_by_name_and_colour() -> None:
    figure = build_plots([curves("one"), curves("two")])[1].figure
    lines = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert len(set(lines.values())) == 2
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["one", "two"]


def test_a_name_is_neither_a_formula_nor_markup() -> None:
    svg = render_svg(build_plots([curves("$x^2$<script>"), curves("two")])[0])
    assert "$x^2$&lt;script&gt;" in svg
    assert "<script" not in svg


def test_many_points_are_thinned_to_mean_and_range() -> None:
    (axes,) = build_plots([curves(n=5000)])[3].figure.axes
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


def test_the_same_run_gives_the_same_svg() -> None:
    first, second = (render_svg(build_plots([curves()])[0]) for _ in range(2))
    assert first == second


def test_a_png_is_wide_enough_for_print(tmp_path: Path) -> None:
    save_png(build_plots([curves()])[0], tmp_path)
    head = (tmp_path / "loss.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1080, 660)


@pytest.mark.parametrize("n", [0, 1])
def test_a_run_that_has_hardly_begun_can_be_drawn(n: int) -> None:
    run = curves(n=n)
    run.metrics.evaluations.clear()
    svg = render_svg(build_plots([run])[0])
    assert ("nothing logged" in svg) == (n == 0)
