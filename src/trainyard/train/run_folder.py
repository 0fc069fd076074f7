"""The run folder before training: what can be checked without torch, which takes seconds to import.

The parent of several ranks does no more than this before it starts them, and they import torch
all at once.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Literal

from trainyard.config.load import render_run
from trainyard.config.run import Run
from trainyard.data.loader import data_fingerprint
from trainyard.data.publish import publish_text
from trainyard.errors import ConfigError
from trainyard.train.stop import refuse_stopped

Resume = Literal["auto", "must", "never"]
FIRST_WITH_ZERO_BUBBLE = (2, 13)


def write_run_folder(folder: Path, run: Run, resume: Resume) -> None:
    """Writes run.toml for the workers, once everything that can be checked before is in order.

    Raises:
        UserError: the run cannot be trained here, or differs from the one already in the folder.
    """
    refuse_what_is_not_built(run)
    refuse_stopped(folder)
    fingerprint = data_fingerprint(run)
    if resume == "must" or (folder / "checkpoints").exists():
        _refuse_another_run(folder, run, resume, fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    publish_text(folder / "run.toml", render_run(run))


def refuse_what_is_not_built(run: Run) -> None:
    """Refuses runs that what is installed here can describe but not train.

    Raises:
        ConfigError: names the field.
        MachineError: there is no GPU, which the run needs.
    """
    if run.precision.multiplies_in_fp8:
        from trainyard.precision.float8 import refuse_missing_products

        refuse_missing_products(run)
    is_zero_bubble = run.parallel.pipeline > 1 and run.parallel.schedule == "zero_bubble"
    found = version("torch")
    major, minor = (int(number) for number in found.split(".")[:2])
    # Older ones fail to split the backward pass of our own functions.
    if is_zero_bubble and (major, minor) < FIRST_WITH_ZERO_BUBBLE:
        raise ConfigError(
            f"parallel.schedule='zero_bubble' needs torch 2.13; this is {found}",
            "parallel.schedule='interleaved' with parallel.chunks=2, or a newer torch",
        )


def _refuse_another_run(folder: Path, run: Run, resume: Resume, fingerprint: str) -> None:
    from trainyard.checkpoint.format import read_manifest
    from trainyard.checkpoint.resume import check_resumable
    from trainyard.train.checkpoints import find_checkpoint

    checkpoint = find_checkpoint(folder, resume)
    if checkpoint is not None:
        check_resumable(read_manifest(checkpoint), run, fingerprint)
