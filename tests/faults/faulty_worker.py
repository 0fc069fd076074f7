"""A fault for one rank of a run that the real command line has started.

`site/sitecustomize.py` calls `install` in every Python process below the command; the one that is
the worker of the rank that was chosen wraps what tells of its phases, and at the chosen place, once
in the life of a run, does the harm. Nothing else differs from training as users know it.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainyard.launch.heartbeat import Heartbeat, Phase

VARIABLE = "TRAINYARD_TEST_FAULT"
BALLAST = "ballast"
SLOW_SECONDS = 2.0
SLOW_FLUSH_SECONDS = 0.5
WORKER = "trainyard.training.worker"


@dataclass(frozen=True)
class Plan:
    """What is to happen, and where."""

    fault: str
    phase: str
    """As the table of faults calls it."""
    rank: int
    step: int
    """Steps done before the phase, at least; of no meaning for "start" and "load"."""
    marker: str
    """A file that says that it has happened."""
    disk: str
    """The file system of the run folder."""

    def as_variable(self) -> dict[str, str]:
        """Gives it as the environment of the command line."""
        return {VARIABLE: json.dumps(asdict(self))}


def install() -> None:
    """Makes this process faulty, if it is a worker and the plan is for its rank."""
    if WORKER not in sys.orig_argv or VARIABLE not in os.environ:
        return
    plan = Plan(**json.loads(os.environ[VARIABLE]))
    if int(os.environ["TRAINYARD_RANK"]) == plan.rank and not Path(plan.marker).exists():
        Fault(plan).hook()


class Fault:
    """Waits for its place, and happens there."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.phase: Phase = "start"
        self.step = 0
        self.n_beats = 0
        self.parallel_model: Any = None
        self.kills_once_saved = False

    def hook(self) -> None:
        """Wraps what tells of the phases."""
        enter = Heartbeat.enter

        def noted(heartbeat: Heartbeat, phase: Phase, step: int) -> None:
            enter(heartbeat, phase, step)
            self.phase, self.step = phase, step
            self.n_beats += 1
            # The first beat comes before all imports.
            if phase == "start" and self.n_beats == 2:
                self._hook_training()
                self._come_to("start")
            elif phase == "forward and backward":
                self._come_to("forward")
            elif phase in ("load", "data", "update", "evaluate"):
                self._come_to(phase)
            if self.kills_once_saved and phase == "data":
                self._kill_once_saved()

        Heartbeat.enter = noted  # type: ignore[assignment, method-assign]

    def _hook_training(self) -> None:
        """Wraps what has no phase of its own: backward, the writer's flushes, reading, model."""
        import torch

        from trainyard.parallel.model import ParallelModel
        from trainyard.training import checkpoints as module

        checkpoints: Any = module
        backward, flush, load = torch.Tensor.backward, os.fsync, checkpoints.load_into
        build = ParallelModel.__init__

        def noted_backward(*arguments: Any, **options: Any) -> None:
            self._come_to("backward")
            backward(*arguments, **options)  # type: ignore[no-untyped-call]

        def noted_flush(descriptor: int) -> None:
            if threading.current_thread() is threading.main_thread():
                flush(descriptor)
                return
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self._come_to("save", path)
            flush(descriptor)

        def noted_load(path: Path, *arguments: Any) -> None:
            self._come_to("reading", path)
            load(path, *arguments)

        def noted_build(parallel_model: ParallelModel, *arguments: Any, **named: Any) -> None:
            build(parallel_model, *arguments, **named)
            self.parallel_model = parallel_model

        torch.Tensor.backward = noted_backward  # type: ignore[method-assign]
        os.fsync = noted_flush  # type: ignore[assignment]
        checkpoints.load_into = noted_load
        ParallelModel.__init__ = noted_build  # type: ignore[assignment, method-assign]

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
            os.close(os.open(plan.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        FAULTS[plan.fault](self, path)

    def _kill_once_saved(self) -> None:
        """Ends this process once the damaged checkpoint has its name, so that it is read."""
        wait_until(lambda: self.newest_checkpoint_step() >= self.plan.step)
        os.kill(os.getpid(), signal.SIGKILL)

    def newest_checkpoint_step(self) -> int:
        """Gives the step of the newest checkpoint, or 0."""
        folders = Path(self.plan.disk).glob("runs/*/checkpoints/step-*")
        return max((int(path.name.removeprefix("step-")) for path in folders), default=0)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # if never, it is killed with all others
        time.sleep(0.02)


def raise_error(_fault: Fault, _path: Path | None) -> None:
    raise RuntimeError("injected by a test")


def abort(_fault: Fault, _path: Path | None) -> None:
    os.abort()


def read_nowhere(_fault: Fault, _path: Path | None) -> None:
    ctypes.string_at(0)


def kill_rank(_fault: Fault, _path: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_job(_fault: Fault, _path: Path | None) -> None:
    # The run is so short that it could be over before; without a handler it ends at once.
    handler: Any = signal.getsignal(signal.SIGTERM)  # of `handle_signals`
    noted = inspect.getclosurevars(handler).nonlocals["handler"] if callable(handler) else None
    stop: Any = getattr(noted, "__self__", None)
    os.kill(os.getppid(), signal.SIGTERM)
    wait_until(lambda: stop is not None and stop._signal is not None)


def stop_rank(_fault: Fault, _path: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_python_lock(_fault: Fault, _path: Path | None) -> None:
    library = ctypes.PyDLL(None)  # whose functions keep the lock
    while True:  # a signal wakes it up
        library.sleep(3600)


def be_slow(_fault: Fault, _path: Path | None) -> None:
    time.sleep(SLOW_SECONDS)


def spoil_gradient(_fault: Fault, _path: Path | None) -> None:
    """Puts a NaN into one gradient, when it is complete."""
    from trainyard.parallel.placement import local_part
    from trainyard.training import step as module

    step: Any = module
    reduce_step_stats = step.reduce_step_stats

    def spoil(parallel_model: Any, *arguments: Any) -> Any:
        local_part(parallel_model.local_parameters[0].gradient).view(-1)[0] = float("nan")
        step.reduce_step_stats = reduce_step_stats
        return reduce_step_stats(parallel_model, *arguments)

    step.reduce_step_stats = spoil


def flip_bit_of_weight(fault: Fault, _path: Path | None) -> None:
    """Flips the middle bit of a weight, as a faulty memory does."""
    import torch

    from trainyard.parallel.placement import local_part

    with torch.no_grad():
        weights = local_part(fault.parallel_model.local_parameters[-1].parameter).view(torch.int32)
        weights.view(-1)[0] ^= 1 << 16


def fill_disk(fault: Fault, _path: Path | None) -> None:
    with Path(fault.plan.disk, BALLAST).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def make_read_only(fault: Fault, _path: Path | None) -> None:
    (folder,) = Path(fault.plan.disk).glob("runs/*")
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)


def slow_down_disk(_fault: Fault, path: Path | None) -> None:
    flush = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SLOW_FLUSH_SECONDS)
        flush(descriptor)

    os.fsync = slow  # type: ignore[assignment]
    if path is None:  # reading
        time.sleep(SLOW_SECONDS)


def kill_parent(_fault: Fault, _path: Path | None) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    wait_until(lambda: False)  # it ends within


def damage(fault: Fault, path: Path | None) -> None:
    """Damages what this rank is about to read, or has written, which is found when it is read."""
    assert path is not None
    fault.kills_once_saved = fault.plan.phase == "save"
    damage_file(fault.plan.fault, shard_of(path, fault.plan.rank))


def shard_of(checkpoint: Path, rank: int) -> Path:
    """Gives the file with the weights that a rank has written, and reads again."""
    return next(checkpoint.glob(f"model-{rank:05d}-of-*.safetensors"))


def damage_file(kind: str, path: Path) -> None:
    """Loses a file, or half of it, or flips a bit of a value in it."""
    if kind == "lost file":
        path.unlink()
    elif kind == "truncated shard":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with path.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            (value,) = file.read(1)
            file.seek(-3, os.SEEK_END)
            file.write(bytes([value ^ 4]))


DAMAGES = ("lost file", "truncated shard", "flipped bit in a shard")
FAULTS: dict[str, Callable[[Fault, Path | None], None]] = {
    "exception": raise_error,
    "abort": abort,
    "segfault": read_nowhere,
    "SIGKILL": kill_rank,
    "SIGTERM": terminate_job,
    "SIGSTOP": stop_rank,
    "GIL held": hold_python_lock,
    "slow rank": be_slow,
    "NaN in a gradient": spoil_gradient,
    "bit flip in a weight": flip_bit_of_weight,
    "disk full": fill_disk,
    "read-only disk": make_read_only,
    "slow disk": slow_down_disk,
    "stale lock": kill_parent,
    **dict.fromkeys(DAMAGES, damage),
}
