"""Runs with faults: each fault and each phase of the table once, and kills at any time.

`EVERY_FAULT=1` in the environment adds the rest of the table. Some cells mount file systems.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.circles import everyday
from tests.faults import forked_command
from tests.faults.fault_table import COVER, PHASES, TABLE, Expected, cells
from tests.faults.faulty_worker import DAMAGES, FAULTS, Plan, damage_shard, slow_down_disk
from tests.faults.small_run import differences, read_outcome, small_overrides, write_tokens
from tests.layouts import read_layout

# A death, a hang, a signal, a damaged file.
EVERY_DAY = (
    *(("SIGKILL", "save"), ("SIGSTOP", "data"), ("SIGTERM", "evaluate")),
    ("flipped bit in a shard", "load"),
)
N_STEPS = 8
FAULT_STEP = 4
"""Steps done before the fault, which is in the fifth, or in what follows the fourth."""
OF_RANK_0 = ("load", "forward", "update", "evaluate", "save")
MOUNT = ("mount", "-t", "tmpfs", "-o", "size=16m", "none")
NEEDS_DISK = ("disk full", "read-only disk")  # of rank 0, which looks at it
HANGS = ("SIGSTOP", "GIL held")  # only these need limits that a busy machine could exceed
PHASE_NAMES = {
    "forward": "forward and backward",
    "backward": "forward and backward",
    # The writer is a thread: training is anywhere.
    "save": r"[\w ]+",
}
RUN = Path("runs/run")
CHECKPOINT = RUN / f"checkpoints/step-{FAULT_STEP:08d}"
Train = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(folder, n_ranks, *overrides)` runs the command; with `prepare` in each worker."""
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"))

    def run(
        folder: Path,
        n_ranks: int,
        *overrides: str,
        n_steps: int = N_STEPS,
        prepare: forked_command.Prepare = lambda *_: None,
    ) -> CompletedProcess[str]:
        intervals = ["checkpoint.interval=2", "evaluate.interval=2", "guard.compare_interval=2"]
        words = [*small_overrides(tokens, n_steps), "name=run", *intervals, *overrides]
        folder.mkdir(exist_ok=True)
        return forked_command.run(["train", "tiny", *words, f"--ranks={n_ranks}"], folder, prepare)

    return run


