from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainyard.bench.job import Steps, prepare_run
from trainyard.bench.timeline import HostClock, Timeline
from trainyard.config.load import load_run
from trainyard.parallel.mesh import build_mesh
from trainyard.plan.resolve import resolve
from trainyard.train.state import Parts
from trainyard.train.worker import build_parts


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[Parts, Timeline]]:
    """`build(*overrides)` gives the parts of the preset tiny on one CPU, and what watches them."""

    def build_tiny(*overrides: str) -> tuple[Parts, Timeline]:
        run = prepare_run(load_run("tiny", list(overrides)).run, Steps(1, 2), tmp_path)
        plan = resolve(run, 1)
        timeline = Timeline(HostClock())
        mesh = build_mesh(plan.topology, 0, torch.device("cpu"))
        return build_parts(tmp_path, run, plan, mesh, timeline), timeline

    return build_tiny
