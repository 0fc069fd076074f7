"""Progress of the preparation of a corpus, visible to any process on any machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.corpus.preparation.work_folder import WorkerState, WorkFolder

STATES_PER_SECOND = 2
"""How many workers' states are read at most, by one process."""


@dataclass(frozen=True)
class Progress:
    """What all workers together have done; documents and tokens are of those that are named."""

    done_bytes: int
    total_bytes: int
    units_done: int
    units: int
    outputs_done: int
    documents: int
    tokens: int
    bytes_per_second: float
    """Of input, by the workers that are alive."""
    workers: dict[str, tuple[WorkerState, bool]]
    """By name: what it said last, and whether it is alive."""
    stopped: list[str]
    """Pieces with a document that cannot be read."""

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None where there is none."""
        if not self.bytes_per_second:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second


class ProgressReader:
    """Reads a work folder again and again; what it costs does not grow with the workers."""

    def __init__(self, folder: WorkFolder, unit_bytes: Sequence[int]) -> None:
        self._folder = folder
        self._unit_bytes = unit_bytes
        self._states: dict[str, tuple[WorkerState, bool]] = {}
        self._next_states = float("-inf")

    def read(self) -> Progress | None:
        """Returns the progress; each worker's part may be older than the rest."""
        try:
            if time.monotonic() >= self._next_states:
                self._states = self._folder.read_states()
                self._next_states = time.monotonic() + len(self._states) / STATES_PER_SECOND
        except FileNotFoundError:
            return None
        return read_progress(self._folder, self._unit_bytes, self._states)


def read_progress(
    folder: WorkFolder,
    unit_bytes: Sequence[int],
    states: dict[str, tuple[WorkerState, bool]] | None = None,
) -> Progress | None:
    """Reads a work folder; None when it is gone, which means that the work is done or not begun.

    Args:
        folder: to read.
        unit_bytes: of each unit.
        states: what workers said, if it was read already.
    """
    try:
        done = folder.names("done")
        states = folder.read_states() if states is None else states
        stopped = folder.names("stopped")
    except FileNotFoundError:
        return None
    units = [int(name.partition("-")[2]) for name in done if name.startswith("unit-")]
    alive = [state for state, is_alive in states.values() if is_alive]
    done_bytes = sum(unit_bytes[unit] for unit in units)
    working_bytes = sum(state.piece_bytes for state in alive if state.piece not in done)
    now = time.time()
    rate = sum(
        (state.finished_bytes + state.piece_bytes) / max(now - state.started, 1.0)
        for state in alive
    )
    return Progress(
        done_bytes=done_bytes + working_bytes,
        total_bytes=sum(unit_bytes),
        units_done=len(units),
        units=len(unit_bytes),
        outputs_done=sum(name.startswith("join-") for name in done),
        documents=sum(state.documents for state, _ in states.values()),
        tokens=sum(state.tokens for state, _ in states.values()),
        bytes_per_second=rate,
        workers=states,
        stopped=stopped,
    )
