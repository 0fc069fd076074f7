"""Benchmarks in small: each leaves a record, and its page shows what the record says."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.guides import (
    PARTS,
    begin_row,
    list_jobs,
    list_missing,
    write_page,
)
from tests.benchmarks.running import ROOT, measure, run
from tests.command import call

from benchmarks import growth_page, guide_tables
from trainyard.cli.bench import bench
from trainyard.planning.clusters import find_machine


@pytest.mark.exhaustive
def test_many_workers_neither_storm_the_file_system_nor_collide() -> None:
    found = measure("sharing.py", "--workers=128", "--units=140", "--joins=4", "--dead=4")
    assert found["calls_per_second_at_rest_max"] <= 10
    assert found["failed_claims_per_unit_mean"] <= 2
    assert found["progress_calls_per_second"] <= 10
    # The pieces of the dead were taken over: after a minute of silence, not much later.
    assert 120 < found["virtual_seconds"] < 400


def test_each_band_is_compared_alone() -> None:
    found = measure("comparing.py", "--documents=32000", "--bands=3", "--processes=2")
    assert len(found["exact"]["cpu_seconds_of_each"]) == 1
    assert len(found["near"]["cpu_seconds_of_each"]) == 3


@pytest.mark.exhaustive
def test_what_learns_best(tmp_path: Path) -> None:
    text = tmp_path / "pages.txt"
    pages = sorted((ROOT / "docs").rglob("*.md"))
    text.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    options = ["--steps=20", "--seeds=1", "--rates", "0.004", "0.008"]
    record = measure("learning.py", str(text), *options)
    for kind in ("gpt3 adamw", "gpt3 muon", "modern adamw", "modern muon"):
        found = record[kind]
        grid = found["final_loss_by_learning_rate"]
        assert list(grid) == ["0.004", "0.008"]
        assert grid[str(found["learning_rate"])] == min(grid.values()) == found["final_losses"][0]
        (losses,), (tokens,) = found["held_out"], found["tokens_to_target"]
        reached = min(loss for _, loss in losses) <= record["target_loss"]
        assert 0 < tokens <= 20 * 32 * 64 if reached else tokens is None
    assert record["target_loss"] == max(record["gpt3 adamw"]["final_losses"])


@pytest.mark.exhaustive
def test_experts_against_dense_models(tmp_path: Path) -> None:
    text = tmp_path / "pages.txt"
    pages = sorted((ROOT / "docs").rglob("*.md"))
    text.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    record = measure("experts.py", str(text), "--steps=20", "--seeds=1")
    dense, experts = record["dense"], record["experts, loss"]
    for kind in ("dense, as much CPU time", "experts, bias", "experts, no balance"):
        assert record[kind]["mean_held_out"] < math.log(1024)
    assert dense["imbalance"] == [None] and 1 < experts["imbalance"][0] <= 4
    # Six of eight experts of each block are idle: three matrices of 96 x 128 each, and the router.
    assert experts["parameters"] - dense["parameters"] == 4 * (6 * 3 * 96 * 128 + 8 * 96)


CELLS = ["tensors", "saving", "chunks", "devices", "depth", "ranks"]


@pytest.mark.parametrize(
    "cells", [["documents"], pytest.param(["files", *CELLS], marks=pytest.mark.exhaustive)]
)
def test_growth_fits_slopes(cells: list[str], tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    run("growth.py", "--small", "--only", *cells, "--output", str(output))
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["machine"]
    assert list(record["cells"]) == cells
    growth_page.draw(record, tmp_path / "growth.svg")
    picture = (tmp_path / "growth.svg").read_text(encoding="utf-8")
    table = growth_page.render_table(record)
    for cell in record["cells"].values():
        for name, cost in cell["costs"].items():
            assert math.isfinite(cost["slope"])
            assert 0 <= cost["fixed_share"] <= 1
            assert len(cost["sizes"]) == len(cost["values"]) >= 2
            assert f">{name} {growth_page.show_slope(cost)}<" in picture
            assert f"| {cell['counted']} | " in table and f"| {name}" in table
    for name in {"tensors", "saving", "chunks"} & {*cells}:  # bytes are the same on every machine
        assert record["cells"][name]["costs"]["manifest"]["slope"] < growth_page.STEEP


def test_the_page_of_growth_shows_its_record() -> None:
    again = "if so: python benchmarks/growth.py --table"
    record = json.loads(growth_page.RECORD.read_text(encoding="utf-8"))
    page = growth_page.PAGE.read_text(encoding="utf-8")
    assert growth_page.render_table(record).join(growth_page.MARKERS) in page, again
    picture = growth_page.PICTURE.read_text(encoding="utf-8")
    for cell in record["cells"].values():
        for name, cost in cell["costs"].items():
            assert f">{name} {growth_page.show_slope(cost)}<" in picture, again


def print_table(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["guide_tables.py", "record.json", table])
    guide_tables.main()


@pytest.mark.exhaustive
def test_tables_of_guides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--ranks", "2", "--steps", "5-10", "--flop-formula", "megatron_deepspeed"]
    call(bench, "tiny", *words, "--output", "record.json")
    (candidate,) = json.loads(Path("record.json").read_text())["candidates"]
    for table in guide_tables.TABLES:
        capsys.readouterr()
        print_table(table, monkeypatch)
        head, _, *rows = capsys.readouterr().out.splitlines()
        assert head.count("|") == rows[0].count("|")
        cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
        if table == "tgs":
            assert [row.split()[1] for row in rows] == [*map(str, range(5, 11)), "mean"]
        else:
            assert f"{candidate['samples_per_second']:.3f}" in cells and "1/1/2" in cells


def test_a_record_by_the_formula_of_mfu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("record.json").write_text(json.dumps({"candidates": [{"name": "bf16"}]}))
    with pytest.raises(SystemExit, match=r"hint: trainyard bench .* --flop-formula megatron_deep"):
        print_table("lumi", monkeypatch)


RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_run_file_is_a_job() -> None:
    files = (p.relative_to(RECIPES) for p in RECIPES.glob("*/*.toml"))
    jobs = list_jobs()
    assert sorted(job.name for job in jobs) == sorted(str(p.with_suffix("")) for p in files)
    for job in jobs:
        option, name = job.guide.machine
        find_machine(**{option.removeprefix("--"): name})
        assert 0 <= job.middle_rank < job.n_devices
    by_name = {job.name: job for job in jobs}
    assert by_name["benchmark64/tgs"].step == by_name["benchmark64/full"].step
    assert by_name["benchmark64/tgs"].middle_rank == 32
    assert len({job.step for job in jobs}) == len(jobs) - 1


def test_what_fails_is_said_and_asked_again() -> None:
    (job,) = list_jobs("lumi/13b")
    failed: dict[str, Any] = {part: {"failed": "ended after 1 s"} for part in PARTS}
    row = begin_row(job) | failed
    assert [part for _, part in list_missing([job], {job.name: row})] == list(PARTS)
    (line,) = (x for x in write_page({job.name: row}, "", "").splitlines() if "`lumi/13b`" in x)
    assert line.count("ended after 1 s") == 3
    # Two jobs of one step: the second is not simulated.
    both = list_jobs("benchmark64")
    assert [part for _, part in list_missing(both, {})].count("simulation") == 1
