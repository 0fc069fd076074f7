"""The examination of each rank: describes its machine, measures, and reports to rank 0.

All ranks measure at the same time, as in training: processes that share a processor share its rate,
and all ranks write to the disk together, as for a checkpoint.

    python -P -m trainyard.doctor.examine SETTINGS RESULTS

is one local rank of `trainyard doctor --ranks`; rank 0 writes the results of all.

If one rank hangs, the rest would wait forever. So each announces its next phase and a time limit.
After the limit, a thread beside the measurements asks all ranks to respond; a rank that is stopped,
or whose machine is gone, does not:

    rank 0    enter("the collectives", 10)     70 s later: "roll"       "rank 3 does not respond"
    rank 2                                                  "here"
    rank 3    (its machine hangs)

Then all exit with code 2. The parent processes of training share files in the run folder
(`launch/supervise.py`); doctor tests that folder, so its ranks use the store of their rendezvous.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainyard import __version__
from trainyard.config.devices import GIGA
from trainyard.doctor import environment, filesystem
from trainyard.doctor.diagnosis import PASS, READ, REPLACE, WARN, WRITE, Examination, Finding
from trainyard.errors import MachineError
from trainyard.launch.environment import Process, read_process, read_variables
from trainyard.launch.local import run_ranks, watched_command
from trainyard.launch.program import run_program
from trainyard.topology import name_ranks
from trainyard.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from trainyard.parallel.start import StartedRank

LEAST_BYTES_PER_SECOND = 20e6
"""Lowest rate of a slow disk that is not hung."""
PATIENCE_SECONDS = 60.0
"""For ranks to join, and to continue after the announced time of a phase."""
COMPILE_SECONDS = 60.0
"""To compile a small block, on a busy machine."""
POLL_SECONDS, ANSWER_SECONDS = 0.5, 4.0

logger = logging.getLogger("trainyard")


@dataclass(frozen=True)
class Settings:
    """Settings of an examination."""

    runs: str
    """The folder of the runs."""
    budget_seconds: float
    """Time per measurement."""
    file_bytes: int
    """Size of each rank's file."""
    cpu_lists: tuple[str, ...]
    """CPUs of local ranks in the cluster's profile."""


def examine_in_processes(n_ranks: int, settings: Settings) -> list[Examination]:
    """Examines this machine with processes of its own.

    Args:
        n_ranks: at least 2.
        settings: the settings.

    Raises:
        MachineError: one failed; includes its rank and output.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-doctor-") as name:
        results = Path(name) / "results.json"
        arguments = [msgspec.json.encode(settings).decode(), str(results)]
        run_ranks(n_ranks, watched_command(__name__, *arguments), Path(name) / "logs")
        return msgspec.json.decode(results.read_bytes(), type=list[Examination])


def main() -> int:
    """Runs one rank from the command line."""
    process = read_process()
    results = examine(process, msgspec.json.decode(sys.argv[1], type=Settings))
    if process.rank == 0:
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(results))
    return 0


def examine(process: Process, settings: Settings) -> list[Examination]:
    """Examines the machines of all ranks; every rank calls it.

    Args:
        process: this rank.
        settings: the settings.

    Returns:
        the results of all ranks on rank 0; each other rank's own results.

    Raises:
        UserError: a rank is missing, cannot communicate with others, or cannot write to the disk.
    """
    if not environment.has_torch():
        own = _describe(process)
        _examine_folder(own, process, settings, RankGroup(process, None, PATIENCE_SECONDS))
        return [own]
    from trainyard.parallel.mesh import choose_device
    from trainyard.parallel.start import start_ranks

    device = choose_device(process)
    own = _describe(process)
    with (
        start_ranks(process, device, lambda: _gather_facts(process), PATIENCE_SECONDS) as ranks,
        RankGroup(process, ranks.store, PATIENCE_SECONDS) as group,
    ):
        _examine_device(own, ranks, settings, group)
        _examine_folder(own, process, settings, group)
        texts = group.gather(msgspec.json.encode(own).decode())
        return [msgspec.json.decode(text, type=Examination) for text in texts]


def _gather_facts(process: Process) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks; rejects a wrong network interface."""
    import torch

    wrong = _find_wrong_interface()
    if wrong and not process.is_on_one_machine:
        raise MachineError(f"{wrong[0]} on {socket.gethostname()}", wrong[1])
    versions = {"trainyard": __version__, "torch": torch.__version__}
    return versions | {"python": platform.python_version()}


