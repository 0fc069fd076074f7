"""Fixtures that every test folder shares."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.circles import is_in_part
from tests.leftovers import collect_what_failed, ended_with_the_block, logging_as_before
from tests.waiting import WATCHDOG_SECONDS, prepare_fork

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup this process goes on after a hangup; what it starts gets the signal as usual.
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layouts", type=int, default=3, help="how many test_layout_walk.py visits")
    parser.addoption("--part", default="1/1", help="of the cases marked `table`, such as 2/3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of tables that are in other parts."""
    part = config.getoption("part")
    left_out = {
        item
        for item in items
        if item.get_closest_marker("table") and not is_in_part(item.nodeid, part)
    }
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Leaves no process and no log of a test to the next one."""
    with ended_with_the_block(), logging_as_before():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Leaves no open pipe or file of a failed test to the next one."""
    before = item.session.testsfailed
    try:
        return (yield)
    finally:
        if item.session.testsfailed > before:
            collect_what_failed()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real corpora and golden files, beside the checkout."""
    folder = Path(__file__).parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real corpora and golden files (../shared/data) are not on this machine")
    return folder


settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")  # both would be exceeded on a busy machine
# A shell that starts tests in its background lets them, and all they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Forked ranks would wait for ever for the threads of a pool of compilers that their parent started.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


class _RankError(Exception):
    """Carries the traceback of another process, as the cause of the error raised here."""


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`run_ranks(n, function, *arguments)` calls the function in `n` processes joined by gloo.

    Gives what each returned, by rank: numbers, bytes, NumPy arrays, but no tensors, whose memory
    ends with the process. The first error of any rank is raised here.
    Processes are forked: arguments need not travel, and functions may be local.
    """
    n_calls = 0

    def run(n: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        nonlocal n_calls
        n_calls += 1
        prepare_fork()
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe(duplex=False) for _ in range(n)]
        store = tmp_path / f"store{n_calls}"
        ranks = [
            fork.Process(target=_be_rank, args=(rank, n, store, pipes, function, arguments))
            for rank in range(n)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, sender in pipes:
                sender.close()
            results = _collect([receiver for receiver, _ in pipes])
            for rank in ranks:
                rank.join(WATCHDOG_SECONDS)
            codes = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode}
            assert not codes, f"exit codes of ranks after their results: {codes}"
            return results
        finally:
            for rank in filter(lambda rank: rank.pid, ranks):
                rank.kill()
                rank.join()
                rank.close()
            for pipe in pipes:
                for end in pipe:
                    end.close()

    return run


def _collect(receivers: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + WATCHDOG_SECONDS
    while len(results) < len(receivers):
        waiting = [r for rank, r in enumerate(receivers) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in results]
            raise TimeoutError(f"no result of ranks {missing} after {WATCHDOG_SECONDS:g} seconds")
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                results[rank], error, trace = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result") from None
            if error is not None:
                raise error from _RankError(f"in rank {rank}:\n{trace}")
    return [results[rank] for rank in range(len(receivers))]


def _be_rank(
    rank: int,
    n: int,
    store: Path,
    pipes: list[tuple[Connection, Connection]],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    from trainyard.parallel.start import show_native_stacks

    # LocalParameter open by a sister, a pipe would outlive its rank.
    for other, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if other != rank:
            sender.close()
    sender = pipes[rank][1]
    faulthandler.enable(file=2)
    show_native_stacks()
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), n),
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=WATCHDOG_SECONDS),
        )
        result = function(*arguments)
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
        sender.send((result, None, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            sender.send((None, error, trace))
        except Exception:  # some errors cannot be sent
            sender.send((None, RuntimeError(repr(error)), trace))
        # Leaving now would break what its peers do; their error might be heard first.
        time.sleep(WATCHDOG_SECONDS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how far each layout of the parity tests was from the single device."""
    reports = [r for r in terminalreporter.getreports("passed") if r.when == "call"]
    lines = [
        f"{value}  {report.nodeid.rpartition('[')[2].rstrip(']')}"
        for report in reports
        for name, value in report.user_properties
        if name == "difference"
    ]
    if lines:
        terminalreporter.section("relative differences from the single device")
        terminalreporter.write("\n".join(sorted(lines)) + "\n")
