"""A worker in small, for tests of what watches it: the phases of training with nothing to train.

    python pulsing_rank.py RUN_FOLDER '{"n_steps": 20, "faults": [[1, 3, "SIGKILL", 1]]}'

Every second step it saves: an empty manifest. `faults` are [rank, step, what, how many starts]; a
rank has "limit" once it hangs, so that no other is taken for hung on a busy machine.
With "gloo": true the ranks meet as real ones do; else each waits for the files of the others, which
takes less than importing torch does, and for ever if one of them dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainyard.errors import DataError, GuardError, UserError
from trainyard.launch.environment import Process, read_process
from trainyard.launch.heartbeat import Heartbeat, end_with_parent
from trainyard.launch.signals import STOP
from trainyard.launch.watched import be_watched

Meet = Callable[[int, bool], bool]


def hold_the_lock_of_python() -> None:
    """Writes more than there is room for; who sees the first bytes knows that the lock is held."""
    path, n_bytes = Path(sys.argv[1], "held"), 2**20
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    while True:  # a signal wakes it up
        ctypes.PyDLL(None).write(pipe, ctypes.create_string_buffer(n_bytes), n_bytes)


def count_starts() -> int:
    return len(list(Path(sys.argv[1]).glob("starts-*/*")))


def raise_error(error: Exception) -> None:
    raise error


def die_unseen() -> None:
    """Leaves a process behind that keeps all connections open, as a broken network does."""
    wait = (
        "import pathlib, sys, time\n"
        "while len(list(pathlib.Path(sys.argv[1]).glob('starts-*/*'))) == int(sys.argv[2]):\n"
        "    time.sleep(0.01)"
    )
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            os.set_inheritable(int(path.name), True)
    # A fork without a new program could stay behind for ever: other threads may hold locks.
    subprocess.Popen(
        [sys.executable, "-c", wait, sys.argv[1], str(count_starts())],
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.kill(os.getpid(), signal.SIGKILL)


def fail_after_rank_0() -> None:
    """Raises an error once rank 0 has died of it."""
    pid = int((Path(sys.argv[1]) / "0.pid").read_text())
    with suppress(OSError):  # it is gone once its parent has noticed
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    raise ValueError("a bug")


FAULTS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "unseen death": die_unseen,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exception": lambda: raise_error(ValueError("a bug")),
    "late exception": fail_after_rank_0,
    "refuse": lambda: raise_error(DataError("token 7 is damaged", "prepare it again")),
    "give up": lambda: raise_error(GuardError("the loss is not finite", "look")),
    "lock": hold_the_lock_of_python,
    "sleep": lambda: time.sleep(600),
}
HANGS = {"SIGSTOP", "lock"}


@contextmanager
def meet_in_files(process: Process, folder: Path, start: int) -> Iterator[Meet]:
    """Gives a function that returns when all have called it: whether one of them wants to stop."""
    end_with_parent(process.parent_pipe or 0)

    def meet(number: int, stop: bool) -> bool:
        place = folder / f"meeting-{start}" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{process.rank}.{int(stop)}").touch()
        while len(found := list(place.iterdir())) < process.n_ranks:
            time.sleep(0.01)
        return any(path.suffix == ".1" for path in found)

    yield meet


@contextmanager
def meet_by_gloo(process: Process) -> Iterator[Meet]:
    import torch
    import torch.distributed as dist

    from trainyard.parallel.start import start_ranks

    def meet(_number: int, stop: bool) -> bool:
        total = torch.tensor(float(stop))
        dist.all_reduce(total)
        return bool(total.item())

    with start_ranks(process, torch.device("cpu"), dict):
        yield meet


def train(process: Process, folder: Path, wanted: dict[str, Any]) -> int:
    heartbeat = Heartbeat(process.heartbeat)
    stops: list[int] = []

    def note(number: int) -> None:
        stops.append(number)
        (folder / f"{process.rank}.told").touch()

    for number in STOP:
        signal.signal(number, lambda got, _frame: note(got))
    heartbeat.enter("start", 0)
    folder.mkdir(parents=True, exist_ok=True)  # a launcher may start the others before rank 0
    (folder / f"{process.rank}.pid").write_text(str(os.getpid()))
    manifests = (folder / "checkpoints").glob("step-*/manifest.json")
    steps = [int(path.parent.name.removeprefix("step-")) for path in manifests]
    step = max(steps, default=0)
    n_starts = len(list((folder / f"starts-{process.rank}").glob("*")))
    (folder / f"starts-{process.rank}").mkdir(exist_ok=True)
    (folder / f"starts-{process.rank}" / str(n_starts)).write_text(str(step))
    meeting = (
        meet_by_gloo(process) if wanted.get("gloo") else meet_in_files(process, folder, n_starts)
    )
    with meeting as meet:
        stop = False
        while step < wanted["n_steps"] and not stop:
            faults = [
                what
                for rank, at, what, starts in wanted.get("faults", [])
                if (rank, at) == (process.rank, step) and n_starts < starts
            ]
            if HANGS & set(faults):
                heartbeat._step_seconds = wanted.get("limit", heartbeat._step_seconds)
            heartbeat.enter("data", step)
            heartbeat.enter("forward and backward", step)
            for what in faults:
                FAULTS[what]()
            stop = meet(step, bool(stops))
            heartbeat.enter("update", step)
            step += 1
            if step % 2 == 0 or stop:
                heartbeat.enter("save", step)
            if process.rank == 0 and (step % 2 == 0 or stop):
                checkpoint = folder / "checkpoints" / f"step-{step:08d}"
                checkpoint.mkdir(parents=True, exist_ok=True)
                (checkpoint / "manifest.json").touch()
            time.sleep(wanted.get("step_seconds", 0.0))
    if not stop:
        return 0
    return 93 if signal.SIGINT in stops else 75


def main() -> None:
    process = read_process()
    be_watched(process)
    try:
        code = train(process, Path(sys.argv[1]), json.loads(sys.argv[2]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)  # as the real one: the others see at once that it has left


if __name__ == "__main__":
    main()
