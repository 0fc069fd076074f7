from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.command import call

from benchmarks import guide_tables
from trainyard.cli.bench import bench


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
    record = json.loads(Path("record.json").read_text())
    (candidate,) = record["candidates"]
    for table in guide_tables.TABLES:
        capsys.readouterr()
        print_table(table, monkeypatch)
        head, _, *rows = capsys.readouterr().out.splitlines()
        assert head.count("|") == rows[0].count("|")
        cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
        if table == "tgs":
            assert [row.split()[1] for row in rows] == [*map(str, range(5, 11)), "mean"]
            milliseconds = candidate["rounds"][0]["step_milliseconds"][0]
            tokens = record["run"]["global_batch_size"] * record["run"]["model"]["sequence_length"]
            assert float(cells[3]) == pytest.approx(tokens / 2 / milliseconds * 1000, abs=0.1)
        else:
            assert f"{candidate['samples_per_second']:.3f}" in cells
            assert "1/1/2" in cells


def test_a_record_by_the_formula_of_mfu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("record.json").write_text(json.dumps({"candidates": [{"name": "bf16"}]}))
    with pytest.raises(
        SystemExit, match=r"hint: trainyard bench \.\. --flop-formula megatron_deep"
    ):
        print_table("lumi", monkeypatch)
