"""Asynchronous saves: training stalls for a copy to host memory, not for the disk.

    training   step 100 | copy | step 101 | step 102 | step 103 | ...
    writer                     | write, flush, publish | remove old |

One save is in flight at a time: the next waits for it. `reserve` allocates the host memory once,
before the first step; every save reuses it. A failed save removes nothing, and is reported by
`AsyncCheckpointer.take_failure` at the next step, and by `AsyncCheckpointer.wait`.

Old checkpoints are removed only once a newer one is complete. With
`Retention(last=2, every=100, best=1)`:

    step    100    120    140    160    180    200    220    240
    loss   3.10   2.95   2.91   2.80   2.85   2.88   2.86   2.87      held-out
    kept  every                 best          every   last   last
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from trainyard.checkpoint.format import MANIFEST, Facts, list_checkpoints, read_manifest, step_of
from trainyard.checkpoint.save import (
    SavingRank,
    remove_checkpoint,
    remove_partials,
    require_space,
    save_checkpoint,
)
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import CheckpointError, MachineError
from trainyard.parallel.placement import Placement

HELD_OUT_LOSS = "held_out_loss"
"""Key in `Facts.training` of the loss for `Retention.best`: a float, or absent."""
# Tensors start at multiples of this, as with an allocator.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints to keep; the newest always."""

    last: int
    """The newest n."""
    every: int = 0
    """Those whose step is a multiple of it; 0: none."""
    best: int = 0
    """The n with the lowest held-out loss; 0: none."""


@dataclass(frozen=True)
class SaveTimes:
    """Size and times of the newest complete save."""

    step: int
    n_bytes: int
    """Size of the tensors of all ranks."""
    stall_seconds: float
    """How long training stalled, including the wait for the previous save."""
    seconds: float
    """From the call until completion."""