def _find_wrong_interface() -> tuple[str, str] | None:
    settings = read_variables(environment.SETTINGS)
    return environment.find_wrong_interface(settings, [name for _, name in socket.if_nameindex()])


def _describe(process: Process) -> Examination:
    own = Examination(process.rank, socket.gethostname())
    if process.local_rank == 0:
        own.facts = environment.describe_machine(process)
        n_devices = sum(name.startswith("GPU ") for name in own.facts["devices"])
        own.find(environment.check_machine(n_devices))
        if wrong := _find_wrong_interface():  # not needed on one machine alone
            own.find([Finding("network interface", wrong[0], WARN, wrong[1])])
    return own


def _examine_device(
    own: Examination, ranks: StartedRank, settings: Settings, group: RankGroup
) -> None:
    import torch

    from trainyard.doctor.measure import measure_collectives, measure_device
    from trainyard.parallel.mesh import device_name

    process, device, budget = ranks.process, ranks.device, settings.budget_seconds
    own.device, own.n_devices = device_name(device), torch.cuda.device_count()
    pci = environment.pci_folder(device.index or 0) if device.type == "cuda" else None
    near = environment.read(pci / "local_cpulist") if pci else None
    own.find(environment.check_binding(process, settings.cpu_lists, near))
    group.wait()
    for measured in measure_device(device, budget):
        own.measure(*measured)
        group.enter("matmuls", budget)
    group.wait()
    if device.type == "cuda":
        group.enter("the comparison of compiled blocks", COMPILE_SECONDS)
        if process.local_rank == 0:
            own.find([compare_compiled(device)])
        group.wait()
    if process.n_ranks > 1:
        group.enter("the start of the collectives", budget)
        for measured in measure_collectives(device, budget):
            own.measure(*measured)
            group.enter("the collectives", budget)


def compare_compiled(device: torch.device) -> Finding:
    """Compares the gradients of a small block of all parts, compiled and eager."""
    import torch

    from trainyard.config.load import load_run
    from trainyard.model.compiled import Trial

    model = load_run("modern-125m", ["model.dropout=0.1"]).run.model
    try:
        Trial(model, torch.bfloat16, "none", device).refuse_wrong()
    except MachineError as error:
        return Finding("compiled blocks", error.problem, REPLACE, error.hint)
    return Finding("compiled blocks", "have the gradients of eager ones", PASS)


def _examine_folder(
    own: Examination, process: Process, settings: Settings, group: RankGroup
) -> None:
    """Tests the folder of the runs once on each machine; all ranks measure it together."""
    runs = Path(settings.runs)
    group.enter("the folder of the runs", settings.file_bytes / LEAST_BYTES_PER_SECOND)
    with ExitStack() as last:
        # Rank 0 enters first and leaves last, so that it can remove the folders it created.
        if process.rank == 0:
            folder = last.enter_context(filesystem.trial_folder(runs))
        group.wait()
        with ExitStack() as stack:
            if process.rank > 0:
                folder = stack.enter_context(filesystem.trial_folder(runs))
            if process.local_rank == 0:
                own.facts["folder"] = filesystem.describe_folder(runs)
                own.find(filesystem.try_guarantees(folder))
            if not process.is_on_one_machine:
                # Every machine looks for a file written and locked by rank 0.
                path = ""
                with ExitStack() as locked:
                    if process.rank == 0:
                        path = str(locked.enter_context(filesystem.locked_file(runs)))
                    path = group.broadcast(path)
                    if process.local_rank == 0 and process.rank > 0:
                        own.find(filesystem.look_for(Path(path)))
                    group.wait()
            written, read, how = filesystem.measure_rates(folder, settings.file_bytes, group.wait)
        group.wait()
    size = format_bytes(settings.file_bytes)
    own.measure(WRITE, written / GIGA, "GB/s", f"{size}, flushed")
    own.measure(READ, read / GIGA, "GB/s", f"{size}, {how}")


