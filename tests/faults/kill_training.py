"""Kills one of several ranks that train, again and again, and looks whether anything was lost.

    python -m tests.faults.kill_training --kills 200 --seed 1

One process imports everything and forks the ranks, so that a start takes tenths of a second. Runs
of several layouts are killed on their way, each of them time after time until it is done: a random
rank gets SIGKILL at a random moment of the time that a run takes, or soon after it has begun a
phase that was drawn, or soon after a save in the background has begun (so that what is short has
its turn). Half of the runs have a slow disk: every flush takes a while. The other ranks must end by
themselves; then all start again. After each kill every checkpoint that is there is checked to the
last byte, and at the end weights, moments, losses, gradient norms, the state and the order of the
data are compared with those of an undisturbed run, to the last bit. The record is printed as
JSON; the exit code is 1 where anything was lost. On two cores 200 kills take a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from tests.faults.forked_ranks import Aim, Attempt, Course, newest_step, read_order
from tests.faults.small_run import Outcome, differences, read_outcome, small_overrides, write_tokens
from tests.layouts import read_layout

from trainyard.checkpoint.format import list_checkpoints
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.config.load import load_run
from trainyard.errors import CheckpointError
from trainyard.launch.heartbeat import Phase
from trainyard.training.run_folder import open_run, write_run_folder

N_STEPS = 16
LAYOUTS = ("dp2 tp2", "pp2", "dp2 zero3")
PARENT_SECONDS = 2.0
"""After which the parent ends ranks that have not met yet; the meeting waits for a minute."""
MOST_KILLS = 8  # of one run, so that every layout has its turn
MOST_FAILURES = 10
SLOW_FLUSH_SECONDS = 0.03


@dataclass
class Kill:
    """One kill and what followed."""

    layout: str
    rank: int
    phase: str
    step: int
    save: str
    """What the disk was in: "writing", "removing" or "none"."""
    steps_of_attempt: int
    seconds_to_end: float
    """Until the last of the other ranks had ended."""
    codes: list[int]
    """Exit codes of the others."""
    problems: list[str]


def start_over(folder: Path, tokens: Path, name: str) -> Course:
    """Writes the run folder of a run from the beginning."""
    intervals = ["checkpoint.interval=2", "evaluate.interval=5"]
    overrides = [*small_overrides(tokens, N_STEPS), *read_layout(name).overrides, *intervals]
    write_run_folder(open_run(folder, run=load_run("tiny", overrides).run), "never")
    return Course(folder, read_layout(name).n_ranks)


def draw_aim(choice: random.Random, course: Course) -> Aim:
    """Draws when to kill: at any moment, in a phase, or while a save is in flight."""
    rank, kind = choice.randrange(course.n_ranks), choice.randrange(4)
    steps_before = choice.randrange(6)
    if kind < 2:
        return Aim(rank, choice.uniform(0.0, course.seconds), None, 0)
    if kind == 2:
        return Aim(rank, choice.uniform(0.0, 0.05), choice.choice(get_args(Phase)), steps_before)
    return Aim(rank, choice.uniform(0.0, 5 * course.flush_seconds), "in flight", steps_before)


def kill_once(attempt: Attempt, aim: Aim, layout: str) -> Kill | None:
    """Kills a rank, waits for the others, and looks at what is left; None if all ended before."""
    if not attempt.aim(aim):
        return None
    victim = attempt.ranks[aim.rank]
    victim.kill()
    killed = time.monotonic()
    save = attempt.save()
    victim.join()
    if victim.exitcode != -signal.SIGKILL:  # it was quicker
        return None
    beat = attempt.readers[aim.rank].read()
    problems = _await_others(attempt)
    seconds = time.monotonic() - killed
    done = max(reader.read().step for reader in attempt.readers) - attempt.first_step
    problems += _problems_of_checkpoints(attempt)
    codes = [rank.exitcode or 0 for rank in attempt.ranks if rank is not victim]
    return Kill(
        layout, aim.rank, beat.phase, beat.step, save, max(0, done), seconds, codes, problems
    )


def _await_others(attempt: Attempt) -> list[str]:
    attempt.wait(PARENT_SECONDS)
    for rank, reader in zip(attempt.ranks, attempt.readers, strict=True):
        if rank.exitcode is None and reader.read().phase == "start":
            rank.kill()  # as the parent does
    if not attempt.wait():
        left = [n for n, rank in enumerate(attempt.ranks) if rank.exitcode is None]
        beats = [attempt.readers[n].read() for n in left]
        return [f"ranks {left} never notice it: {beats}"]
    return []


def _problems_of_checkpoints(attempt: Attempt) -> list[str]:
    """No kill may harm a checkpoint that has its name, or take the newest away."""
    problems = []
    if newest_step(attempt.course.folder) < attempt.first_step:
        problems.append(f"step {attempt.first_step} was there, and is no more")
    for path in list_checkpoints(attempt.course.folder / "checkpoints"):
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            problems.append(error.problem)
    return problems


def train_under_fire(
    course: Course, layout: str, choice: random.Random, most_kills: int
) -> tuple[list[Kill], list[str]]:
    """Trains a run to its end, killing on the way; gives the kills, and why it came to no end."""
    kills: list[Kill] = []
    for number in range(2 * MOST_KILLS):
        attempt = Attempt(course, number)
        try:
            if len(kills) < min(most_kills, MOST_KILLS):
                kill = kill_once(attempt, draw_aim(choice, course), layout)
                if kill is not None:
                    kills.append(kill)
                    continue
            ended = attempt.wait()
            codes = [rank.exitcode for rank in attempt.ranks]
            if ended and not any(codes):
                return kills, []
            return kills, [f"an attempt that nobody killed ended with {codes}: {course.folder}"]
        finally:
            attempt.close()
    return kills, [f"it never ended: {course.folder}"]


def train_whole(
    folder: Path, tokens: Path, layout: str, choice: random.Random
) -> tuple[Course, Outcome]:
    """Trains a run that nothing befalls."""
    course = start_over(folder, tokens, layout)
    started = time.monotonic()
    _, problems = train_under_fire(course, layout, choice, most_kills=0)
    assert not problems, problems
    return replace(course, seconds=time.monotonic() - started), read_outcome(folder)


def run_all(n_kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills so many times over as many runs as it takes, and gives the record."""
    started = time.monotonic()
    choice = random.Random(seed)
    tokens = write_tokens(folder)
    whole_runs: dict[str, tuple[Course, Outcome]] = {}
    kills: list[Kill] = []
    failures: list[str] = []
    n_runs = n_leftovers = 0
    while len(kills) < n_kills and len(failures) < MOST_FAILURES:
        layout = list(LAYOUTS)[n_runs % len(LAYOUTS)]
        if layout not in whole_runs:
            whole_runs[layout] = train_whole(folder / f"whole {layout}", tokens, layout, choice)
        whole, expected = whole_runs[layout]
        course = replace(
            start_over(folder / f"run {n_runs}", tokens, layout),
            seconds=whole.seconds,
            flush_seconds=SLOW_FLUSH_SECONDS if n_runs // len(LAYOUTS) % 2 == 0 else 0.0,
        )
        new, problems = train_under_fire(course, layout, choice, n_kills - len(kills))
        kills += new
        problems += [f"kill {kill}" for kill in new if kill.problems]
        if not problems:
            outcome = read_outcome(course.folder)
            # Killed while it removes old checkpoints after the last save, a run keeps them.
            problems = differences(expected, outcome, but=["kept"])
            n_leftovers += outcome.facts["kept"] != expected.facts["kept"]
            if read_order(whole) != read_order(course):
                problems.append("the order of the data")
        failures += [f"run {n_runs}, {layout}: {problem}" for problem in problems]
        n_runs += 1
    record = summarize(kills, failures, n_runs, time.monotonic() - started)
    return record | {"runs_with_old_checkpoints_left": n_leftovers}


def summarize(
    kills: list[Kill], failures: list[str], n_runs: int, seconds: float
) -> dict[str, Any]:
    """Makes the record: how often, where, and what was lost."""

    ends = [kill.seconds_to_end for kill in kills]

    def count(name: str) -> dict[str, int]:
        return dict(sorted(Counter(str(getattr(kill, name)) for kill in kills).items()))

    return {
        "kills": len(kills),
        "runs": n_runs,
        "steps_per_run": N_STEPS,
        "runs_equal_to_the_last_bit": n_runs - len({each.partition(",")[0] for each in failures}),
        "failures": failures,
        "by_layout": count("layout"),
        "by_rank": count("rank"),
        "by_phase": count("phase"),
        "by_save_in_flight": count("save"),
        "exit_codes_of_the_others": dict(Counter(str(c) for kill in kills for c in kill.codes)),
        "steps_done_before": count("steps_of_attempt"),
        "longest_seconds_until_all_ended": round(max(ends, default=0.0), 1),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainyard-kills-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record = run_all(arguments.kills, arguments.seed, folder)
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    sys.exit(bool(record["failures"]))


if __name__ == "__main__":
    main()
