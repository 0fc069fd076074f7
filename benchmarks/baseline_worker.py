"""One process of a baseline that `against.py` times: like `trainyard.bench.worker`.

python -m benchmarks.baseline_worker NAME FOLDER JOB --spawned-at .. --attempt ..
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.bench.worker import main

if TYPE_CHECKING:
    from trainyard.bench.measure import Builder, TimedTraining, Timeline
    from trainyard.config.run import Run
    from trainyard.layout.resolve import Plan
    from trainyard.parallel.mesh import Mesh


def import_builder(name: str) -> Builder:
    """Imports what builds the training of a baseline."""
    import torch
    from benchmarks.baselines import build_baseline

    torch.backends.cuda.enable_cudnn_sdp(enabled=True)  # baselines compute as torch chooses

    def build(_folder: Path, run: Run, plan: Plan, mesh: Mesh, timeline: Timeline) -> TimedTraining:
        return build_baseline(name, run, plan, mesh.device, timeline)

    return build


if __name__ == "__main__":
    baseline = sys.argv.pop(1)
    main(lambda: import_builder(baseline))
