"""What stops a run, saves it or sends it back: files, damaged checkpoints, spikes."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.command import Fork
from tests.training import small
from tests.training.conftest import lines_of, newest, require_same, start, stop_at, with_fields
from tests.waiting import wait_until

from trainyard.checkpoint.format import read_manifest
from trainyard.config.run import Run
from trainyard.errors import GuardError
from trainyard.parallel.mesh import Mesh, StopVote, build_mesh
from trainyard.topology import Topology
from trainyard.training import loop, step
from trainyard.training.checkpoints import Saves, build_saver
from trainyard.training.metrics import Metrics
from trainyard.training.state import State
from trainyard.training.stop import DONE, TWICE_SECONDS, Stop, StopReason


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
    stop_at(monkeypatch, 18 + 5)
    assert start(tmp_path / "parts", run) == StopReason("told to", 75)
    assert start(tmp_path / "parts", run) == DONE
    require_same(folder, tmp_path / "parts")
    assert read_manifest(newest(tmp_path / "parts")).training == {
        **training,
        "held_out_loss": pytest.approx(training["held_out_loss"]),
    }


@pytest.mark.parametrize("request_then", ["75 told to", "SAVE"])
def test_a_request_in_the_step_of_a_rollback_saves_its_record(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_then: str
) -> None:
    run = spiking_run(tiny_run, "rollback")
    plant_spike(monkeypatch, 17, {0})
    stop_at(monkeypatch, 18, request_then)
    ending = start(tmp_path, run)
    assert ending == (StopReason.of(request_then) or DONE)
    assert 16 in [line["step"] for line in lines_of(tmp_path, "save")]
    if ending != DONE:
        saved = read_manifest(newest(tmp_path))
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


@pytest.mark.parametrize(
    ("share_of_twice", "code", "says"),
    [(0.1, 0, "75 received SIGUSR1\n"), (1.1, -signal.SIGUSR1, "")],
)
def test_the_same_signal_counts_once_and_a_second_one_ends_at_once(
    share_of_twice: float, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: from the scheduler and the parent."""
    clock = [0.0]

    def be_signalled() -> None:
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        stop = Stop(None)
        with stop.catch_signals():
            signal.raise_signal(signal.SIGUSR1)
            clock[0] += share_of_twice * TWICE_SECONDS
            signal.raise_signal(signal.SIGUSR1)
            sys.stdout.write(f"{stop.stop_request()}\n")

    done = Fork(be_signalled).wait()
    assert (done.returncode, done.stdout) == (code, says)


def test_the_first_signal_says_why() -> None:
    before = signal.getsignal(signal.SIGINT)
    stop = Stop(None)
    with stop.catch_signals():
        assert stop.stop_request() is None
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.stop_request() == "93 received SIGINT"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("n_late", [0, 1])
def test_all_ranks_get_the_request_of_one_in_the_same_step(
    n_late: int, run_ranks: Callable[..., list[Any]]
) -> None:
    requests = {(1, 1): "SAVE", (4, 0): "75 SIGTERM", (4, 1): "93 SIGINT"}

    def vote() -> tuple[list[str | None], int]:
        rank = dist.get_rank()
        mesh = build_mesh(Topology(shard=2), rank, torch.device("cpu"))
        exchanges: list[str | None] = []
        with pytest.MonkeyPatch.context() as patch:
            agree = Mesh.agree
            patch.setattr(Mesh, "agree", lambda *args: exchanges.append(None) or agree(*args))
            ballot = StopVote(mesh, n_late)
            found = [ballot.cast(requests.get((step, rank))) for step in range(7)]
        return found, len(exchanges)

    for found, n_exchanges in run_ranks(2, vote):
        expected = {1 + n_late: "SAVE", 4 + n_late: "75 SIGTERM"}
        assert found == [expected.get(step) for step in range(7)]
        assert n_exchanges == 2 + 2 * n_late, "of texts, after a request only"


def saved_steps(folder: Path, every: dict[str, object], seconds: tuple[float, ...]) -> list[int]:
    """Trains 12 steps, which take that many seconds on each rank's clock; returns those saved."""
    n_ranks = len(seconds)
    settings = {"checkpoint": {"keep_last": 12} | every, "train": {"length": "12 steps"}}
    context = small.build_small_context(n_ranks, **settings, evaluate={"interval": 4})
    context, state = dataclasses.replace(context, folder=folder), State.at_start(context)
    of_step = seconds[context.model.mesh.rank]
    timed = functools.partial(Saves, clock=lambda: state.step * of_step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Saves", timed)
        saver, metrics = build_saver(context), Metrics(context)
        loop.train(context, state, metrics, Stop(None), saver, lambda _step, _text: None)
    metrics.close()
    return sorted(int(path.name[-8:]) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ({"interval": "1 minute"}, [3, 6, 9, 12]),
        ({"interval": "80 seconds"}, [4, 8, 12]),
        ({"interval": "1 hour"}, [12]),
        ({"interval": "1 minute", "keep_every": 5}, [3, 5, 8, 10, 12]),
        ({"interval": "1 hour", "keep_best": 2}, [4, 8, 12]),
        ({"interval": "5 steps"}, [5, 10, 12]),
    ],
)
def test_saves_by_time_and_by_steps(
    every: dict[str, object], steps: list[int], tmp_path: Path
) -> None:
    assert saved_steps(tmp_path, every, (25.0,)) == steps


def test_the_clock_of_the_first_rank_decides_for_all(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    found = run_ranks(2, saved_steps, tmp_path, {"interval": "1 minute"}, (25.0, 1000.0))
    assert found == [[3, 6, 9, 12]] * 2
