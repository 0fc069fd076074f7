"""Starts, trains, kills and resumes hundreds of ranks, each a process of its own (Linux).

    python benchmarks/processes.py --ranks 32 64 128 256 --output record.json

A process with the imports of training holds 294 MB, 211 of them its own, so 256 that are started
one by one need 54 GB. Here they are forks of one process that has the imports and no thread yet.
From there each does what a launcher's worker does: `trainyard.training.worker`, a TCP rendezvous at
rank 0, gloo, background saves, heartbeats. Up to 64 ranks have all axes: pipeline 2, tensor 2,
context 2, two replicas, and ZeRO 2 over the others; more have tensor 2 and ZeRO 2.

Each group of gloo, seven or four of a rank, has a thread that wakes up 100 times a second. For 256
ranks this would take both cores, so the kernel may delay their timers by a tenth of a second.

Ranks save after step 2, and once step 3 is logged, the middle one is killed; all must end by
themselves. Then all start again, resume after step 2, and train to the end. Step 3 must have the
loss and gradient norm that it had before, bit for bit.

Seconds of CPU time are of all ranks together. Memory is what the ranks hold: the proportional share
of each page, and their page tables. Bytes are those of the loopback interface, on which others may
talk, too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import Figures, describe_machine, publish, render

if TYPE_CHECKING:
    from trainyard.launch.heartbeat import HeartbeatReader, HeartbeatState

N_STEPS, SAVED_STEP, KILLED_STEP = 6, 2, 3
MOST_ON_ALL_AXES = 64
LONGEST_SECONDS = 3600.0
POLL_SECONDS, SHOW_SECONDS = 0.2, 10.0
PR_SET_TIMERSLACK, SLACK_NANOSECONDS = 29, 100_000_000
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Ranks:
    """Running ranks, as their launcher sees them."""

    folder: Path
    pids: list[int]
    heartbeats: list[HeartbeatReader]
    ended: dict[int, int] = field(default_factory=dict)
    """Exit codes by rank."""
    cpu_of_ended: float = 0.0
    started: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def reap(self) -> None:
        """Notes which ranks have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                found, status, usage = os.wait4(pid, os.WNOHANG)
                if found:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)
                    self.cpu_of_ended += usage.ru_utime + usage.ru_stime

    def states(self) -> list[HeartbeatState]:
        """Reads all heartbeats."""
        return [heartbeat.read() for heartbeat in self.heartbeats]

    def cpu_seconds(self) -> float:
        """Sums the CPU time of all ranks since their start."""
        total = self.cpu_of_ended
        for rank in self.alive():
            with suppress(OSError):
                fields = Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2]
                total += sum(int(ticks) for ticks in fields.split()[11:13]) / TICK
        return total

    def alive(self) -> list[int]:
        """Lists the ranks that run."""
        return [rank for rank in range(len(self.pids)) if rank not in self.ended]

    def wait(self, what: str, holds: Callable[[], bool], *, until_end: bool = False) -> None:
        """Waits until something holds, and shows progress.

        Raises:
            SystemExit: it takes too long; or a rank has ended, unless the wait is for that.
        """
        while not holds():
            self.reap()
            now = time.monotonic()
            if now > self.shown + SHOW_SECONDS:
                self.shown = now
                self.show(what)
            failed = {rank: code for rank, code in self.ended.items() if code}
            if now > self.started + LONGEST_SECONDS or (failed and not until_end):
                self.show(what)
                sys.exit(f"waiting for {what}: exit codes by rank {failed}\n{self.read_logs()}")
            time.sleep(POLL_SECONDS)

    def show(self, what: str) -> None:
        """Prints where the ranks are."""
        phases: dict[str, int] = {}
        for state in self.states():
            place = f"{state.phase} {state.step}"
            phases[place] = phases.get(place, 0) + 1
        seconds = time.monotonic() - self.started
        print(
            f"{len(self.pids)} ranks, {seconds:.0f} s, waiting for {what}: {phases}, "
            f"{len(self.ended)} ended, {self.cpu_seconds():.0f} CPU s",
            file=sys.stderr,
            flush=True,
        )

    def read_logs(self) -> str:
        """Returns the different ends of all logs."""
        ends = {path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")}
        return "\n---\n".join(sorted(ends, key=len)[-3:])

    def kill(self) -> None:
        """Ends whatever is left."""
        for rank in self.alive():
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        for heartbeat in self.heartbeats:
            heartbeat.close()


def write_run(folder: Path, n_ranks: int) -> None:
    """Writes a tiny run, and its tokens."""
    import numpy as np

    from trainyard.config.load import load_run, render_run
    from trainyard.data.indexed import IndexedWriter

    axes = {"pipeline": 2, "tensor": 2, "context": 2, "data_replicate": 2}
    n_model_ranks = 8
    if n_ranks > MOST_ON_ALL_AXES:
        axes, n_model_ranks = {"tensor": 2}, 2
    assert n_ranks % 16 == 0, "2 x 2 x 2 x 2 ranks, and ZeRO over the rest"
    data = n_ranks // n_model_ranks
    random = np.random.default_rng(7)
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        for _ in range(200):
            writer.add_document(random.integers(0, 512, 500).astype(np.uint16))
    run = load_run(
        "tiny",
        [
            *(f"parallel.{axis}={size}" for axis, size in axes.items()),
            "parallel.zero_stage=2",
            *("model.d_model=32", "model.d_ff=64", "model.sequence_length=32"),
            *("train.micro_batch_size=1", f"train.global_batch_size={2 * data}"),
            f"train.length='{N_STEPS} steps'",
            *("schedule.warmup='2 steps'", f"schedule.decay='{N_STEPS} steps'"),
            *(f"data.blend.prefixes=['{folder / 'tokens'}']", "data.split='80,10,10'"),
            f"data.cache_folder='{folder / 'cache'}'",
            *("evaluate.batches=0", "log.interval=1", "log.tensorboard=false"),
            *(f"checkpoint.interval={SAVED_STEP}", "checkpoint.keep_last=9"),
        ],
    ).run
    (folder / "run.toml").write_text(render_run(run), encoding="utf-8")


def start_ranks(folder: Path, n_ranks: int, attempt: int) -> Ranks:
    """Forks this process, which must have no other thread, into the ranks of a run."""
    from trainyard.launch.heartbeat import HeartbeatReader

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (logs := folder / f"logs-{attempt}").mkdir()
    ranks = Ranks(logs, [], [HeartbeatReader() for _ in range(n_ranks)])
    closed, gate = os.pipe()  # all begin at once, as under a launcher
    gc.collect()
    gc.freeze()  # looking at what is there already would copy it
    for rank, heartbeat in enumerate(ranks.heartbeats):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": n_ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": n_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TRAINYARD_HEARTBEAT": heartbeat.descriptor,
            "OMP_NUM_THREADS": 1,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        pid = os.fork()
        if pid == 0:
            try:
                os.close(gate)
                os.read(closed, 1)
                be_rank(folder, logs / f"rank-{rank:05d}.log", environment)
            finally:
                os._exit(1)
        ranks.pids.append(pid)
    os.close(closed)
    os.close(gate)
    ranks.started = time.monotonic()
    return ranks


def be_rank(folder: Path, log: Path, environment: dict[str, object]) -> None:
    """Does what a launcher's worker does."""
    from trainyard.launch.environment import read_process
    from trainyard.launch.watched import be_watched, leave_after
    from trainyard.training import worker

    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
    kept = {0, 1, 2, environment["TRAINYARD_HEARTBEAT"]}
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):  # that of the listing
                os.close(int(path.name))
    os.environ.update({name: str(value) for name, value in environment.items()})
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NANOSECONDS, 0, 0, 0)  # threads inherit it
    sys.argv = ["worker", str(folder)]
    be_watched(read_process())
    leave_after(worker.main)


