"""Checks that a run fits on this machine: memory for its ranks, disk for its checkpoints.

It runs before training, so that a run does not fail hours later, or take the machine down.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from trainyard.config import rules
from trainyard.config.devices import find_device, list_gpus
from trainyard.config.run import Run
from trainyard.errors import MachineError
from trainyard.layout.ranks import is_legal
from trainyard.layout.resolve import Plan, resolve
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.planning.hardware import free_memory_bytes
from trainyard.planning.memory import busiest_memory
from trainyard.planning.search import SAVINGS, USABLE_SHARE, first_saving
from trainyard.units import format_bytes

FORCE = "--force trains anyway"
HERE = "this machine"


def refuse_without_room(run: Run, plan: Plan, n_local_ranks: int, folder: Path) -> None:
    """Rejects a run that does not fit on this machine; passes if unknown.

    Args:
        run: the run to train.
        plan: of all its ranks.
        n_local_ranks: on this machine.
        folder: of the run; it need not exist.

    Raises:
        MachineError: with the need, the available amount, and the smallest change that fits.
    """
    _refuse_without_memory(run, plan, n_local_ranks)
    _refuse_without_disk(run, plan, folder)


def _refuse_without_memory(run: Run, plan: Plan, n_local_ranks: int) -> None:
    """Checks the memory of a GPU, and of this machine for the processes of all its ranks."""
    gpus = list_gpus()
    own = (gpus[0], gpu_bytes(gpus[0]), 1) if gpus else None
    for name, there, n_sharing in filter(None, (own, (HERE, free_memory_bytes(), n_local_ranks))):

        def needed(run: Run, plan: Plan, name: str = name, n_sharing: int = n_sharing) -> int:
            memory = busiest_memory(run, plan, on_gpu=bool(gpus))
            of_process = memory.process_bytes(on_gpu=bool(gpus))
            return n_sharing * (of_process if name == HERE else memory.peak_bytes)

        if there is None or needed(run, plan) <= there:
            continue

        def works(changed: Run, there: int = there, needed: Any = needed) -> bool:
            n_ranks = plan.n_ranks
            return (
                is_legal(changed, n_ranks) and needed(changed, resolve(changed, n_ranks)) <= there
            )

        changes = first_saving(run, SAVINGS, works)
        fix = rules.describe(run, changes, " ") or "a smaller model, or its ranks on more machines,"
        who = "a rank needs" if n_sharing == 1 else f"{n_sharing} ranks need"
        raise MachineError(
            f"{run.name} does not fit in memory: {who} about {format_bytes(needed(run, plan))}, "
            f"and {name} has {format_bytes(there)}" + (" available" if name == HERE else ""),
            f"{fix} fits; {FORCE}",
        )


def _refuse_without_disk(run: Run, plan: Plan, folder: Path) -> None:
    interval, size = run.checkpoint.interval, checkpoint_bytes(run, plan.n_parameters)
    steps = interval if isinstance(interval, int) else 1  # by time: as many as it keeps
    n_saves = 1 + ((plan.n_steps - 1) // steps if steps else 0)
    # The oldest is removed once the newest is complete.
    n_most = min(n_saves, run.checkpoint.keep_last + 1)
    n_more = n_most - len(list((folder / "checkpoints").glob("step-*")))
    place = next(each for each in (folder / "checkpoints", *folder.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if n_more * size > free:
        fewer = "checkpoint.keep_last=1, or " if run.checkpoint.keep_last > 1 else ""
        raise MachineError(
            f"{run.name} keeps up to {n_most} checkpoints of {format_bytes(size)}: "
            f"{format_bytes(n_more * size)} more, and {place.resolve()} has {format_bytes(free)}",
            f"{fewer}free space, or make {folder / 'checkpoints'} a link to another disk; {FORCE}",
        )


def gpu_bytes(name: str) -> int | None:
    """Returns a GPU's memory without the driver's share; None if the GPU is unknown."""
    device = find_device(name)
    return int(USABLE_SHARE * device.memory_bytes) if device and device.memory_bytes else None
