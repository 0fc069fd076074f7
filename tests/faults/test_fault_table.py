"""Each fault and each phase of the table once; `python -m tests.faults.run_faults` does it all.

There every process is started from nothing, which takes most of the time; here two cells are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.circles import everyday
from tests.faults.fault_table import COVER, PHASES, TABLE, Expected
from tests.faults.faulty_worker import FAULTS
from tests.faults.run_faults import NEEDS_DISK, FaultRuns, can_mount

# A death, a hang, a signal, a damaged file.
EVERY_DAY = (
    *(("SIGKILL", "save"), ("SIGSTOP", "data"), ("SIGTERM", "evaluate")),
    ("flipped bit in a shard", "load"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    """Runs cells, and compares them with one run that nothing befalls."""
    return FaultRuns(tmp_path_factory.mktemp("faults"), forks=True)


@pytest.mark.parametrize(("fault", "phase"), everyday(COVER, EVERY_DAY))
def test_what_comes_of_a_fault(runs: FaultRuns, tmp_path: Path, fault: str, phase: str) -> None:
    if fault in NEEDS_DISK and not can_mount(tmp_path):
        pytest.skip("needs the right to mount a file system")
    seen = runs.run_cell(fault, phase)
    assert not seen.problems, "\n".join(seen.problems)


def test_every_cell_has_an_outcome_or_a_reason() -> None:
    assert TABLE.keys() == FAULTS.keys()
    for fault, row in TABLE.items():
        assert tuple(row) == PHASES, fault
        assert all(row.values()), fault


def test_the_cover_has_every_fault_and_every_phase() -> None:
    assert {fault for fault, _ in COVER} == TABLE.keys()
    assert {phase for _, phase in COVER} == set(PHASES)
    assert all(isinstance(TABLE[fault][phase], Expected) for fault, phase in COVER)
