"""Every fault in every phase of training, and what must come of it.

Each cell is a run of two data-parallel ranks by the real `trainyard train --ranks 2`, one of which
gets the fault (`faulty_worker.py`); `test_fault_table.py` compares with this table what comes of
it: exit code, what was said, how often the run was started again, and whether weights, moments,
losses and the state are in the end those of an undisturbed run, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("start", "load", "data", "forward", "backward", "update", "evaluate", "save")


@dataclass(frozen=True)
class Expected:
    """What must come of a fault."""

    code: int
    """The exit code of the command."""
    says: tuple[str, ...] = ()
    """Regular expressions; RANK is that of the fault, PHASE what a message calls its phase."""
    restarts: int = 0
    """How often the parent starts all again."""
    again: int | None = None
    """The exit code of the same command, given again once the fault is fixed; None: not given."""
    but: tuple[str, ...] = ()
    """Facts in which the end may differ from that of an undisturbed run."""
    not_equal: str = ""
    """Why the weights in the end are others; empty: they are the same to the last bit."""


Row = Mapping[str, Expected | str]
"""By phase; a text is the reason why a combination has no meaning."""


def everywhere(expected: Expected | str, **but: Expected | str) -> Row:
    """Makes a row of one outcome, but for some phases."""
    return {phase: but.get(phase, expected) for phase in PHASES}


def dies(how: str) -> Expected:
    """The rank is named, and all start again."""
    named = rf"rank RANK of 2 on \S+ {how} at step \d+, in PHASE"
    return Expected(0, (named, "restart 1 of 3"), restarts=1)


def hangs(state: str, *more: str) -> Expected:
    """The rank is named when its time is over, and all start again."""
    named = rf"rank RANK of 2 on \S+ has not moved for \d+ s \({state}\) at step \d+, in PHASE"
    return Expected(0, (named, *more, "restart 1 of 3"), restarts=1)


NOTHING = Expected(0)
# One step more has a checkpoint.
STOPS = Expected(75, ("received SIGTERM",), again=0, but=("kept",))
STOPS_EARLY = Expected(75, again=0)
ABANDONED = Expected(-9, again=0)
OLDER = Expected(0, ("step-00000004(, trying the checkpoint before it)?: ",))
DAMAGED_AND_KILLED = Expected(0, (*OLDER.says, "restart 1 of 3"), restarts=1)
FULL = Expected(2, ("No space left|does not fit",), again=0)
NO_CHECKPOINT = "this phase neither reads nor writes checkpoints: the next load finds the fault"
NO_WRITING = "this phase writes nothing: the next write meets the fault"
NO_DISK = "this phase does not use the disk"
NO_GRADIENT = "no gradient exists in this phase"
CORRUPT = Expected(
    93,
    (r"copies of the same weights differ between ranks", r"rank RANK differs|differs from rank"),
    again=0,
)

TABLE: dict[str, Row] = {
    "exception": everywhere(
        dies("ended with code 1"),
        save=Expected(0, (r"rank RANK of 2 on \S+ ended with code 1", "restart 1 of 3"), 1),
    ),
    "abort": everywhere(dies("was ended by SIGABRT")),
    "segfault": everywhere(dies("was ended by SIGSEGV")),
    "SIGKILL": everywhere(dies("was ended by SIGKILL")),
    "SIGTERM": everywhere(STOPS, start=STOPS_EARLY, load=STOPS_EARLY),
    "SIGSTOP": everywhere(hangs("stopped", "rank RANK is stopped: no stack available")),
    "GIL held": everywhere(hangs(r"\w+", "in hold_python_lock")),
    "slow rank": everywhere(NOTHING),
    "NaN in a gradient": everywhere(
        NO_GRADIENT,
        data="tokens are integers",
        forward="a NaN in the forward pass becomes one in the gradient",
        backward=Expected(
            0, ("1 skipped",), not_equal="all ranks leave out the update of that step"
        ),
    ),
    "bit flip in a weight": everywhere(
        CORRUPT, start="there are no weights yet", load="overwritten by the load"
    ),
    "disk full": everywhere(
        NO_WRITING,
        **dict.fromkeys(("start", "load", "update", "save"), FULL),
    ),
    "read-only disk": everywhere(
        NO_WRITING,
        start=Expected(2, ("cannot write checkpoints to .*Read-only",), again=0),
        save=Expected(
            2,
            (r"cannot write the checkpoint .*Read-only", "training continues, and will save again"),
            again=0,
        ),
    ),
    "slow disk": everywhere(NO_DISK, load=NOTHING, save=NOTHING),
    **dict.fromkeys(
        ("lost file", "truncated shard", "flipped bit in a shard"),
        everywhere(NO_CHECKPOINT, start=OLDER, load=OLDER, save=DAMAGED_AND_KILLED),
    ),
    "stale lock": everywhere(ABANDONED),
}
"""The stale lock is that of a parent that was killed: its workers end, and the next is let in."""


COVER = (
    ("exception", "start"),
    ("abort", "forward"),
    ("segfault", "backward"),
    ("SIGKILL", "save"),
    ("SIGTERM", "evaluate"),
    ("SIGSTOP", "data"),
    ("GIL held", "update"),
    ("slow rank", "load"),
    ("NaN in a gradient", "backward"),
    ("bit flip in a weight", "data"),
    ("disk full", "save"),
    ("read-only disk", "start"),
    ("slow disk", "save"),
    ("lost file", "start"),
    ("truncated shard", "load"),
    ("flipped bit in a shard", "load"),
    ("stale lock", "forward"),
)
"""Each fault and each phase at least once."""


def cells() -> list[tuple[str, str]]:
    """Lists the cells that have a meaning."""
    return [
        (fault, phase)
        for fault, outcomes in TABLE.items()
        for phase, outcome in outcomes.items()
        if isinstance(outcome, Expected)
    ]
