"""Compiled blocks are compared with eager ones before a device trains with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import start, with_fields
from torch import Tensor

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.doctor.diagnosis import PASS, REPLACE
from trainyard.doctor.examine import compare_compiled
from trainyard.errors import MachineError
from trainyard.model.compiled import Trial, compare_compiled_once
from trainyard.model.linear import _RMSNorm

pytestmark = [
    pytest.mark.exhaustive,  # Inductor compiles for a CPU
    pytest.mark.filterwarnings("ignore"),  # the compiler's own, not ours
]


def plant_a_compiler_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _RMSNorm.backward

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found, *others = right(ctx, gradient)
        return torch.zeros_like(found) if torch.compiler.is_compiling() else found, *others

    monkeypatch.setattr(_RMSNorm, "backward", staticmethod(backward))


def test_a_device_is_compared_once_and_refused_where_it_compiles_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_run("smollm2-135m", ["model.d_head=16"]).run.model
    trial = Trial(model, torch.float32, "none", torch.device("cpu"))
    compare_compiled_once(trial, tmp_path)
    plant_a_compiler_that_is_wrong(monkeypatch)
    compare_compiled_once(trial, tmp_path)
    other = replace(trial, dtype=torch.bfloat16)
    with pytest.raises(MachineError, match=r"the gradient of .* differs .* by [0-9]+%") as found:
        compare_compiled_once(other, tmp_path)
    assert "train.compile=never" in found.value.hint and torch.__version__ in found.value.problem
    assert len([*tmp_path.glob("compiled/*")]) == 1


def test_doctor_compares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = compare_compiled(torch.device("cpu"))
    assert finding.verdict == PASS
    plant_a_compiler_that_is_wrong(monkeypatch)
    finding = compare_compiled(torch.device("cpu"))
    assert finding.verdict == REPLACE and "differs" in finding.text


def test_training_does_not_start_where_blocks_compile_wrongly(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_fields(tiny_run, model={"norm": "rms"}, train={"compile": "always"})
    plant_a_compiler_that_is_wrong(monkeypatch)
    with pytest.raises(MachineError, match="compiled blocks are wrong on this CPU"):
        start(tmp_path / "run", run)
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]
