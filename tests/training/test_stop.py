"""Signals: the first one asks to save and stop, and one that comes twice at once is one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainyard.parallel.mesh import Mesh, StopVote, build_mesh
from trainyard.topology import Topology
from trainyard.training.stop import TWICE_SECONDS, Stop

PROGRAM = """
import signal, sys, time
from trainyard.training.stop import Stop

clock = [0.0]
time.monotonic = lambda: clock[0]
stop = Stop(None)
with stop.catch_signals():
    signal.raise_signal(signal.SIGUSR1)
    clock[0] += float(sys.argv[1])
    signal.raise_signal(signal.SIGUSR1)
    print(stop.stop_request())
"""


def raise_twice(seconds_between: float) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", PROGRAM, str(seconds_between)]
    return subprocess.run(argv, capture_output=True, text=True)


def test_the_same_signal_from_scheduler_and_parent_counts_once() -> None:
    done = raise_twice(0.1 * TWICE_SECONDS)
    assert (done.returncode, done.stdout) == (0, "75 received SIGUSR1\n")


def test_a_second_signal_ends_at_once() -> None:
    done = raise_twice(1.1 * TWICE_SECONDS)
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, "")


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
