"""`trainyard check checkpoint`, as a user meets it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from trainyard.architecture import parameter_shapes
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import save_checkpoint
from trainyard.cli.check import _describe_layout
from trainyard.cli.main import main
from trainyard.config.load import load_run
from trainyard.layout.resolve import resolve

WANTED = ["model.n_layers=1", "model.d_model=16", "model.d_ff=32", "parallel.tensor=2"]


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run, the older one with weights alone."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    run = load_run("tiny", WANTED).run
    plan = resolve(run, 4)
    weights = {
        f"model.{name}": torch.ones(shape)
        for name, shape in parameter_shapes(run.model, plan.padded_vocabulary_size).items()
    }
    moments = {
        f"optimizer.{name.removeprefix('model.')}.{moment}": torch.zeros_like(weight)
        for name, weight in weights.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    for step, tensors in ((10, weights), (20, weights | moments)):
        facts = Facts(
            step=step,
            consumed_sequences=8 * step,
            consumed_tokens=512 * step,
            run=run.model_dump(mode="json"),
            plan=plan.as_json() if step == 20 else {},
            versions={"torch": torch.__version__, "command": "trainyard train demo"},
            data_fingerprint="abc",
        )
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(folder / "checkpoints", facts, tensors)
    return folder.parent


@pytest.fixture
def runs(saved_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:

    shutil.copytree(saved_runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["check", "checkpoint", *arguments])
    return int(ended.value.code or 0)


def facts_of(text: str, step: int) -> dict[str, str]:
    lines = text.splitlines()
    first = lines.index(f"demo/checkpoints/step-{step:08d}: OK") + 1
    end = next((i for i in range(first, len(lines)) if ": OK" in lines[i]), len(lines))
    return {line[:18].strip(): line[18:].strip() for line in lines[first:end]}


def test_the_newest_of_a_run_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("demo") == 0
    shown = capsys.readouterr().out
    assert "step-00000010" not in shown
    facts = facts_of(shown, 20)
    for name, text in {
        "step": "20: 160 sequences, 10,240 tokens",
        "checksums": "every byte of 3 files matches, ",
        "tensors": "48 in 48 chunks, 2 files, ",
        "model": "1 block, d_model 16, 4 heads, sequences of 64",
        "weights": "16 tensors, 11.5k values, float32",
        "optimizer": "both moments of every weight (exp_avg, exp_avg_sq)",
        "saved by": "4 ranks, shard 2 x tensor 2",
        "versions": f"torch {torch.__version__}",
        "data fingerprint": "abc",
    }.items():
        assert facts[name].startswith(text)


def test_ranks_that_share_experts_are_no_more_ranks() -> None:
    topology = {"pipeline": 2, "replicate": 1, "shard": 4, "context": 1, "tensor": 1, "expert": 4}
    shown = _describe_layout({"topology": topology})
    assert shown == "8 ranks, pipeline 2 x shard 4 x expert 4"


def test_all_of_them_and_one_of_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("demo", "--all") == 0
    shown = capsys.readouterr().out
    assert facts_of(shown, 20)["step"].startswith("20:")
    assert facts_of(shown, 10)["optimizer"] == "none: weights only, moments start from zero"
    assert facts_of(shown, 10)["saved by"] == "unknown"
    assert check("demo/checkpoints/step-00000010") == 0
    assert "step-00000020" not in capsys.readouterr().out


def test_a_damaged_newest_one_is_not_passed_over(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Path("demo/checkpoints/step-00000020")
    (newest / "optimizer-00000-of-00001.safetensors").unlink()
    model = newest / "model-00000-of-00001.safetensors"
    model.write_bytes(model.read_bytes() + b"\0")
    assert check("demo", "--all", "demo/checkpoints/step-00000010") == 2
    captured = capsys.readouterr()
    assert captured.out.count("step-00000010: OK") == 2
    assert "step-00000020" not in captured.out
    title, first, second, hint = captured.err.splitlines()
    assert title == f"error: {newest}: 2 problems"
    assert first.startswith("  model-00000-of-00001.safetensors has ")
    assert second == "  optimizer-00000-of-00001.safetensors is missing or not a regular file"
    assert hint.startswith("hint: restore its files from a copy")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["empty"], "error: no checkpoint in empty\nhint: give a run folder"),
        (["nowhere"], "error: no folder nowhere, and no run of that name in runs/"),
        (["demo/checkpoints/step-00000099"], "error: no folder demo/checkpoints/step-00000099"),
        ([], "missing argument"),
    ],
)
def test_where_there_is_none(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    Path("empty").mkdir()
    assert check(*words) == 2
    assert problem in capsys.readouterr().err
