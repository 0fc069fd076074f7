"""What stops a run, saves it or sends it back: files, damaged checkpoints, spikes."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.conftest import flip_bit
from tests.training.conftest import lines_of, start, with_fields
from tests.waiting import wait_until

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.config.run import Run
from trainyard.errors import CheckpointError, GuardError
from trainyard.training import step
from trainyard.training.stop import DONE, Stop, StopReason


def endless(run: Run) -> Run:
    return with_fields(run, train={"length": "100000 steps"}, schedule={"decay": "99999 steps"})


def test_files_save_and_stop_a_run(tiny_run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            wait_until(lambda: metrics.exists() and metrics.read_text().count('"train"') >= 3)
            (folder / "SAVE").touch()
            wait_until(lambda: not (folder / "SAVE").exists())
            wait_until(lambda: '"save"' in metrics.read_text())
        except BaseException as problem:
            problems.append(problem)
        (folder / "STOP").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    ending = start(folder, endless(tiny_run))
    asking.join()
    assert not problems
    assert (ending.exit_code, ending.reason) == (93, f"there is a file {folder / 'STOP'}")
    saved = [line["step"] for line in lines_of(folder, "save")]
    assert len(saved) == 2
    assert 3 <= saved[0] < saved[1]
    with pytest.raises(GuardError, match=r"there is a file .*STOP") as caught:
        start(folder, endless(tiny_run))
    assert caught.value.exit_code == 93
    (folder / "STOP").unlink()


@pytest.mark.parametrize(
    ("seconds", "save", "expected"),
    [
        *((None, 0.0, None), (3600.0, 0.0, None), (-1.0, 0.0, None), (3600.0, 500.0, None)),
        (59.0, 0.0, "75 the job's time limit is in "),
        (600.0, 560.0, "75 the job's time limit is in "),
    ],
)
def test_the_time_limit_of_a_job(seconds: float | None, save: float, expected: str | None) -> None:
    found = Stop(None, scheduler_seconds=seconds, save_seconds=lambda: save).stop_request()
    assert found == expected if expected is None else (found or "").startswith(expected)


def test_nothing_starts_over_where_all_checkpoints_are_damaged(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = with_fields(tiny_run, checkpoint={"interval": 6})
    start(tmp_path / "run", run)
    for path in (tmp_path / "run" / "checkpoints").glob("*/model-*"):
        flip_bit(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used; last .*checksum"):
        start(tmp_path / "run", run)


def plant_spike(monkeypatch: pytest.MonkeyPatch, at_step: int, offsets: set[int]) -> None:
    """Makes the loss of a step ten times what it was, where the data begins at an offset."""
    original = step.compute_gradients

    def with_spike(parts: Any, number: int, data_offset: int, *scale: Any) -> Any:
        loss, totals = original(parts, number, data_offset, *scale)
        if number == at_step and data_offset in offsets:
            totals = dataclasses.replace(totals, loss=10 * totals.loss)
        return loss, totals

    monkeypatch.setattr(step, "compute_gradients", with_spike)


def spiking_run(run: Run, policy: str) -> Run:
    return with_fields(
        run,
        train={"length": "30 steps"},
        schedule={"decay": "30 steps"},
        checkpoint={"interval": 5, "keep_last": 2},
        guard={"spikes": policy, "spike_window": 8},
    )


def test_a_spike_sends_the_run_back(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run = spiking_run(tiny_run, "rollback")
    plant_spike(monkeypatch, 17, {0})
    assert start(folder, run) == DONE
    steps = [line["step"] for line in lines_of(folder, "train")]
    assert steps == [*range(1, 19), *range(16, 31)]
    (record,) = lines_of(folder, "rollback")
    assert (record["step"], record["from_step"], record["skipped_sequences"]) == (15, 18, 3 * 8)
    checkpoint = folder / "checkpoints" / "step-00000030"
    training = read_manifest(checkpoint).training
    assert training["data_offset"] == 3 * 8
    assert training["skipped_ranges"] == [
        {
            "from_sequence": 15 * 8,
            "to_sequence": 18 * 8,
            "step": 15,
            "why": "rollback: spike at step 18",
        }
    ]

    # Stopped and resumed after it, the same weights come out.
    class StopsAtStep20(Stop):
        n_steps = 0

        def stop_request(self) -> str | None:
            self.n_steps += 1
            return str(StopReason("told to")) if self.n_steps == 18 + 5 else None

    monkeypatch.setattr("trainyard.training.loop.Stop", lambda *_: StopsAtStep20(None))
    assert start(tmp_path / "parts", run) == StopReason("told to")
    monkeypatch.setattr("trainyard.training.loop.Stop", Stop)
    assert start(tmp_path / "parts", run) == DONE
    expected = load_tensors(checkpoint, "")
    newest = newest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert newest is not None
    found = load_tensors(newest, "")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert read_manifest(newest).training == {
        **training,
        "held_out_loss": pytest.approx(training["held_out_loss"]),
    }


@pytest.mark.parametrize("request_then", ["75 told to", "SAVE"])
def test_a_request_in_the_step_of_a_rollback_saves_its_record(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_then: str
) -> None:
    run = spiking_run(tiny_run, "rollback")
    plant_spike(monkeypatch, 17, {0})
    calls = iter([None] * 17 + [request_then])
    monkeypatch.setattr(Stop, "stop_request", lambda _: next(calls, None))
    ending = start(tmp_path, run)
    assert ending == (StopReason.of(request_then) or DONE)
    assert 16 in [line["step"] for line in lines_of(tmp_path, "save")]
    if ending != DONE:
        newest = newest_checkpoint(tmp_path / "checkpoints")
        assert newest is not None
        saved = read_manifest(newest)
        assert (saved.step, saved.training["data_offset"]) == (16, 3 * 8)
        assert start(tmp_path, run) == DONE
    assert len(lines_of(tmp_path, "rollback")) == 1
    assert [line["step"] for line in lines_of(tmp_path, "train")] == [*range(1, 19), *range(16, 31)]


def test_no_line_has_the_mean_of_steps_that_were_rolled_back(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_spike(monkeypatch, 16, {0})
    planted, losses = step.compute_gradients, {}

    def noted(parts: Any, number: int, *others: Any) -> Any:
        loss, totals = planted(parts, number, *others)
        losses[number] = float(totals.loss)
        return loss, totals

    monkeypatch.setattr(step, "compute_gradients", noted)
    # The spike is seen at the save of step 20, between two lines.
    run = with_fields(spiking_run(tiny_run, "rollback"), log={"interval": 8})
    assert start(tmp_path / "run", run) == DONE
    means = [(line["step"], line["loss"]) for line in lines_of(tmp_path / "run", "train")]
    assert [number for number, _ in means] == [8, 16, 16, 24, 30]
    assert means[2][1] == pytest.approx(losses[15])


def test_a_spike_that_data_does_not_cause_ends_the_run(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_spike(monkeypatch, 17, set(range(10_000)))
    with pytest.raises(
        GuardError, match="the spike at step 18 needs rollback 4 to step 15; the limit is 3"
    ):
        start(tmp_path / "run", spiking_run(tiny_run, "rollback"))
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["exit_code"] == 93
