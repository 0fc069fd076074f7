"""The same training on a GPU: the losses of the CPU, and an exact resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.training.conftest import losses_of, require_same, start, with_fields

from trainyard.config.run import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


BOUNDS = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}


def losses(folder: Path, run: Run) -> list[float]:
    start(folder, run)
    return losses_of(folder)


@pytest.mark.parametrize(("precision", "bound"), BOUNDS.items())
def test_losses_with_dropout_are_the_same_compiled(
    tiny_run: Run, tmp_path: Path, precision: str, bound: float
) -> None:
    fields = {"kind": precision, "loss_scale": {"initial": 4096.0}}
    run = with_fields(tiny_run, model={"dropout": 0.1}, precision=fields)
    eager = losses(tmp_path / "eager", with_fields(run, train={"compile": "never"}))
    assert losses(tmp_path / "compiled", run) == pytest.approx(eager, abs=bound)


@pytest.mark.parametrize(("precision", "bound"), BOUNDS.items())
def test_losses_equal_the_cpus(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    bound: float,
) -> None:
    fields = {"kind": precision, "loss_scale": {"initial": 4096.0}}
    run = with_fields(tiny_run, model={"dropout": 0.0}, precision=fields)
    on_gpu = losses(tmp_path / "gpu", with_fields(run, train={"compile": "never"}))
    compiled = losses(tmp_path / "compiled", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = losses(tmp_path / "cpu", with_fields(run, precision={"kind": "fp32"}))
    assert on_gpu == pytest.approx(on_cpu, abs=bound)
    assert compiled == pytest.approx(on_cpu, abs=bound)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp8", "fp8_lowbit"])
@pytest.mark.parametrize("compiles", ["never", "gpu"])
def test_a_deterministic_run_resumes_bitwise(
    tiny_run: Run, tmp_path: Path, precision: str, compiles: str
) -> None:
    if precision.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products in fp8 on this GPU")
    train = {"deterministic": True, "compile": compiles}
    run = with_fields(tiny_run, train=train, precision={"kind": precision})
    run = with_fields(run, checkpoint={"interval": 6}, model={"dropout": 0.1})
    start(tmp_path / "whole", run)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000012")
    start(tmp_path / "parts", run, "must")
    require_same(tmp_path / "whole", tmp_path / "parts")
