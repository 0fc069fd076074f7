"""Trains the members of a set: as many at a time as fit on this machine, each in a process.

Several of these programs can share a set: the tasks of a job array, or terminals on machines with a
common file system. Each takes the next member that is not done and that nobody holds, so that a
member whose machine died is taken up again.

    members              01     02     03     04     05     06
    on node 1            done   takes                done
    on node 2                          takes  done          takes
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.config.devices import list_gpus
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.patterns import find_token_files
from trainyard.errors import (
    EXIT_HOLD,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    ConfigError,
    LaunchError,
    UserError,
)
from trainyard.files import publish_text
from trainyard.launch.environment import bound_to, own_environment, visible_devices
from trainyard.launch.local import POLL_SECONDS, read_end, signal_name
from trainyard.launch.lock import hold
from trainyard.launch.restarts import FINAL_CODES, LIMIT
from trainyard.launch.signals import STOP, note_signals
from trainyard.layout.resolve import resolve
from trainyard.planning.hardware import free_memory_bytes
from trainyard.planning.memory import busiest_memory
from trainyard.report.run_view import find_state
from trainyard.sweeps.hopeless import explain_hopeless, read_curves
from trainyard.sweeps.sets import STOPPED, Member, RunSet
from trainyard.training import stop
from trainyard.training.run_folder import RUNS, open_run
from trainyard.units import format_number

logger = logging.getLogger("trainyard")

LOOK_SECONDS, LOOK_SHARE = 2.0, 0.05
"""Between two looks at all members, and the share of the time that they may take."""
NOT_AGAIN = {*FINAL_CODES, EXIT_INTERRUPTED}
"""Exit codes after which another start in this program, or in this job, would not help."""


@dataclass(frozen=True)
class Slot:
    """A part of this machine that trains one member at a time."""

    devices: Sequence[str] = ()
    """GPUs; none on a CPU."""
    n_threads: int = 1
    """CPU cores of each of its ranks."""


def divide_machine(run_set: RunSet, at_once: int | None = None) -> list[Slot]:
    """Divides this machine into equal parts, by default as many as members fit.

    Args:
        run_set: its largest layout and memory count.
        at_once: the number of parts.

    Raises:
        LaunchError: there are fewer devices than parts, or than a member has ranks.
    """
    runs = [*run_set.load_members().values()]
    plans = [resolve(run) for run in runs]
    n_ranks = max(plan.n_ranks for plan in plans)
    gpus = visible_devices(len(list_gpus()))
    units: Sequence[object] = gpus or sorted(bound_to())
    if gpus and n_ranks * (at_once or 1) > len(gpus):
        needed = format_number(n_ranks, "GPU")
        times = f" {at_once} times" if at_once else ""
        raise LaunchError(
            f"a run of {run_set.name} needs {needed}{times}, and here {len(gpus)} can be used",
            "fewer --at-once" if at_once and n_ranks <= len(gpus) else "a layout of fewer ranks",
        )
    most = max(1, len(units) // n_ranks)
    if not gpus and at_once is None and (free := free_memory_bytes()) is not None:
        needs = (
            plan.n_ranks * busiest_memory(run, plan, on_gpu=False).process_bytes(on_gpu=False)
            for run, plan in zip(runs, plans, strict=True)
        )
        most = max(1, min(most, free // max(needs)))
    most = min(at_once or most, len(runs))
    per_slot = len(units) // most
    if gpus:
        return [Slot(gpus[n * per_slot : (n + 1) * per_slot]) for n in range(most)]
    return [Slot((), max(1, per_slot // n_ranks))] * most


def most_ranks(run: Run, n_devices: int) -> int:
    """Returns the most ranks, of those that a run's layout allows, for a number of devices."""
    for n_ranks in range(n_devices, 1, -1):
        with suppress(ConfigError):
            return resolve(run, n_ranks).n_ranks
    return 1


@dataclass
class _Running:
    """A member that this program trains."""

    member: Member
    process: subprocess.Popen[bytes]
    claim: ExitStack
    slot: Slot
    log: Path
    log_start: int
    """Size of the log before."""


