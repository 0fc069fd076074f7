"""A run in fp8 from its start to its end; products and devices are in tests/precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainyard.checkpoint.load import load_tensors, newest_checkpoint
from trainyard.config.run import Run
from trainyard.train.run_folder import write_run_folder
from trainyard.train.stop import DONE, Ending, Stop
from trainyard.train.worker import run_worker


def test_a_resumed_run_is_the_same_to_the_last_bit(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = tiny_run.model_dump(mode="json", exclude_none=True)
    values["precision"] = {"kind": "fp8", "fp8": {"emulate": True, "precise_blocks": 0}}
    values["train"]["length"], values["schedule"]["decay"] = "6 steps", "6 steps"
    run = Run.model_validate(values)

    class StopsAtTheSecondStep(Stop):
        n_steps = 0

        def wish(self) -> str | None:
            self.n_steps += 1
            return str(Ending("told to")) if self.n_steps == 2 else None

    def train_to_end(folder: Path) -> dict[str, Tensor]:
        endings = []
        while DONE not in endings:
            write_run_folder(folder, run, "auto")
            endings.append(run_worker(folder))
        newest = newest_checkpoint(folder / "checkpoints")
        assert newest is not None
        assert len(endings) == (1 if folder.name == "whole" else 3)
        return load_tensors(newest, "")

    whole = train_to_end(tmp_path / "whole")
    assert "precision.fp8.emulate=true: products in fp8 are computed in fp32" in caplog.text
    monkeypatch.setattr("trainyard.train.worker.Stop", lambda *_: StopsAtTheSecondStep(None))
    parts = train_to_end(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
