"""Forks of this process, which has imported everything, as the ranks of a test."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from tests.waiting import WATCHDOG_SECONDS, prepare_fork

Found = TypeVar("Found")
Pipes = list[tuple[Connection, Connection]]


class Agreement:
    """What `Mesh.agree` does, between threads."""

    def __init__(self, n: int) -> None:
        self._texts: list[str | None] = [None] * n
        self._barrier = threading.Barrier(n, timeout=WATCHDOG_SECONDS)

    def agree(self, rank: int, text: str | None) -> str | None:
        self._texts[rank] = text
        self._barrier.wait()
        found = next((text for text in self._texts if text is not None), None)
        self._barrier.wait()
        return found


class RankError(Exception):
    """Carries the traceback of another process, as the cause of the error raised here."""


def call_in_forks(
    n: int, function: Callable[[int], Found], *, must_end: bool = True
) -> list[Found]:
    """Calls a function in forks of this process, with the number of each.

    Gives what each returned, in order: numbers, bytes, NumPy arrays, but no tensors, whose memory
    ends with the process. Arguments need not travel, and functions may be local.

    Args:
        must_end: whether a fork must end with exit code 0 after its result; else it is killed.

    Raises:
        Exception: the first error of any fork.
    """
    prepare_fork()
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(n)]
    forks = [fork.Process(target=_be_fork, args=(rank, pipes, function)) for rank in range(n)]
    try:
        for process in forks:
            process.start()
        for _, sender in pipes:
            sender.close()
        results = _collect([receiver for receiver, _ in pipes])
        if must_end:
            for process in forks:
                process.join(WATCHDOG_SECONDS)
            codes = {rank: process.exitcode for rank, process in enumerate(forks)}
            codes = {rank: code for rank, code in codes.items() if code}
            assert not codes, f"exit codes of ranks after their results: {codes}"
        return results
    finally:
        for process in filter(lambda process: process.pid, forks):
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            for end in pipe:
                end.close()


def be_rank(rank: int, n: int, store: Path, function: Callable[[], Found]) -> Found:
    """Calls a function as one of `n` processes joined by gloo, which meet in a file."""
    import torch.distributed

    from trainyard.parallel.start import show_native_stacks

    dist: Any = torch.distributed
    faulthandler.enable(file=2)
    show_native_stacks()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), n),
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=WATCHDOG_SECONDS),
    )
    result = function()
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()
    return result


def _collect(receivers: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + WATCHDOG_SECONDS
    while len(results) < len(receivers):
        waiting = [r for rank, r in enumerate(receivers) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in results]
            raise TimeoutError(f"no result of ranks {missing} after {WATCHDOG_SECONDS:g} seconds")
        for receiver in [each for each in waiting if each in ready]:
            rank = receivers.index(receiver)
            try:
                results[rank], error, trace = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result") from None
            if error is not None:
                raise error from RankError(f"in rank {rank}:\n{trace}")
    return [results[rank] for rank in range(len(receivers))]


def _be_fork(rank: int, pipes: Pipes, function: Callable[[int], object]) -> None:
    # Left open by a sister, a pipe would outlive its rank.
    for other, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if other != rank:
            sender.close()
    sender = pipes[rank][1]
    try:
        sender.send((function(rank), None, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            sender.send((None, error, trace))
        except Exception:  # some errors cannot be sent
            sender.send((None, RuntimeError(repr(error)), trace))
        # Leaving now would break what its peers do; their error might be heard first.
        time.sleep(WATCHDOG_SECONDS)
