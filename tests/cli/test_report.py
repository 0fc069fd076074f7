"""`trainyard report`, as a user meets it."""

from __future__ import annotations

from pathlib import Path

from tests.command import trainyard
from tests.report.conftest import run_lines, write_run_folder


def test_it_writes_into_the_first_run_folder_and_nothing_else(tmp_path: Path) -> None:
    before = set(write_run_folder(tmp_path / "tiny", run_lines()).iterdir())
    done = trainyard("report", "tiny", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote tiny/report.html\n", "")
    assert set((tmp_path / "tiny").iterdir()) - before == {tmp_path / "tiny" / "report.html"}


def test_a_comparison_has_a_page_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run_folder(tmp_path / name, run_lines())
    done = trainyard("report", "one", "two", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "wrote one-two.html\n"), done.stderr
    assert not (tmp_path / "one" / "report.html").exists()


def test_a_line_to_compare_with_is_drawn_or_refused(tmp_path: Path) -> None:
    write_run_folder(tmp_path / "tiny", run_lines())
    done = trainyard("report", "tiny", "--baseline", "GPT-2=3.3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"GPT-2: 3.3"' in (tmp_path / "tiny" / "report.html").read_text(encoding="utf-8")
    done = trainyard("report", "tiny", "--baseline", "3.3", folder=tmp_path)
    assert done.returncode == 2
    assert "--baseline 3.3: not NAME=LOSS with a positive loss" in done.stderr


def test_curves_for_papers_are_written_when_asked(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run_folder(tmp_path / name, run_lines())
    arguments = ("one", "two", "--output", "both.html", "--png", "some/figures")
    done = trainyard("report", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote both.html\nwrote the curves as PNG files to some/figures\n"
    assert "one, two" in (tmp_path / "both.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in (tmp_path / "some" / "figures").iterdir()) == [
        "gradient_norm.png",
        "learning_rate.png",
        "loss.png",
        "memory.png",
        "throughput.png",
    ]
