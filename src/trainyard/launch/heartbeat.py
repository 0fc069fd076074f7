"""The heartbeat of a worker: a few bytes of memory shared with its parent process.

The parent allocates the memory and passes its file descriptor, `Process.heartbeat`. The worker
writes its phase, and the parent reads it at any time. Neither ever waits for the other:

    worker   heartbeat = Heartbeat(process.heartbeat, 1200.0)
             heartbeat.enter("data", 0)                     # count 1
             heartbeat.enter("forward and backward", 0)     # count 2
    parent   reader = HeartbeatReader()
             reader.read()   HeartbeatState(count=2, step=0, phase="forward and backward", ..)

A worker whose count does not change within its limit hangs. The bytes are

    0 count   8 limit in seconds   16 step   20 phase   24 process id   28 culprit

followed by the stacks of the worker's threads, written by C code at each `STACK_SIGNAL`, even while
a thread holds Python's lock and no Python code can run.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, get_args

Phase = Literal[
    "start", "load", "data", "forward and backward", "update", "evaluate", "save", "end"
]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
PARTS_OF_A_STEP: Final = ("data", "forward and backward", "update")
START_SECONDS: Final = 3600.0
"""The limit until a worker has read its own."""
STACK_SIGNAL: Final = signal.SIGURG  # harmless to a process that does not expect it
NOBODY, ANOTHER = -1, -2
_BEAT = struct.Struct("QdIII")
_BLAME = struct.Struct("i")
N_BYTES: Final = _BEAT.size + _BLAME.size


@dataclass(frozen=True)
class HeartbeatState:
    """The current state of a worker."""

    count: int = 0
    """Number of phases started; 0 before the first."""
    step: int = 0
    """Steps done."""
    phase: Phase = "start"
    limit_seconds: float = START_SECONDS
    """No progress for longer is a hang."""
    pid: int = 0
    culprit: int = NOBODY
    """The rank that caused this worker to fail; `NOBODY`, or `ANOTHER` if unknown."""

    @property
    def is_victim(self) -> bool:
        """Whether it fails because of another rank."""
        return self.culprit != NOBODY


class Heartbeat:
    """The worker's side: reports its phase.

    Args:
        descriptor: `Process.heartbeat`; None: nobody reads it.
        step_seconds: limit for each part of a step, except the first step after the start.
        slow_seconds: limit for everything else.
    """

    def __init__(
        self,
        descriptor: int | None = None,
        step_seconds: float = float("inf"),
        slow_seconds: float = float("inf"),
    ) -> None:
        self._memory: mmap.mmap = mmap.mmap(-1 if descriptor is None else descriptor, N_BYTES)
        self._step_seconds, self._slow_seconds = step_seconds, slow_seconds
        self._pid = os.getpid()
        self._count = int(_BEAT.unpack_from(self._memory)[0])
        self._first_step: int | None = None
        if self._count == 0:
            self.blame(NOBODY)

    def enter(self, phase: Phase, step: int) -> None:
        """Reports the start of a phase; `step` counts completed steps."""
        self._count += 1
        limit = self._slow_seconds
        if phase in PARTS_OF_A_STEP:
            if self._first_step is None:
                self._first_step = step
            if step != self._first_step:
                limit = self._step_seconds
        place = PHASES.index(phase)
        _BEAT.pack_into(self._memory, 0, self._count, limit, step, place, self._pid)

    def blame(self, rank: int) -> None:
        """Reports which rank caused this worker to fail: a rank, or `ANOTHER`."""
        _BLAME.pack_into(self._memory, _BEAT.size, rank)


class HeartbeatReader:
    """The parent's side; allocates the memory.

    Args:
        descriptor: of existing memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _make_memory() if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, N_BYTES, access=mmap.ACCESS_READ)

    def read(self) -> HeartbeatState:
        """Returns the current state of the worker."""
        before, now = b"", self._memory[:]
        while before != now:  # the worker is writing
            before, now = now, self._memory[:]
        count, limit, step, phase, pid = _BEAT.unpack_from(now)
        (culprit,) = _BLAME.unpack_from(now, _BEAT.size)
        if count == 0:
            return HeartbeatState(pid=pid)
        return HeartbeatState(count, step, PHASES[phase], limit, pid, culprit)

    def read_stacks(self) -> str:
        """Returns the worker's output at each `STACK_SIGNAL`; may be empty."""
        n_bytes = os.fstat(self.descriptor).st_size - N_BYTES
        # A plain read would move the worker's write position.
        return os.pread(self.descriptor, n_bytes, N_BYTES).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Releases the memory; the worker keeps its own handle."""
        self._memory.close()
        os.close(self.descriptor)


def end_with_parent(pipe: int) -> None:
    """Ends this process as soon as its parent has ended, even while it waits.

    Args:
        pipe: `Process.parent_pipe`.
    """

    def wait_for_end() -> None:
        with suppress(OSError):
            os.read(pipe, 1)
            # Not by the logger: the main thread may hold its lock forever.
            os.write(2, b"the parent process of this rank has ended, so this rank ends too\n")
        os._exit(1)

    threading.Thread(target=wait_for_end, name="end with parent", daemon=True).start()


def _make_memory() -> int:
    if hasattr(os, "memfd_create"):  # not on macOS
        descriptor = os.memfd_create("heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, N_BYTES)
    return descriptor