@dataclass
class Execution:
    """The training of a set by this program.

    Attributes:
        run_set: written.
        slots: from `divide_machine`.
        stops_hopeless: stop members early by the rule of `sweeps/hopeless.py`.
        more: called when nothing is left to train; returns the set with further members, if any.
    """

    run_set: RunSet
    slots: Sequence[Slot]
    stops_hopeless: bool = False
    more: Callable[[], RunSet | None] = lambda: None
    _running: list[_Running] = field(default_factory=list)
    _n_starts: dict[str, int] = field(default_factory=dict)
    _failed: dict[str, int] = field(default_factory=dict)
    _pipe: int = -1
    _stopped_with: int = 0
    """The exit code, once this program is to end before all members are done."""

    def run(self) -> int:
        """Trains the members that are not done; returns the exit code.

        0: all are done, or trained by others; 1: some crashed again and again; 75: some are left,
        the same command continues; 93: some failed, or a file STOP; 130: Ctrl-C.

        Raises:
            UserError: the set is of another folder, has a file STOP, or cannot be written.
        """
        folder = self.run_set.folder
        if folder.parent.resolve() != RUNS.resolve():
            raise LaunchError(f"{folder} is not in {RUNS}/ here", "start in the folder above it")
        stop.refuse_stopped(folder)
        for member in [*self._left()][:1]:  # what it lacks, the others lack as well
            run = find_token_files(load_run(str(self.run_set.run_file(member))).run)
            open_run(member.folder, None, run).refuse_missing_inputs()
        self._pipe, writing = os.pipe()
        next_look = 0.0
        try:
            with note_signals(STOP) as received:
                while True:
                    while received:
                        self._stop(received.pop(0))
                    if self._collect() or time.monotonic() >= next_look:
                        began = time.monotonic()
                        self._look()
                        pause = max(LOOK_SECONDS, (time.monotonic() - began) / LOOK_SHARE)
                        next_look = time.monotonic() + pause
                    if self._running:
                        time.sleep(POLL_SECONDS)
                    elif self._stopped_with or self._failed or not (grown := self.more()):
                        break
                    else:
                        self.run_set, next_look = grown, 0.0
        finally:
            os.close(writing)  # members end with this program
            os.close(self._pipe)
        return self._report()

    def _look(self) -> None:
        """Stops members that are to stop, and starts others in the free slots."""
        curves = read_curves(self.run_set) if self.stops_hopeless else {}
        for one in self._running:
            why = explain_hopeless(one.member.name, curves)
            if why and not self.run_set.why_stopped(one.member):
                self._note_hopeless(one.member, why)
                one.process.send_signal(signal.SIGTERM)
        if not self._stopped_with and (self.run_set.folder / stop.STOP).exists():
            logger.info("there is a file %s", self.run_set.folder / stop.STOP)
            self._stop(signal.SIGTERM)
            self._stopped_with = EXIT_HOLD
        if not self._stopped_with:
            self._start()

    def _stop(self, number: signal.Signals) -> None:
        """Lets all members save and end."""
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
        self._stopped_with = self._stopped_with or code
        for one in self._running:
            one.process.send_signal(number)

    def _start(self) -> None:
        """Starts members in the free slots."""
        free = [*self.slots]
        for one in self._running:
            free.remove(one.slot)
        for member in self._left() if free else ():
            with suppress(LaunchError), ExitStack() as claim:  # raised if another program trains it
                claim.enter_context(hold(self.run_set.folder / "claims" / member.name, 0))
                if not is_done(self.run_set, member):  # meanwhile
                    self._running.append(self._train(member, claim.pop_all(), free.pop(0)))
            if not free:
                return

    def _left(self) -> Iterator[Member]:
        busy = {*self._failed, *(one.member.name for one in self._running)}
        for member in self.run_set.members:
            if member.name not in busy and not is_done(self.run_set, member):
                yield member

    def _train(self, member: Member, claim: ExitStack, slot: Slot) -> _Running:
        count = self._n_starts[member.name] = self._n_starts.get(member.name, 0) + 1
        began = "continues" if (member.folder / "checkpoints").exists() else "starts"
        values = ", ".join(f"{name}={value}" for name, value in member.values.items())
        logger.info("%s %s: %s%s", member.name, began, values, f" (try {count})" * (count > 1))
        file = self.run_set.run_file(member)
        log = self.run_set.folder / "logs" / f"{member.name}.log"
        words = ["trainyard.cli", "train", str(file)]
        if slot.devices:
            n_ranks = most_ranks(load_run(str(file)).run, len(slot.devices))
            words += ["--ranks", str(n_ranks)]
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=own_environment(slot.devices, slot.n_threads, self._pipe),
                pass_fds=[self._pipe],
                # Else Ctrl-C on a terminal reaches it twice, and the second means "at once".
                process_group=0,
            )
            return _Running(member, process, claim, slot, log, output.tell())

    def _collect(self) -> bool:
        """Takes note of the members that have ended; returns whether any has."""
        ended = [each for each in self._running if each.process.poll() is not None]
        for one in ended:
            self._running.remove(one)
            one.claim.close()
            name, code = one.member.name, one.process.returncode
            if code == 0:
                n_done = sum(is_done(self.run_set, each) for each in self.run_set.members)
                logger.info("%s is done: %d of %d", name, n_done, len(self.run_set.members))
            elif self._stopped_with or self.run_set.why_stopped(one.member):
                continue
            elif code == EXIT_HOLD and self.stops_hopeless:
                self._note_hopeless(one.member, find_state(one.member.folder)[1])
            else:
                how = f"exit code {code}" if code > 0 else signal_name(-code)
                end = read_end(one.log, one.log_start)
                logger.warning("%s ended with %s; the end of %s:\n%s", name, how, one.log, end)
                if code == EXIT_REQUEUE:  # a time limit is that of the others too
                    self._stopped_with = code
                elif code in NOT_AGAIN or self._n_starts[name] > LIMIT:
                    self._failed[name] = code
        return bool(ended)

    def _note_hopeless(self, member: Member, why: str) -> None:
        folder = self.run_set.folder / STOPPED
        folder.mkdir(exist_ok=True)
        publish_text(folder / member.name, why + "\n")
        logger.info("%s is stopped early: %s", member.name, why)

    def _report(self) -> int:
        n_left = sum(not is_done(self.run_set, member) for member in self.run_set.members)
        if self._stopped_with:
            logger.info("stopped: the same command continues; %d are left", n_left)
            return self._stopped_with
        if self._failed:
            names = ", ".join(self._failed)
            logger.warning("failed: %s; the same command tries them again", names)
            return EXIT_HOLD if NOT_AGAIN.issuperset(self._failed.values()) else 1
        if n_left:
            logger.info("%s trained by others", format_number(n_left, "run"))
        return 0


def is_done(run_set: RunSet, member: Member) -> bool:
    """Returns whether a member is trained to its end, or was stopped early."""
    if run_set.why_stopped(member):
        return True
    with suppress(UserError):  # training replaces a damaged record of an end
        return find_state(member.folder)[0] == "done"
    return False
