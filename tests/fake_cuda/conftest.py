"""Cases on the fake device: collected only where there is one, by `make test-cuda`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fake_cuda.start import has_started
from torch.distributed.pipelining import PipelineStage

from trainyard.model import experts as model_experts
from trainyard.parallel import experts as parallel_experts
from trainyard.simulate.fake_world import _balanced

RECORD = "RECORD_LAUNCHES"

if has_started():
    # Forks of the cases have it all; importing takes longer than most of them.
    from tests.fake_cuda.steps import (
        LAUNCHES,
        LAUNCHES_OF_THIS_TORCH,
        judge_launches,
        record_launches,
    )

else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _runs_are_the_tests_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def note_launches(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[int], None]:
    """`note_launches(n)` fails where the row has more launches a step than launches.json says."""

    def note(n: int) -> None:
        record_property("launches", n)
        if RECORD not in os.environ:
            judge_launches(request.node.callspec.id, n)

    return note


@pytest.fixture(autouse=True)
def _load_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each expert as many rows: nothing is computed. Only this may wait for the device."""

    def wait(counts: torch.Tensor, n_rows: int) -> list[Any]:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        counts.tolist()
        torch.cuda.set_sync_debug_mode(mode)
        return _balanced(counts, n_rows)

    for module in (model_experts, parallel_experts):
        monkeypatch.setattr(module, "wait_for", wait)


@pytest.fixture
def stages_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the vote of stages, a product on the device, where nothing is computed."""
    vote: Any = getattr(PipelineStage, "_warmup_backward_result", None)

    def agree(stage: PipelineStage, *arguments: Any, **keywords: Any) -> torch.Tensor:
        vote(stage, *arguments, **keywords)
        return torch.ones(1, dtype=torch.int32)

    if vote is not None:  # in torch 2.11 they do not vote
        monkeypatch.setattr(PipelineStage, "_warmup_backward_result", agree)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the launches of all rows that ran, where asked to."""
    found = {
        report.nodeid.partition("[")[2].removesuffix("]"): value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == "launches"
    }
    if RECORD in os.environ and found:
        record_launches(found, LAUNCHES_OF_THIS_TORCH if os.environ.get("TORCH") else LAUNCHES)