@pytest.fixture(scope="module")
def whole(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Gives the folder of a run without faults, by its ZeRO stage."""
    folder = tmp_path_factory.mktemp("whole")

    def get(zero_stage: int) -> Path:
        found: Path = folder / str(zero_stage)
        if not found.exists():
            done = train(found, 2, f"parallel.zero_stage={zero_stage}", "checkpoint.keep_last=9")
            assert done.returncode == 0, done.stderr
        return found

    return get


@pytest.mark.parametrize(
    ("fault", "phase"),
    everyday(cells() if "EVERY_FAULT" in os.environ else COVER, EVERY_DAY),
)
def test_what_comes_of_a_fault(
    train: Train, whole: Callable[[int], Path], tmp_path: Path, fault: str, phase: str
) -> None:
    rank = 0 if fault in NEEDS_DISK or phase in OF_RANK_0 else 1
    plan = Plan(fault, phase, rank, FAULT_STEP, tmp_path / "disk")
    plan.disk.mkdir()
    if fault in NEEDS_DISK and subprocess.run([*MOUNT, plan.disk]).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        judge(plan, train, whole)
    finally:
        # umount may not see it at once while others mount and unmount.
        while f"{plan.disk} " in Path("/proc/mounts").read_text():
            subprocess.run(["umount", "-l", plan.disk])


def judge(plan: Plan, train: Train, whole: Callable[[int], Path]) -> None:
    """Lets a fault happen, and compares what comes of it with the table."""
    expected = TABLE[plan.fault][plan.phase]
    assert isinstance(expected, Expected)
    zero_stage = 0 if plan.fault == "bit flip in a weight" else 1  # only copies can be compared
    words = [f"parallel.zero_stage={zero_stage}", "checkpoint.keep_last=9"]
    undisturbed = whole(zero_stage)
    is_damage_before = plan.fault in DAMAGES and plan.phase == "start"
    if plan.phase == "load" or is_damage_before:
        copy_half(undisturbed, plan.disk)
    if is_damage_before:
        damage_shard(plan.fault, plan.disk / CHECKPOINT, plan.rank)
        plan.marker.touch()
    limits = ["guard.step_timeout_minutes=0.1", "guard.slow_timeout_minutes=0.5"]
    more = limits if plan.fault in HANGS else []
    done = train(plan.disk, 2, *words, *more, prepare=plan.install)
    compare(done, expected, plan)
    if expected.again is not None:
        plan.ballast.unlink(missing_ok=True)
        # It fails where nothing is mounted.
        subprocess.run(["umount", "-l", plan.disk / RUN / "checkpoints"], capture_output=True)
        again = train(plan.disk, 2, *words)
        assert again.returncode == expected.again, again.stderr
    outcomes = [read_outcome(folder / RUN) for folder in (undisturbed, plan.disk)]
    differing = differences(*outcomes, expected.but)
    assert bool(differing) == bool(expected.not_equal), differing


def copy_half(undisturbed: Path, folder: Path) -> None:
    """Makes a run that has been stopped half way, from one that has not."""
    shutil.copytree(undisturbed / RUN, folder / RUN, ignore=shutil.ignore_patterns("logs"))
    for path in (folder / RUN / "checkpoints").iterdir():
        if path.name > CHECKPOINT.name:
            shutil.rmtree(path)
    metrics = folder / RUN / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(x for x in lines if json.loads(x).get("step", 0) <= FAULT_STEP))


def compare(done: CompletedProcess[str], expected: Expected, plan: Plan) -> None:
    logs = sorted(plan.disk.glob(f"{RUN}/logs/*.log"))
    said = "\n".join([done.stdout + done.stderr, *(log.read_text() for log in logs)])
    assert plan.marker.exists(), f"the fault did not happen: {said}"
    assert done.returncode == expected.code, said
    assert len(re.findall(r"^restart \d of 3", said, re.MULTILINE)) == expected.restarts, said
    for pattern in expected.says:
        pattern = pattern.replace("RANK", str(plan.rank))
        pattern = pattern.replace("PHASE", PHASE_NAMES.get(plan.phase, plan.phase))
        assert re.search(pattern, said), (pattern, said)
    assert "Traceback" not in said or plan.fault == "exception", said


def test_every_cell_has_an_outcome_or_a_reason() -> None:
    assert TABLE.keys() == FAULTS.keys()
    for fault, row in TABLE.items():
        assert tuple(row) == PHASES, fault
        assert all(row.values()), fault
    assert {fault for fault, _ in COVER} == TABLE.keys()
    assert {phase for _, phase in COVER} == set(PHASES)
    assert set(COVER) <= set(cells())


N_KILLED_RUNS = int(os.environ.get("KILLED_RUNS", "6"))
MOST_KILLS = 8
"""In one run, so that it ends."""
KILLED_STEPS = 16


@pytest.mark.exhaustive
def test_killed_anywhere_nothing_is_lost(train: Train, tmp_path: Path) -> None:
    """A rank is killed at a random moment, again and again, in runs of several layouts.

    Half of them have a slow disk. `KILLED_RUNS=60` in the environment kills more often.
    """
    choice = random.Random(5)
    whole: dict[str, tuple[Path, float]] = {}
    for number in range(N_KILLED_RUNS):
        name = ("dp2 tp2", "pp2", "dp2 zero3")[number % 3]
        n_ranks, overrides = read_layout(name).n_ranks, read_layout(name).overrides
        if name not in whole:
            started = time.monotonic()
            done = train(tmp_path / name, n_ranks, *overrides, n_steps=KILLED_STEPS)
            assert done.returncode == 0, done.stderr
            whole[name] = (tmp_path / name, time.monotonic() - started)
        undisturbed, seconds = whole[name]
        draw, is_slow = choice.random(), number // 3 % 2 == 0
        folder = tmp_path / f"run {number}"
        n_kills = 0
        while True:

            def kill(
                rank: int, n_before: int, draw: float = draw, seconds: float = seconds,
                n_ranks: int = n_ranks, is_slow: bool = is_slow, n_kills: int = n_kills,
            ) -> None:  # fmt: skip
                """Each attempt has its victim, killed when its time is over, wherever it is."""
                attempt = n_kills + n_before // n_ranks
                moments = random.Random(draw + attempt)
                if is_slow:
                    slow_down_disk(path=Path())
                if attempt < MOST_KILLS and moments.randrange(n_ranks) == rank:
                    signal.setitimer(signal.ITIMER_REAL, moments.uniform(0, seconds))

            done = train(folder, n_ranks, *overrides, n_steps=KILLED_STEPS, prepare=kill)
            n_kills += (new := done.stderr.count("was ended by SIGALRM"))
            if not done.returncode or not new:
                break
        assert done.returncode == 0, done.stderr
        # Killed while it removes old checkpoints after the last save, a run keeps them.
        outcomes = [read_outcome(each / RUN) for each in (undisturbed, folder)]
        assert not differences(*outcomes, but=["kept"]), folder
