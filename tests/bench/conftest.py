from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainyard.bench.job import Steps, prepare_run
from trainyard.bench.measure import Timeline
from trainyard.config.load import load_run
from trainyard.parallel.mesh import HostClock, build_mesh
from trainyard.training.context import build_context
from trainyard.training.run_folder import open_run
from trainyard.training.state import TrainContext


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[TrainContext, Timeline]]:
    """`build(*overrides)` gives the context of the preset tiny on one CPU, and its timeline."""

    def build_tiny(*overrides: str) -> tuple[TrainContext, Timeline]:
        run = prepare_run(load_run("tiny", list(overrides)).run, Steps(1, 2), tmp_path)
        opened = open_run(tmp_path, 1, run)
        timeline = Timeline(HostClock())
        mesh = build_mesh(opened.plan.topology, 0, torch.device("cpu"))
        return build_context(opened, mesh, timeline), timeline

    return build_tiny