class RankGroup:
    """All ranks of an examination, as seen from this one.

    Args:
        process: this rank.
        store: shared by all ranks; None: there is no other rank.
        patience_seconds: added to the announced time of each phase.
    """

    def __init__(self, process: Process, store: Store | None, patience_seconds: float) -> None:
        self._process, self._store, self._patience = process, store, patience_seconds
        self._part, self._deadline = "the start", time.monotonic() + patience_seconds
        self._is_over = threading.Event()

    def __enter__(self) -> RankGroup:
        if self._store is not None:
            threading.Thread(target=self._watch, args=(self._store,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def enter(self, part: str, seconds: float = 0.0) -> None:
        """Announces the next phase of this rank and its time limit."""
        self._part, self._deadline = part, time.monotonic() + seconds + self._patience

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        if self._store is not None:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.zeros(1))

    def broadcast(self, text: str) -> str:
        """Broadcasts a text of rank 0 to all ranks."""
        if self._store is None:
            return text
        if self._process.rank == 0:
            self._store.set("doctor/broadcast", text)
        self.wait()
        return str(self._store.get("doctor/broadcast").decode())

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks on rank 0; each other rank's own text."""
        if self._store is None:
            return [text]
        self._store.set(f"doctor/results/{self._process.rank}", text)
        self.wait()
        if self._process.rank:
            return [text]
        ranks = range(self._process.n_ranks)
        return [self._store.get(f"doctor/results/{rank}").decode() for rank in ranks]

    def _watch(self, store: Store) -> None:
        ranks = range(self._process.n_ranks)
        keys = [f"doctor/here/{rank}" for rank in ranks]
        try:
            while not store.check(["doctor/roll"]):
                if time.monotonic() > self._deadline:
                    store.set("doctor/roll", self._part)
                if self._is_over.wait(POLL_SECONDS):
                    return
            own = json.dumps({"host": socket.gethostname(), "part": self._part})
            store.set(keys[self._process.rank], own)
            end = time.monotonic() + ANSWER_SECONDS
            while not store.check(keys) and time.monotonic() < end:
                if self._is_over.wait(POLL_SECONDS):
                    return
            answers = {
                rank: json.loads(store.get(keys[rank]))
                for rank in ranks
                if store.check([keys[rank]])
            }
            part = store.get("doctor/roll").decode()
        except RuntimeError:  # rank 0 has ended, and the store with it
            return
        logger.error("error: %s", _describe_hang(part, len(ranks), answers))
        os._exit(2)


def _describe_hang(part: str, n_ranks: int, answers: dict[int, dict[str, str]]) -> str:
    silent = [rank for rank in range(n_ranks) if rank not in answers]
    if silent:
        hosts = ", ".join(dict.fromkeys(answer["host"] for answer in answers.values()))
        return (
            f"{name_ranks(silent)} of {n_ranks} {'do' if len(silent) > 1 else 'does'} not respond "
            f"since {part}; {name_ranks([*answers])} did, on {hosts}\n"
            "hint: exclude the machine of the ranks that do not respond"
        )
    parts: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        parts.setdefault(f"{answer['part']} on {answer['host']}", []).append(rank)
    where = "; ".join(f"{name_ranks(ranks)} at {part}" for part, ranks in parts.items())
    return (
        f"no progress since {part}, though all {n_ranks} ranks respond: {where}\n"
        "hint: in a network phase, check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and set "
        "NCCL_DEBUG=INFO; in a disk phase, try ls and df there"
    )


if __name__ == "__main__":
    run_program(main)