class AsyncCheckpointer:
    """Saves checkpoints one at a time, each while training continues.

    All ranks create one and call `save` and `wait` alike; these fail on all ranks or on none.

    Args:
        folder: the run's checkpoints; the same for all ranks.
        ranks: this rank among those that save; the writer thread calls its `agree`.
        keep: which checkpoints to keep once a newer one is complete.
        background: write while training continues; else `save` returns once all is written, and
            needs no host memory.
        vocabulary: of the run's tokenizer; copied into every checkpoint.

    Attributes:
        last: times of the newest complete save.
    """

    def __init__(
        self,
        folder: Path,
        ranks: SavingRank,
        keep: Retention,
        *,
        background: bool,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self._ranks = ranks
        self._keep = keep
        self._host = _HostMemory() if background else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._untold: deque[MachineError] = deque()
        self.last: SaveTimes | None = None
        if ranks.rank == 0:  # an earlier start may have ended between a save and this
            with suppress(OSError):  # the next save reports it
                remove_partials(folder)
            self._remove_old()

    def reserve(self, n_bytes: int, device: torch.device) -> None:
        """Allocates the host memory before the first save.

        Args:
            n_bytes: size of the tensors that this rank writes.
            device: where they are.
        """
        if self._host is not None:
            self._host.reserve(n_bytes, device)

    def save(
        self,
        facts: Facts,
        tensors: Mapping[str, Tensor],
        placements: Mapping[str, Placement],
        total_bytes: int,
    ) -> None:
        """Starts a save once the previous one has ended; the tensors may change on return.

        `take_failure` and `wait` report a full or unwritable disk, with `background` or without.

        Args:
            facts: the step and its facts.
            tensors: what this rank writes, by global name.
            placements: their positions in the whole tensors.
            total_bytes: size of the tensors of all ranks.
        """
        started = time.perf_counter()
        self._join()
        if self._host is not None:
            tensors = self._host.copy(tensors)
        stall_seconds = time.perf_counter() - started

        def write() -> None:
            try:
                ranks, copied = self._ranks, self._vocabulary
                save_checkpoint(
                    self._folder, facts, tensors, placements, ranks, total_bytes, copied
                )
                seconds = time.perf_counter() - started
                stalled = seconds if self._host is None else stall_seconds
                self.last = SaveTimes(facts.step, total_bytes, stalled, seconds)
                self._remove_old()
            except Exception as error:
                self._error = error
                if isinstance(error, MachineError):
                    self._untold.append(error)

        self._error = None
        if self._host is None:
            write()
            self._raise_bug()
        else:
            # A daemon: waiting for a dead rank must not keep the process alive.
            self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Waits for any save in flight.

        Raises:
            MachineError: the newest save failed, whether or not `take_failure` reported it.
        """
        self._join()
        if self._error is not None:
            raise self._error

    def take_failure(self) -> MachineError | None:
        """Returns an unreported failure, without waiting; raises bugs."""
        self._raise_bug()
        return self._untold.popleft() if self._untold else None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_bug()

    def _raise_bug(self) -> None:
        if self._error is not None and not isinstance(self._error, MachineError):
            raise self._error

    def _remove_old(self) -> None:
        """Removes old checkpoints; failing to do so is a failure of this rank only."""
        if self._ranks.rank != 0:
            return
        try:
            remove_old(self._folder, self._keep)
        except OSError as error:
            why = f"cannot remove an old checkpoint: {error}"
            self._untold.append(MachineError(why, "the new one is complete"))


def remove_old(folder: Path, keep: Retention) -> list[Path]:
    """Removes old checkpoints, and returns their paths.

    With fewer than `keep.last` complete ones it removes nothing; nor does it remove anything newer
    than the last of these, complete or not.
    """
    newest_first = list_checkpoints(folder)
    if len(newest_first) <= keep.last:
        return []
    losses: dict[Path, float] = {}  # of complete ones
    for path in newest_first:
        with suppress(CheckpointError, OSError):
            if len(losses) < keep.last:
                losses[path] = _read_loss(path)
            else:
                losses[path] = _remember_loss(path, (path / MANIFEST).stat().st_mtime_ns)
    newest = list(losses)[: keep.last]
    if len(newest) < keep.last:
        return []
    kept = {*newest, *_best(losses, keep.best)}
    if keep.every:
        kept.update(path for path in losses if (step_of(path) or 0) % keep.every == 0)
    older = newest_first[newest_first.index(newest[-1]) :]
    removed = [path for path in older if path not in kept]
    for path in removed:
        remove_checkpoint(path)
    return removed


def check_saving(folder: Path, total_bytes: int) -> None:
    """Checks, before training starts, that a checkpoint can be written.

    Args:
        folder: the run's checkpoints; created if absent.
        total_bytes: size of the tensors of all ranks.

    Raises:
        MachineError: it cannot be written, or has no space for one checkpoint.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(".partial", ".step-trial-", folder) as trial:
            (Path(trial) / "trial").write_bytes(b"x")
    except OSError as error:
        raise MachineError(
            f"cannot write checkpoints to {folder}: {error}",
            "make it writable, free space on that disk, or name another folder with --output",
        ) from error
    require_space(folder, total_bytes)


class _HostMemory:
    """Host memory for a copy of the tensors, pinned if they are on a GPU."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def reserve(self, n_bytes: int, device: torch.device) -> None:
        """Allocates and touches the memory: the first touch takes longer than a copy."""
        self._room = _allocate(n_bytes, page_locked=device.type == "cuda").zero_()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies tensors; the returned copies are valid until the next call."""
        starts, n_bytes = {}, 0
        for name, tensor in tensors.items():
            starts[name] = n_bytes
            n_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if n_bytes > len(self._room):
            self._room = _allocate(n_bytes, page_locked=on_gpu)
        copies = {}
        for name, tensor in tensors.items():
            part = self._room[starts[name] : starts[name] + tensor.nbytes]
            copies[name] = part.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def _allocate(n_bytes: int, *, page_locked: bool) -> Tensor:
    """Allocates exactly this much; torch rounds pinned memory up to powers of two."""
    room = torch.empty(n_bytes, dtype=torch.uint8)
    if page_locked and n_bytes:  # CUDA refuses to register 0 bytes
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(room.data_ptr(), n_bytes, 0))
        release: Callable[[int], object] = runtime.cudaHostUnregister
        weakref.finalize(room, release, room.data_ptr()).atexit = False
    return room


def _read_loss(path: Path) -> float:
    """Reads the held-out loss of a complete checkpoint; NaN: none.

    Raises:
        CheckpointError: it is not complete.
    """
    loss = read_manifest(path).training.get(HELD_OUT_LOSS)
    return loss if isinstance(loss, float) else math.nan


@functools.cache
def _remember_loss(path: Path, changed_at_ns: int) -> float:
    """Reads a manifest once; else each save would read those of all older checkpoints again."""
    return _read_loss(path)


def _best(losses: Mapping[Path, float], n_best: int) -> list[Path]:
    """Returns those with the lowest held-out loss; ties go to the newest."""
    finite = [path for path, loss in losses.items() if math.isfinite(loss)]
    return sorted(finite, key=lambda path: losses[path])[:n_best]
