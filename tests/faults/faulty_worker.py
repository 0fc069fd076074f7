"""A fault for one rank of a run that the real command has started (`forked_command.py`).

In the worker of the chosen rank, `Fault` wraps what tells of its phases, and at the chosen place,
once in the life of a run, does the harm. Nothing else differs from training as users know it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.waiting import wait_until

from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.training import checkpoints, step

SLOW_SECONDS = 2.0
SLOW_FLUSH_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """What is to happen, and where."""

    fault: str
    phase: str
    """As the table of faults calls it."""
    rank: int
    step: int
    """Steps done before the phase, at least; of no meaning for "start" and "load"."""
    disk: Path
    """The file system of the run folder."""

    @property
    def marker(self) -> Path:
        """A file that says that it has happened."""
        return self.disk.with_suffix(".marker")

    @property
    def ballast(self) -> Path:
        """A file that fills the disk."""
        return self.disk / "ballast"

    def install(self, rank: int, _n_before: int) -> None:
        """Makes this worker faulty, if the plan is for its rank."""
        if rank == self.rank and not self.marker.exists():
            Fault(self)


class Fault:
    """Waits for its place, and happens there."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = self.n_beats = 0
        self.parallel_model: Any = None
        self.kills_once_saved = False
        hook(Heartbeat, "enter", self._beat, after=True)
        hook(ParallelModel, "__init__", lambda model, *_: vars(self).update(parallel_model=model))
        hook(torch.Tensor, "backward", lambda *_: self._come_to("backward"))
        hook(checkpoints, "load_into", lambda path, *_: self._come_to("reading", path))
        hook(os, "fsync", self._flush)

    def _beat(self, _heartbeat: Heartbeat, phase: Phase, step: int) -> None:
        self.step = step
        self.n_beats += 1
        if phase != "start" or self.n_beats == 2:  # the first beat comes before all imports
            self._come_to("forward" if phase == "forward and backward" else phase)
        if self.kills_once_saved and phase == "data":
            # The damaged checkpoint has its name now, or soon: the next start reads it.
            name = f"runs/*/checkpoints/step-{self.plan.step:08d}"
            wait_until(lambda: any(self.plan.disk.glob(name)))
            kill_rank()

    def _flush(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # of a save
            self._come_to("save", Path(f"/proc/self/fd/{descriptor}").readlink())

    def _come_to(self, place: str, path: Path | None = None) -> None:
        plan = self.plan
        # What damages files needs one: of those read, or of those written.
        wanted = "reading" if plan.phase == "load" and plan.fault in DAMAGES else plan.phase
        if place != wanted or (place not in ("start", "load", "reading") and self.step < plan.step):
            return
        # It is whole, and has all but its name.
        is_written = path is not None and path.name == f".step-{plan.step:08d}.partial"
        if place == "save" and plan.fault in DAMAGES and not is_written:
            return
        try:
            plan.marker.touch(exist_ok=False)
        except FileExistsError:
            return
        FAULTS[plan.fault](self, path)


def hook(owner: Any, name: str, action: Callable[..., object], *, after: bool = False) -> None:
    """Lets an action precede each call of a function, or follow it."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if not after:
            action(*arguments)
        found = original(*arguments, **options)
        if after:
            action(*arguments)
        return found

    setattr(owner, name, call)


def raise_error(*_: object) -> None:
    raise RuntimeError("injected by a test")


def kill_rank(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_job(*_: object) -> None:
    # The run is so short that it could be over before; without a handler it ends at once.
    handler: Any = signal.getsignal(signal.SIGTERM)  # of `handle_signals`
    noted = inspect.getclosurevars(handler).nonlocals["handler"] if callable(handler) else None
    stop: Any = getattr(noted, "__self__", None)
    os.kill(os.getppid(), signal.SIGTERM)
    wait_until(lambda: stop is not None and stop._signal is not None)


def hold_python_lock(*_: object) -> None:
    library = ctypes.PyDLL(None)  # whose functions keep the lock
    while True:  # a signal wakes it up
        library.sleep(3600)


def spoil_gradient(*_: object) -> None:
    """Puts a NaN into one gradient, when it is complete."""
    module: Any = step
    right = module.reduce_step_stats

    def spoil(parallel_model: Any, *arguments: Any) -> Any:
        local_part(parallel_model.local_parameters[0].gradient).view(-1)[0] = float("nan")
        module.reduce_step_stats = right
        return right(parallel_model, *arguments)

    module.reduce_step_stats = spoil


def flip_bit_of_weight(fault: Fault, _path: Path | None) -> None:
    """Flips the middle bit of a weight, as a faulty memory does."""
    with torch.no_grad():
        weights = local_part(fault.parallel_model.local_parameters[-1].parameter).view(torch.int32)
        weights.view(-1)[0] ^= 1 << 16


def fill_disk(fault: Fault, _path: Path | None) -> None:
    with fault.plan.ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def make_read_only(fault: Fault, _path: Path | None) -> None:
    (folder,) = fault.plan.disk.glob("runs/*")
    (folder / "checkpoints").mkdir(exist_ok=True)
    for options in (["--bind", folder / "checkpoints"], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, folder / "checkpoints"], check=True)


def slow_down_disk(_fault: Fault | None = None, path: Path | None = None) -> None:
    hook(os, "fsync", lambda _: time.sleep(SLOW_FLUSH_SECONDS))
    if path is None:  # reading
        time.sleep(SLOW_SECONDS)


def kill_parent(*_: object) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    wait_until(lambda: False)  # it ends within


def damage(fault: Fault, path: Path | None) -> None:
    """Damages what this rank is about to read, or has written, which is found when it is read."""
    assert path is not None
    fault.kills_once_saved = fault.plan.phase == "save"
    damage_shard(fault.plan.fault, path, fault.plan.rank)


def damage_shard(kind: str, checkpoint: Path, rank: int) -> None:
    """Loses a rank's file of weights, or half of it, or flips a bit of a value in it."""
    path = next(checkpoint.glob(f"model-{rank:05d}-of-*.safetensors"))
    if kind == "lost file":
        path.unlink()
    elif kind == "truncated shard":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)


DAMAGES = ("lost file", "truncated shard", "flipped bit in a shard")
FAULTS: dict[str, Callable[[Fault, Path | None], object]] = {
    "exception": raise_error,
    "abort": lambda *_: os.abort(),
    "segfault": lambda *_: ctypes.string_at(0),
    "SIGKILL": kill_rank,
    "SIGTERM": terminate_job,
    "SIGSTOP": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "GIL held": hold_python_lock,
    "slow rank": lambda *_: time.sleep(SLOW_SECONDS),
    "NaN in a gradient": spoil_gradient,
    "bit flip in a weight": flip_bit_of_weight,
    "disk full": fill_disk,
    "read-only disk": make_read_only,
    "slow disk": slow_down_disk,
    "stale lock": kill_parent,
    **dict.fromkeys(DAMAGES, damage),
}
