from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainyard.bench.job import Steps, prepare_run
from trainyard.bench.timeline import HostClock, Timeline
from trainyard.config.load import load_run
from trainyard.parallel.mesh import build_mesh
from trainyard.planning.resolve import resolve
from trainyard.training.state import TrainContext
from trainyard.training.worker import build_context


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[TrainContext, Timeline]]:
    """`build(*overrides)` gives the context of the preset tiny on one CPU, and its timeline."""

    def build_tiny(*overrides: str) -> tuple[TrainContext, Timeline]:
        run = prepare_run(load_run("tiny", list(overrides)).run, Steps(1, 2), tmp_path)
        plan = resolve(run, 1)
        timeline = Timeline(HostClock())
        mesh = build_mesh(plan.topology, 0, torch.device("cpu"))
        return build_context(tmp_path, run, plan, mesh, timeline), timeline

    return build_tiny
