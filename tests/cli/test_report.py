"""`trainyard report`, as a user meets it."""

from __future__ import annotations

from pathlib import Path

from tests.command import trainyard
from tests.report.conftest import run_lines, write_run_folder


def test_a_run_has_its_page_in_its_folder_and_nothing_else(tmp_path: Path) -> None:
    tiny = write_run_folder(tmp_path / "tiny", run_lines())
    before = set(tiny.iterdir())
    done = trainyard("report", "tiny", "--baseline", "GPT-2=3.3", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote tiny/report.html\n", "")
    assert set(tiny.iterdir()) - before == {tiny / "report.html"}
    assert '"GPT-2: 3.3"' in (tiny / "report.html").read_text(encoding="utf-8")
    done = trainyard("report", "tiny", "--baseline", "3.3", folder=tmp_path)
    assert done.returncode == 2
    assert "--baseline 3.3: not NAME=LOSS with a positive loss" in done.stderr


def test_a_comparison_has_a_page_of_its_own_and_curves_for_papers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run_folder(tmp_path / name, run_lines())
    done = trainyard("report", "one", "two", "--png", "some/figures", folder=tmp_path)
    said = "wrote one-two.html\nwrote the curves as PNG files to some/figures\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert not (tmp_path / "one" / "report.html").exists()
    names = {"gradient_norm", "learning_rate", "loss", "memory", "throughput"}
    assert {path.stem for path in (tmp_path / "some" / "figures").iterdir()} == names
