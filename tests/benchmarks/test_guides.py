"""The page of every guide's jobs: no run file is forgotten, and a record becomes a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.guides import (
    PARTS,
    begin_row,
    examine,
    list_jobs,
    list_missing,
    write_page,
)

from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.memory import rank_memory

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


@pytest.mark.exhaustive
def test_a_job_and_its_line_of_the_page() -> None:
    (job,) = list_jobs("gpt-10m")
    row = begin_row(job)
    assert [part for _, part in list_missing([job], {})] == list(PARTS)
    for part in PARTS:
        row[part] = examine(job, part, 300)
    assert not list_missing([job], {job.name: row})
    plan, simulation = row["plan"], row["simulation"]
    assert plan["n_parameters"] > 10e6
    assert simulation["peak_bytes"] <= simulation["planned_bytes"]
    run = job.load()
    found = [rank_memory(run, resolve(run, 1), 0, on_gpu).peak_bytes for on_gpu in (True, False)]
    assert simulation["planned_bytes"] <= found[0]  # it simulates a GPU; the job is on a CPU
    assert plan["peak_bytes_by_pipeline_rank"] == found[1:]
    page = write_page({row["recipe"]: row}, "record.json", "abc")
    assert "| `laptop/gpt-10m`, 1 | one process" in page
    assert "rank 0: " in page
    assert "## LUMI" not in page


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