def weigh(ranks: Ranks) -> Figures:
    """Measures what the ranks hold while all run."""
    memory, tables, most_files, threads = 0, 0, 0, 0
    for pid in ranks.pids:
        place = Path(f"/proc/{pid}")
        status = (place / "status").read_text()
        memory += _kibibytes("Pss", (place / "smaps_rollup").read_text())
        tables += _kibibytes("VmPTE", status)
        threads += int(re.findall(r"Threads:\s+(\d+)", status)[0])
        most_files = max(most_files, len(list((place / "fd").iterdir())))
    return {
        "memory of all ranks": 1024 * (memory + tables),
        "most open files of a rank": most_files,
        "threads of all ranks": threads,
    }


def _kibibytes(name: str, text: str) -> int:
    return int(re.findall(rf"{name}:\s+(\d+) kB", text)[0])


def loopback_bytes() -> int:
    """Returns what the loopback interface has carried."""
    return int(re.findall(r"lo:\s*(\d+)", Path("/proc/net/dev").read_text())[0])


def read_steps(folder: Path) -> dict[int, tuple[float, float]]:
    """Returns loss and gradient norm of each logged step; of steps done twice, the last ones."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {
        event["step"]: (event["loss"], event["gradient_norm"])
        for event in events
        if event["kind"] == "train"
    }


def train(folder: Path, n_ranks: int) -> Figures:
    """Trains with a kill in the middle; returns the costs of all ranks together."""
    costs: Figures = {}
    begun = time.monotonic()
    ranks = start_ranks(folder, n_ranks, 0)
    costs["fork, s"] = time.monotonic() - begun
    before, bytes_before = 0.0, loopback_bytes()

    def passed(name: str) -> None:
        nonlocal before, bytes_before
        now, n_bytes = ranks.cpu_seconds(), loopback_bytes()
        costs[f"{name}, CPU s"], costs[f"{name}, bytes"] = now - before, n_bytes - bytes_before
        costs[f"{name}, until s"] = time.monotonic() - ranks.started
        before, bytes_before = now, n_bytes

    saved = folder / "checkpoints" / f"step-{SAVED_STEP:08d}"
    try:
        ranks.wait("all to join", lambda: all(s.phase != "start" for s in ranks.states()))
        passed("start")
        ranks.wait("a step", lambda: 1 in read_steps(folder))
        passed("first step")
        ranks.wait("the save", saved.exists)
        passed("a step and a save")
        costs |= weigh(ranks)
        ranks.wait(f"step {KILLED_STEP}", lambda: KILLED_STEP in read_steps(folder))
        passed("another step")
        os.kill(ranks.pids[n_ranks // 2], signal.SIGKILL)
        ranks.wait("all to end", lambda: not ranks.alive(), until_end=True)
        passed("end after a kill")
        codes = list(ranks.ended.values())
        costs["exit codes"] = {str(code): codes.count(code) for code in sorted(set(codes))}
    finally:
        ranks.kill()
    first = read_steps(folder)
    ranks, before = start_ranks(folder, n_ranks, 1), 0.0
    try:
        ranks.wait("all to load", lambda: all(s.phase != "start" for s in ranks.states()))
        passed("second start")
        ranks.wait(
            "all to resume", lambda: all(s.phase not in ("start", "load") for s in ranks.states())
        )
        assert all(state.step >= SAVED_STEP for state in ranks.states()), "they began anew"
        passed("load")
        ranks.wait("the end", lambda: not ranks.alive())
        passed("four steps, two saves and the end")
    finally:
        ranks.kill()
    again = read_steps(folder)
    assert sorted(again) == list(range(1, N_STEPS + 1)), again
    differing = {step: (first[step], again[step]) for step in first if first[step] != again[step]}
    assert not differing, f"steps before and after the kill: {differing}"
    costs["losses"] = [loss for loss, _ in again.values()]
    return costs


def prepare_forks() -> None:
    """Imports what a worker needs, without starting a thread."""
    import torch

    torch.set_num_threads(1)
    for name in ("torch._dynamo", "trainyard.parallel.data", "trainyard.parallel.pipeline"):
        import_module(name)  # in each fork it would take seconds
    import_module("trainyard.training.worker")
    assert len(list(Path("/proc/self/task").iterdir())) == 1, (
        "a fork has only the thread that made it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[32, 64, 128, 256])
    parser.add_argument("--scratch", type=Path, help="folder for the runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from trainyard.launch.environment import raise_file_limit

    raise_file_limit()
    record = describe_machine(("torch", "numpy")) | {"load_average": os.getloadavg()}
    prepare_forks()
    record["ranks"] = {}
    for n_ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            folder = Path(scratch).resolve()
            write_run(folder, n_ranks)
            record["ranks"][n_ranks] = train(folder, n_ranks)
        if options.output:  # what is measured is kept, should a later size fail
            options.output.write_text(render(record), encoding="utf-8")
    publish(record, options.output)


if __name__ == "__main__":
    main()
