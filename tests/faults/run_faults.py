"""Runs of the command line that a fault befalls, and what came of them.

    python -m tests.faults.run_faults --jobs 2                          the whole table of faults
    python -m tests.faults.run_faults --fault SIGKILL --phase save      what the names allow

Prints the table in Markdown and the record as JSON; the exit code is 1 where a cell is not as
expected. The whole table takes half an hour on two cores. Some cells mount file systems.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults import forked_command
from tests.faults.fault_table import COVER, PHASES, TABLE, Expected, cells
from tests.faults.faulty_worker import BALLAST, DAMAGES, Plan, damage_file, shard_of
from tests.faults.small_run import Outcome, differences, read_outcome, small_overrides, write_tokens
from tests.waiting import WATCHDOG_SECONDS

ROOT = Path(__file__).parents[2]
COMMAND = "from trainyard.cli.main import main; main()"
N_STEPS = 8
FAULT_STEP = 4
"""Steps done before the fault, which is in the fifth, or in what follows the fourth."""
# Either rank has its share of the faults.
FAULTY_RANK = {"load": 0, "forward": 0, "update": 0, "evaluate": 0, "save": 0}
MOUNT = ("mount", "-t", "tmpfs", "-o", "size=16m", "none")
NEEDS_DISK = ("disk full", "read-only disk")  # of rank 0, which looks at it
HANGS = ("SIGSTOP", "GIL held")  # only these need limits that a busy machine could exceed
STARTED = (("abort", "forward"), ("stale lock", "forward"))
"""Cells whose processes are started from nothing even where the others are forks."""
PHASE_NAMES = {
    "forward": "forward and backward",
    "backward": "forward and backward",
    # The writer is a thread: training is anywhere.
    "save": r"[\w ]+",
}


@dataclass(frozen=True)
class _Command:
    """What a command came to."""

    code: int
    said: str
    """With the logs of all ranks."""


@dataclass(frozen=True)
class Seen:
    """What came of a fault."""

    fault: str
    phase: str
    problems: tuple[str, ...]
    """In what it is not as expected."""
    codes: tuple[int, ...]
    seconds: float


class FaultRuns:
    """Runs cells of the table.

    Args:
        folder: for all of them.
        forks: run the command and its workers as forks of this process, but for `STARTED` cells.
    """

    def __init__(self, folder: Path, *, forks: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._forks = forks
        self._folder = folder.resolve()
        self._tokens = write_tokens(self._folder)
        self._whole: dict[int, Path] = {}
        self._lock = threading.Lock()

    def run_cell(self, fault: str, phase: str) -> Seen:
        """Lets a fault happen in a phase, and compares what comes of it with the table."""
        expected = TABLE[fault][phase]
        assert isinstance(expected, Expected), expected
        started = time.monotonic()
        # Only copies can be compared.
        zero_stage = 0 if fault == "bit flip in a weight" else 1
        whole = self._train_whole(zero_stage)
        disk = self._folder / f"{fault} {phase}".replace(" ", "-")
        disk.mkdir()
        plan = Plan(
            fault,
            phase,
            0 if fault in NEEDS_DISK else FAULTY_RANK.get(phase, 1),
            FAULT_STEP,
            marker=str(disk.with_suffix(".marker")),
            disk=str(disk),
        )
        if fault in NEEDS_DISK:
            subprocess.run([*MOUNT, disk], check=True)
        try:
            seen, problems = self._run(plan, expected, whole, zero_stage)
        finally:
            if fault in NEEDS_DISK:
                subprocess.run(["umount", "-l", disk], check=True)
        seconds = round(time.monotonic() - started, 1)
        found = "; ".join(each.splitlines()[0] for each in problems) or "as expected"
        sys.stderr.write(f"{fault}, {phase}: {found} ({seconds} s)\n")
        return Seen(fault, phase, tuple(problems), tuple(each.code for each in seen), seconds)

    def _run(
        self, plan: Plan, expected: Expected, whole: Path, zero_stage: int
    ) -> tuple[list[_Command], list[str]]:
        disk = Path(plan.disk)
        is_damage_before = plan.fault in DAMAGES and plan.phase == "start"
        if plan.phase == "load" or is_damage_before:
            _copy_half(whole, disk)
        if is_damage_before:
            damage_file(plan.fault, shard_of(_checkpoint(disk), plan.rank))
            Path(plan.marker).touch()
        command = self._start(disk, zero_stage, plan)
        problems = _compare(command, expected, plan)
        commands = [command]
        if expected.again is not None:
            _mend(disk)
            again = self._start(disk, zero_stage)
            commands.append(again)
            if again.code != expected.again:
                problems.append(f"again ended with {again.code}:\n{again.said[-2000:]}")
        if not problems:
            differing = differences(_outcome(whole), _outcome(disk), expected.but)
            if expected.not_equal and not differing:
                problems.append(f"nothing differs, though {expected.not_equal}")
            elif not expected.not_equal:
                problems += differing
        return commands, problems

    def _train_whole(self, zero_stage: int) -> Path:
        """Trains a run that nothing befalls."""
        with self._lock:
            if zero_stage not in self._whole:
                folder = self._folder / f"whole-{zero_stage}"
                folder.mkdir()
                done = self._start(folder, zero_stage)
                assert done.code == 0, done.said
                self._whole[zero_stage] = folder
            return self._whole[zero_stage]

    def _start(self, folder: Path, zero_stage: int, plan: Plan | None = None) -> _Command:
        overrides = [
            *small_overrides(self._tokens, N_STEPS),
            f"parallel.zero_stage={zero_stage}",
            "name=run",
            "checkpoint.interval=2",
            "checkpoint.keep_last=9",
            "evaluate.interval=2",
            "guard.compare_interval=2",
        ]
        if plan is not None and plan.fault in HANGS:
            overrides += ["guard.step_timeout_minutes=0.1", "guard.slow_timeout_minutes=0.5"]
        paths = [str(ROOT / "tests/faults/site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            **({} if plan is None else plan.as_variable()),
        }
        words = ["train", "tiny", *overrides, "--ranks", "2"]
        if self._forks and (plan is None or (plan.fault, plan.phase) not in STARTED):
            code, said = forked_command.run(words, folder, environment)
            return _Command(code, _with_logs(said, folder))
        running = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, said = running.communicate(timeout=WATCHDOG_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            _, said = running.communicate()
            said += f"\nit did not end within {WATCHDOG_SECONDS:g} s\n"
        return _Command(running.returncode, _with_logs(said, folder))


def _with_logs(said: str, folder: Path) -> str:
    logs = sorted(folder.glob("runs/run/logs/*.log"))
    return "\n".join([said, *(log.read_text() for log in logs)])


def can_mount(folder: Path) -> bool:
    """Whether this process has the right to mount file systems."""
    trial = folder / "trial"
    trial.mkdir()
    if subprocess.run([*MOUNT, trial], capture_output=True).returncode:
        return False
    subprocess.run(["umount", "-l", trial], check=True)
    return True


def _compare(command: _Command, expected: Expected, plan: Plan) -> list[str]:
    problems = []
    if not Path(plan.marker).exists():
        problems.append("the fault did not happen")
    if command.code != expected.code:
        problems.append(f"ended with {command.code}, not {expected.code}")
    n_restarts = len(re.findall(r"^restart \d of 3", command.said, re.MULTILINE))
    if n_restarts != expected.restarts:
        problems.append(f"{n_restarts} restarts, not {expected.restarts}")
    for pattern in expected.says:
        pattern = pattern.replace("RANK", str(plan.rank))
        pattern = pattern.replace("PHASE", PHASE_NAMES.get(plan.phase, plan.phase))
        if not re.search(pattern, command.said):
            problems.append(f"does not say: {pattern}")
    if "Traceback" in command.said and plan.fault != "exception":
        problems.append("shows a traceback")
    return [*problems, f"it said:\n{command.said[-6000:]}"] if problems else []


def _outcome(folder: Path) -> Outcome:
    return read_outcome(folder / "runs/run")


def _checkpoint(folder: Path) -> Path:
    return folder / f"runs/run/checkpoints/step-{FAULT_STEP:08d}"


def _copy_half(whole: Path, folder: Path) -> None:
    """Makes a run that has been stopped half way, from one that has not."""
    shutil.copytree(whole / "runs", folder / "runs")
    for path in (folder / "runs/run/checkpoints").iterdir():
        if path.name > _checkpoint(folder).name:
            shutil.rmtree(path)
    metrics = folder / "runs/run/metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(x for x in lines if json.loads(x).get("step", 0) <= FAULT_STEP))
    shutil.rmtree(folder / "runs/run/logs")


def _mend(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)
    # It fails where nothing is mounted.
    subprocess.run(["umount", "-l", disk / "runs/run/checkpoints"], capture_output=True)


def render_markdown(seen: list[Seen]) -> str:
    """Shows the table: what is expected, and where something else was seen."""
    found = {(each.fault, each.phase): each for each in seen}
    reasons: list[str] = []
    lines = ["| fault | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for fault, row in TABLE.items():
        columns = []
        for phase, outcome in row.items():
            if isinstance(outcome, str):
                if outcome not in reasons:
                    reasons.append(outcome)
                columns.append(f"({reasons.index(outcome) + 1})")
                continue
            one = found.get((fault, phase))
            mark = "not run" if one is None else "FAILED" if one.problems else "as expected"
            columns.append(f"{outcome.what}: {mark}")
        lines.append(f"| {fault} | " + " | ".join(columns) + " |")
    lines += ["", *(f"- ({number}) {reason}" for number, reason in enumerate(reasons, start=1))]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=TABLE)
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--cover", action="store_true", help="each fault and each phase once")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainyard-faults-") as temporary:
        runs = FaultRuns(arguments.folder or Path(temporary))
        with ThreadPoolExecutor(arguments.jobs) as pool:
            wanted = COVER if arguments.cover else cells(arguments.fault, arguments.phase)
            seen = list(pool.map(lambda cell: runs.run_cell(*cell), wanted))
    record = {
        "cells": len(seen),
        "as_expected": sum(not each.problems for each in seen),
        "seconds": round(time.monotonic() - started, 1),
        "seen": [asdict(each) for each in seen],
    }
    sys.stdout.write(render_markdown(seen) + "\n\n" + json.dumps(record, indent=2) + "\n")
    sys.exit(record["as_expected"] != record["cells"])


if __name__ == "__main__":
    main()
