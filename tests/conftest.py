"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.circles import is_in_part
from tests.leftovers import collect_what_failed, ended_with_the_block, logging_as_before
from tests.ranks import be_rank, call_in_forks

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup this process goes on after a hangup; what it starts gets the signal as usual.
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layouts", type=int, default=3, help="how many test_layout_walk.py visits")
    parser.addoption("--part", default="1/1", help="of the cases marked `table`, such as 2/3")
    parser.addoption("--rest", default="1/1", help="of other exhaustive tests, such as 1/2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of tables, and the exhaustive tests, that are in other parts."""

    def is_left_out(item: pytest.Item) -> bool:
        is_of_table = item.get_closest_marker("table") is not None
        if not is_of_table and item.get_closest_marker("exhaustive") is None:
            return False
        return not is_in_part(item.nodeid, config.getoption("part" if is_of_table else "rest"))

    left_out = set(filter(is_left_out, items))
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


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`run_ranks(n, function, *arguments)` calls the function in `n` processes joined by gloo.

    Gives what each returned, by rank; `call_in_forks` says what it may be.
    """
    stores = (tmp_path / f"store{number}" for number in count())

    def run(n: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        store = next(stores)
        return call_in_forks(n, lambda rank: be_rank(rank, n, store, partial(function, *arguments)))

    return run


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
