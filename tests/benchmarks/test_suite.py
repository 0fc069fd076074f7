"""The suite of benchmarks, in small: each script leaves a record that becomes rows of the table."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import runs
from tests.benchmarks.running import run

from benchmarks import peers, suite


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", suite.GROUPS, ids=lambda group: group.name)
def test_the_small_form_leaves_a_record(group: suite.Group, tmp_path: Path) -> None:
    if group.script in ("cpu_step.py", "generating.py"):
        pytest.importorskip("transformers")
    record = run_small(group, tmp_path)
    assert record["machine"]
    assert record["command"].split()[1] == f"benchmarks/{group.script}"
    rows = list(group.read(record))
    assert rows
    for row in rows:
        assert math.isfinite(row.share) and row.share > 0
        assert row.ratio is None or (math.isfinite(row.ratio) and row.ratio > 0)
        assert row.render("record").count("|") == 8
    if group.script == "generating.py":
        cases = record["models"]["tiny"]["cases"].values()
        assert [case["same_tokens"] for case in cases] == [True] * 3
    if group.script == "cpu_step.py":
        for cell in record["cells"].values():
            check_losses(cell)


def run_small(group: suite.Group, folder: Path) -> dict[str, Any]:
    # Peers that were checked out before are used; none is fetched.
    options = ["--small", "--only", group.name, "--output", str(folder), "--peers", str(folder)]
    run("suite.py", *options)
    record: dict[str, Any] = json.loads((folder / group.record).read_text(encoding="utf-8"))
    return record


def check_losses(cell: dict[str, Any]) -> None:
    assert cell["same_mathematics"]
    shares = list(cell["profile"].values())
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1
    assert {"ours", "transformers"} <= cell["candidates"].keys()
    ours, nanogpt = cell["candidates"]["ours"], cell["candidates"].get("nanoGPT")
    bound = {"float32": 1e-6, "bfloat16": 1e-3}[cell["cell"]["dtype"]]
    assert nanogpt is None or nanogpt["first_loss"] == pytest.approx(ours["first_loss"], rel=bound)
    for row in cell["candidates"].values():
        assert row["last_loss"] < row["first_loss"]


def test_steps_of_the_gpus_record_have_these_tokens() -> None:
    for name in suite.read_gpu()[2]:
        run = runs.load(name, is_small=False)
        n_tokens = run.train.global_batch_size * run.model.sequence_length
        assert n_tokens == suite.GPU_STEP_TOKENS.get(name, 65_536)


@pytest.mark.parametrize("table", suite.TABLES, ids=lambda table: table.render.__name__)
def test_pages_show_the_records(table: suite.Table) -> None:
    _, rest = table.page.read_text(encoding="utf-8").split(table.marker)
    shown = rest.partition(suite.END)[0]
    assert shown == table.render(suite.RECORDS), "python benchmarks/suite.py --table"


def test_ratios_above_one_are_in_our_favour(tmp_path: Path) -> None:
    rates = suite.Row("cell", "MB/s", 6.0, {"a": 2.0, "b": 3.0}, ("limit", 8.0))
    assert (rates.best_peer, rates.ratio, rates.share) == ("b", 2.0, 0.75)
    seconds = suite.Row("cell", "s", 6.0, {"a": 12.0, "b": 18.0}, ("limit", 3.0))
    assert (seconds.best_peer, seconds.ratio, seconds.share) == ("a", 2.0, 0.5)
    line = "| cell | 6 s | a, 12 | 2.00 | limit, 3 | 0.50 | [record](file) |\n"
    assert seconds.render("[record](file)") == line
    assert suite.Row("cell", "s", 6.0, {}, ("limit", 3.0)).ratio is None
    assert suite.render_table(tmp_path) == "No record yet.\n"


def test_a_script_that_fails_does_not_end_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = suite.Group("broken", "no_such_script.py", "", "", lambda record: [])
    works = suite.Group("works", "script.py", "", "", lambda record: [])
    (tmp_path / "script.py").write_text("open(__import__('sys').argv[-1], 'w').write('{}')")
    monkeypatch.setattr(suite, "GROUPS", (broken, works))
    monkeypatch.setattr(suite, "BENCHMARKS", tmp_path)
    output = tmp_path / "records"
    monkeypatch.setattr(sys, "argv", ["suite.py", "--small", "--output", str(output)])
    monkeypatch.setattr(suite, "render_table", lambda folder: "")
    with pytest.raises(SystemExit, match="error: failed: broken"):
        suite.main()
    assert [path.name for path in output.iterdir()] == ["suite-works.json"]
    assert "no_such_script.py" in capsys.readouterr().out


def test_changes_in_the_checkout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "is_dirty", lambda: True)
    monkeypatch.setattr(sys, "argv", ["suite.py"])
    with pytest.raises(SystemExit, match="the checkout has changes"):
        suite.main()


def test_a_peer_is_checked_out_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone, checkouts = tmp_path / "clones" / "peer", tmp_path / "checkouts"
    clone.mkdir(parents=True)
    (clone / "model.py").write_text("first\n")
    who = {
        f"GIT_{role}_{what}": "a@b"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run(["git", *command], cwd=clone, check=True, env=os.environ | who)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=clone, check=True, capture_output=True, text=True
    ).stdout.strip()
    listed = f'[peer]\nurl = "https://github.com/a/b"\ncommit = "{head}"\npaths = ["model.py"]\n'
    monkeypatch.setattr(peers, "LIST", tmp_path / "peers.toml")
    peers.LIST.write_text(listed + listed.replace("[peer]", "[other]"))
    (clone / "model.py").write_text("second\n")
    folder = peers.find_peer("peer", clone.parent, checkouts)
    assert isinstance(folder, Path)
    assert (folder / "model.py").read_text() == "first\n"
    assert peers.find_peer("peer", tmp_path / "none", checkouts) == folder
    missing = peers.find_peer("other", clone.parent, checkouts)
    assert isinstance(missing, str) and missing.startswith("other: ")
    assert list(checkouts.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("whole", "half", "is_told"),
    [([3.4, 3.8, 3.4], [3.0, 3.2, 3.1], False), ([4.0, 3.8, 4.2], [1.9, 2.7, 2.4], True)],
)
def test_a_steady_state_within_the_noise_is_no_cell(
    whole: list[float], half: list[float], is_told: bool
) -> None:
    cases = {"ours": {"all_wall_seconds": whole}, "ours, half": {"all_wall_seconds": half}}
    assert suite.has_steady(cases, "ours") == is_told
