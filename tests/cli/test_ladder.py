"""`trainyard ladder`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.command import trainyard

from trainyard.sweeps.law import Law


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = ["name,corpus,parameters,flop,valid,plain"]
    for i, n in enumerate([1e7, 2e7, 4e7, 8e7, 1.6e8]):
        for r in (10, 20, 80):
            loss = 1.7 + 400 / n**0.34 + 1500 / (r * n) ** 0.37
            loss *= 1 + 0.001 * (-1) ** (i + r // 20)
            lines.append(f"m{i}-{r},c4,{n},{6 * n * r * n},{loss},{r}")
    lines += ["broken,c4,1e7,6e15,,9", "other,pile,1e7,6e15,1.0,30"]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    return tmp_path


WORDS = ("ladder", "runs.csv", "--loss", "valid", "--where", "corpus=c4")


def test_a_large_run_is_predicted_and_drawn(folder: Path) -> None:
    asked = ("--at", "1B:20B", "--at", "9e10:2e10", "--flop", "1e20", "--picture", "law.png")
    done = trainyard(*WORDS, *asked, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("15 runs of 5 sizes; 90 % intervals\n")
    lines = done.stdout.splitlines()
    place = lines.index("1B parameters on 20B tokens:")
    assert lines[place + 1].startswith("  2.286")
    assert lines[place + 2].startswith("  20 tokens per parameter; for the same FLOP, ")
    assert lines[place + 3] == (
        "  reach: 6.25 times the parameters, 1.56 times the tokens, 9.77 times the flop of the "
        "largest of 15 runs in 5 sizes"
    )
    assert " best for 1e+20 FLOP " in done.stdout
    reasons = lines[lines.index("90B parameters on 20B tokens:") + 1 :]
    reason = "562 times the largest run, tested to 30: add a larger one"
    assert f"  not predicted: {reason}" in reasons
    assert "left out broken: its loss is nan" in lines
    assert done.stderr == "wrote law.png\n"
    assert (folder / "law.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_the_law(folder: Path) -> None:
    done = trainyard(*WORDS, "--at", "1e9:2e10", "--at", "9e10:2e10", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    law = msgspec.convert(answer["law"], Law)
    first, second = answer["predictions"]
    assert first["loss"] == [*law.predict(1e9, 2e10)] and first["problems"] == []
    assert second["loss"] is None and "times the largest" in second["problems"][-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--at", "1B"), "--at 1B: not PARAMETERS:TOKENS"),
        (("--at", "1B:-3e9"), "--at 1B:-3e9: not PARAMETERS:TOKENS"),
        (("--where", "corpus"), "corpus: not a condition"),
        (("--parameters", "size"), "runs.csv: there is no column 'size'"),
        (("--where", "plain>=x"), "runs.csv, line 2: could not convert string to float: 'x'"),
        (("--parameters", "name"), "line 2: could not convert string to float: 'm0-10'"),
        (
            ("--where", "plain<=20", "--where", "plain>=20", "--where", "plain=21"),
            "0 runs of 0 sizes",
        ),
        (("--picture", "law.jpg"), "--picture law.jpg: pictures are .png or .svg"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, folder: Path) -> None:
    done = trainyard(*WORDS, *words, folder=folder)
    assert done.returncode == 2
    assert message in done.stderr and "hint: " in done.stderr
    missing = trainyard("ladder", "none.csv", folder=folder)
    assert missing.returncode == 2 and "cannot read none.csv" in missing.stderr


def test_a_target_that_does_not_fit_is_named(tmp_path: Path) -> None:
    words = ("ladder", "gpt3-175b", "--gpu", "h100-80g", "--gpus", "8", "--dry-run")
    done = trainyard(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "gpt3-175b: no layout fits on 8 devices" in done.stderr
    assert "one fits on 64 devices with" in done.stderr
