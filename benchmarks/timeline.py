"""The timeline of a training step on GPUs, from what the host asks of a fake one.

    make set-up-cuda
    .venv/bin/python -m benchmarks.timeline --output record.json    # an hour
    .venv/bin/python -m benchmarks.timeline "GPT-3 13B, tensor 8"

The stubs of `tests/fake_cuda` log launches, events, waits and messages of one rank of each pipeline
stage (`timeline_rank.py`). Here each gets its time from the plan's prices (`planning/time.py`), and
its start from what it waits for:

    host       one request after the other, each launch_seconds
    stream     one request after the other; a wait lets the next ones start after an event
    message    between stages, after both sides have come to it

A collective takes as long as the plan says, since all its ranks come to it at once; gathers and
reductions of data ranks take turns, since either fills the network. Memory-bound
kernels share the plan's memory-bound time by their threads. An axis exposes the seconds that a step
is shorter where its messages take no time: no share is assumed. That kernels are slower beside
messages, which take multiprocessors and memory bandwidth, is not simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import Figures, describe_machine, publish

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan, resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Machine
from trainyard.planning.time import _Timer, time_of
from trainyard.planning.traffic import Traffic
from trainyard.planning.work import Matmul, RankWork, count_work

ROOT = Path(__file__).parents[1]
FAKE = ROOT / ".venv-cuda/bin/python"
MESSAGES = ("tensor", "context", "pipeline", "shard", "replicate", "stage", "all")
DATA = ("shard", "replicate")
"""Axes whose messages share the network."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce")
KERNELS = ("kernel", "matmul", "attention", "copy", "fill")
NEW, WAITING = -1.0, -2.0
"""Ends of operations that have none yet."""
ATTENTION = {"flash_fwd": 2.0, "flash_bwd_dq_dk_dv": 5.0}
"""Flash attention's kernels, and the matmuls in each; others of its backward pass move memory."""


@dataclass(frozen=True)
class Job:
    """A run, and where it runs."""

    run: str
    gpu: str
    n_gpus: int
    overrides: tuple[str, ...] = ()

    def load(self) -> Run:
        """Returns the run."""
        return load_run(self.run, list(self.overrides)).run


_8B = "llama-3.1-8b"
_ZERO_3, _MICRO_1, _MICRO_2 = "parallel.zero_stage=3", "micro_batch_size=1", "micro_batch_size=2"


def _job(run: str, n_gpus: int, batch: int, *overrides: str) -> Job:
    """Returns a job on H100s; fields without a section are those of `train`."""
    given = [*overrides, f"global_batch_size={batch}", "batch_ramp=none"]
    named = tuple(each if "." in each.split("=")[0] else f"train.{each}" for each in given)
    return Job(run, "h100-80g", n_gpus, named)


JOBS = {
    "GPT-3 13B, tensor 8": _job("gpt3-13b", 8, 16, "parallel.tensor=8", _MICRO_2),
    "the same, sequence": _job(
        "gpt3-13b", 8, 16, "parallel.tensor=8", "parallel.sequence=true", _MICRO_2
    ),
    "Llama 3.1 8B, ZeRO 3": _job(_8B, 8, 16, _ZERO_3, _MICRO_1),
    "the same on 64": _job(_8B, 64, 128, _ZERO_3, _MICRO_1),
    "Llama 3.1 8B, ZeRO 2": _job(_8B, 64, 256, "parallel.zero_stage=2", _MICRO_1),
    "Llama 3.1 8B, ZeRO 1": _job(_8B, 64, 256, "parallel.zero_stage=1", _MICRO_1),
    "GPT-3 13B, tensor 2, ZeRO 1": _job(
        "gpt3-13b", 64, 512, "parallel.tensor=2", "parallel.zero_stage=1", _MICRO_2
    ),
    "Llama 3.1 8B, ring of 4, 32k": _job(
        *(_8B, 64, 64, "parallel.context=4", "parallel.context_method=ring", _ZERO_3, _MICRO_1),
        "model.sequence_length=32768",
    ),
    "Llama 3.1 70B, tensor 8, ZeRO 3": _job(
        *("llama-3.1-70b", 256, 128, "parallel.tensor=8", "parallel.sequence=true"),
        *(_ZERO_3, _MICRO_1),
    ),
    "GPT-3 175B, tensor 8, pipeline 8": _job(
        *("gpt3-175b", 1024, 512, "parallel.tensor=8", "parallel.sequence=true"),
        *("parallel.pipeline=8", "parallel.schedule=interleaved", "parallel.chunks=6"),
        *("parallel.zero_stage=1", _MICRO_1),
    ),
}


@dataclass(frozen=True)
class Request:
    """One line of a log."""

    words: Sequence[str]
    phase: str
    """Of the step."""
    kind: str | None
    """Of KERNELS, or the axis of a message; None for what takes no time."""
    is_grouped: bool
    """Whether NCCL sends it together with others, as one kernel."""


def read_requests(log: Iterable[str]) -> Iterator[Request]:
    """Reads the requests of a step, after those that name the communicators of axes."""
    axes: dict[str, str] = {}
    phase, is_grouped = "", False
    for line in log:
        words = line.split()
        if words[0] == "mark":
            phase = " ".join(words[1:])
        elif phase.startswith("axis"):
            if words[0] in COLLECTIVES:  # one of all ranks serves several axes: the first
                axes.setdefault(words[3], phase.split()[1])
        else:
            kind = words[0] if words[0] in KERNELS else None
            if words[0] in (*COLLECTIVES, "send", "recv"):
                kind = axes.get(words[3], "pipeline")  # of two ranks: stages have pairs, too
                kind = "pipeline" if kind == "ends" else kind
            elif words[0] in ("group", "end"):
                is_grouped = words[0] == "group"
            yield Request(words, phase, kind, is_grouped and kind not in KERNELS)


def read_messages(log: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Reads axis, collective and bytes of the larger buffer of each message of a step."""
    for request in read_requests(log):
        if request.kind is not None and request.kind not in KERNELS:
            yield request.kind, request.words[0], larger_bytes(request.words)


def larger_bytes(words: Sequence[str]) -> int:
    """Returns the bytes of the larger buffer of a message."""
    n_parts = int(words[4]) if words[0] in ("all-gather", "reduce-scatter") else 1
    return n_parts * int(words[2])


@dataclass
class Operation:
    """One request of the log, with all it waits for."""

    rank: int
    kind: str
    """Of KERNELS, or the axis of a message."""
    seconds: float
    issued: float
    """When the host has asked for it."""
    after: list[Operation] = field(default_factory=list)
    end: float = NEW


class Timeline:
    """All requests of a step, of one rank of each pipeline stage.

    Args:
        logs: lines of each rank's log.
        price: gives the seconds of a request of a rank.
        host_seconds: to ask for one.
    """

    def __init__(
        self,
        logs: Sequence[Iterable[str]],
        price: Callable[[int, Request], float],
        host_seconds: float,
    ) -> None:
        self.operations: list[Operation] = []
        self._price, self._host_seconds = price, host_seconds
        self._sides: dict[tuple[str, str, int], list[Operation]] = defaultdict(list)
        for rank, log in enumerate(logs):
            self._read(rank, log)

    def _read(self, rank: int, log: Iterable[str]) -> None:
        """Adds the requests of a rank."""
        last: dict[str, Operation] = {}
        events: dict[str, Operation | None] = {}
        waits: dict[str, list[Operation]] = defaultdict(list)
        numbers: dict[tuple[str, str], int] = defaultdict(int)
        group: dict[str, Operation] = {}
        host = 0.0
        for request in read_requests(log):
            words, stream = request.words, request.words[1] if request.words[1:] else ""
            if words[0] == "record":
                events[words[2]] = last.get(stream)
            elif words[0] == "wait":
                event = events.get(words[2])
                waits[stream] += [] if event is None else [event]
            elif words[0] == "group":
                group = {}
            if request.kind is None:
                continue
            host += self._host_seconds
            seconds = self._price(rank, request)
            operation = group.get(stream) if request.is_grouped else None
            if operation is None:
                ways = [stream, *(["data"] if request.kind in DATA else [])]
                after = waits.pop(stream, []) + [last[way] for way in ways if way in last]
                operation = Operation(rank, request.kind, 0.0, host, after)
                self.operations.append(operation)
                last |= dict.fromkeys(ways, operation)
                if request.is_grouped:
                    group[stream] = operation
            operation.seconds = max(operation.seconds, seconds)
            if words[0] in ("send", "recv") and request.kind == "pipeline":
                sender = words[3], words[5 if words[0] == "send" else 6]
                self._sides[*sender, numbers[sender]].append(operation)
                numbers[sender] += 1

    def seconds(self, free: Sequence[str] = ()) -> float:
        """Returns the time until all is done.

        Args:
            free: kinds that take no time.
        """
        partners: dict[int, list[Operation]] = defaultdict(list)
        for sides in self._sides.values():
            for one in sides:
                partners[id(one)] += [other for other in sides if other is not one]
        for operation in self.operations:
            operation.end = NEW
        for operation in self.operations:
            _finish(operation, partners, free)
        return max(operation.end for operation in self.operations)

    def exposed(self, kinds: Sequence[str]) -> float:
        """Returns the seconds that a step is shorter if messages of some kinds take no time."""
        return self.seconds() - self.seconds(kinds)

    def busy(self) -> dict[str, float]:
        """Sums seconds by kind, on the rank with most of it."""
        sums: dict[tuple[str, int], float] = defaultdict(float)
        for each in self.operations:
            sums[each.kind, each.rank] += each.seconds
        return {kind: max(s for (k, _), s in sums.items() if k == kind) for kind, _ in sums}


class DeadlockError(Exception):
    """Messages wait for each other."""


def _finish(first: Operation, partners: Mapping[int, list[Operation]], free: Sequence[str]) -> None:
    """Sets the end of an operation, after those of all it waits for.

    Raises:
        DeadlockError: it waits for itself.
    """
    stack = [first]
    while stack:
        operation = stack[-1]
        if operation.end >= 0:
            stack.pop()
            continue
        # Partners start together: after all that any of them waits for.
        sides = [operation, *partners.get(id(operation), [])]
        before = [each for side in sides for each in side.after]
        missing = [each for each in before if each.end < 0]
        if any(each.end == WAITING for each in missing):
            raise DeadlockError(f"a message of stage {operation.rank} waits for itself")
        if missing:
            operation.end = WAITING
            stack += missing
            continue
        start = max([side.issued for side in sides] + [each.end for each in before])
        operation.end = start + (0.0 if operation.kind in free else operation.seconds)
        stack.pop()


class Prices:
    """The plan's prices of requests.

    Args:
        run: the run.
        plan: of the run.
        machine: its devices.
        logs: of each stage's rank, to share memory-bound time and attention among their kernels.
    """

    def __init__(
        self, run: Run, plan: Plan, machine: Machine, logs: Sequence[Sequence[str]]
    ) -> None:
        self.work = count_work(run, plan)
        self._timer = _Timer(self.work, machine)
        self._machine = self._timer.machine
        self._rates = [
            self._rates_of(rank, log) for rank, log in zip(self.work.ranks, logs, strict=True)
        ]

    def _rates_of(self, rank: RankWork, log: Sequence[str]) -> dict[str, float]:
        """Returns the seconds of a unit of `_share`."""
        n, update = self.work.n_micro_batches, self._timer.update_seconds()
        passes = [each for both in rank.stages for each in both]
        memory = sum(self._machine.memory_seconds(each.memory_bytes) for each in passes)
        flops = sum(each.attention_flops for each in passes)
        speed, dtype = self._timer.attention_speed, self._timer.dtypes[0]
        attention = self._machine.attention_seconds(flops, dtype, speed) if flops else 0.0
        totals = {"memory": n * memory, "attention": n * attention, "update": update}
        units = dict.fromkeys(totals, 0.0)
        for request in read_requests(log):
            if request.kind in ("kernel", "attention"):
                name, size = _share(request)
                units[name] += size
        return {name: totals[name] / units[name] if units[name] else 0.0 for name in totals}

    def __call__(self, rank: int, request: Request) -> float:
        """Returns the seconds of a request."""
        words, kind = request.words, request.kind
        assert kind is not None
        if kind == "matmul":
            rows, columns, inner = map(int, words[2:5])
            matmul = Matmul(columns, inner, rows, in_fp8="fp8" in words)
            return self._timer._matmul_seconds(matmul) if rows else 0.0
        if kind in ("kernel", "attention"):
            name, size = _share(request)
            return self._rates[rank][name] * size
        if kind in KERNELS:
            return self._machine.memory_seconds(2 * int(words[2]))
        if kind == "all":  # single numbers
            return 0.0
        collective: Any = "send" if words[0] == "recv" else words[0]
        axis: Any = kind
        return self._timer.message_seconds(Traffic(axis, collective, 1, larger_bytes(words)))


def _share(request: Request) -> tuple[str, float]:
    """Returns what a kernel has a share of, and its size."""
    words = request.words
    if words[0] == "attention":
        return "attention", 1.0
    for part, n_matmuls in ATTENTION.items():
        if part in words[3]:
            return "attention", n_matmuls
    return "update" if request.phase == "update" else "memory", float(words[2])


def record(job: Job, folder: Path) -> list[list[str]]:
    """Returns the logs of a folder, or runs one rank of each pipeline stage on a fake device."""
    run = job.load()
    plan = resolve(run, job.n_gpus)
    text = {"run": job.run, "overrides": job.overrides, "n_ranks": job.n_gpus}
    (folder / "job.json").write_text(json.dumps(text), encoding="utf-8")
    apart = plan.n_ranks // run.parallel.pipeline
    logs = [folder / f"{stage}.log" for stage in range(run.parallel.pipeline)]
    if all(log.exists() for log in logs):
        return [log.read_text(encoding="utf-8").splitlines() for log in logs]
    (folder / "store").unlink(missing_ok=True)
    settings = {
        "FAKE_CUDA_MB": "640000",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "TORCH_NCCL_RANKS_PER_ROOT": f"{plan.n_ranks}",  # ids of communicators are of one rank
    }
    # One after the other: a group's first rank leaves the id of its communicator in a file.
    for stage, log in enumerate(logs):
        script = [
            "tests/fake_cuda/start.py",
            "benchmarks/timeline_rank.py",
            str(folder / "job.json"),
        ]
        command = [str(FAKE), *script, str(stage * apart), str(log)]
        with log.with_suffix(".out").open("w", encoding="utf-8") as out:
            code = subprocess.call(command, cwd=ROOT, env=os.environ | settings, stderr=out)
        if code:
            raise SystemExit(log.with_suffix(".out").read_text(encoding="utf-8")[-2000:])
    return [log.read_text(encoding="utf-8").splitlines() for log in logs]


def examine(job: Job, logs: Sequence[Sequence[str]]) -> Figures:
    """Simulates a logged step, and compares it with the plan."""
    run, machine = job.load(), find_machine(None, job.gpu)
    plan = resolve(run, job.n_gpus)
    prices = Prices(run, plan, machine, logs)
    timeline = Timeline(logs, prices, machine.efficiencies.launch_seconds)
    planned = time_of(prices.work, machine)
    groups = {"tensor": ("tensor",), "context": ("context",), "data": DATA}
    busy = timeline.busy()
    flops = plan.model_flops_per_token * run.train.global_batch_size * run.model.sequence_length
    return {
        "gpus": job.n_gpus,
        "seconds": timeline.seconds(),
        "exposed": {name: timeline.exposed(axes) for name, axes in groups.items()},
        "all_exposed": timeline.exposed(MESSAGES),
        "sent": {name: sum(busy.get(axis, 0.0) for axis in axes) for name, axes in groups.items()},
        "planned_seconds": planned.seconds,
        "planned_exposed": {name: planned.parts[name] for name in groups},
        "mfu": flops / (timeline.seconds() * job.n_gpus * machine.peak("bf16")),
    }


def main() -> None:
    """Records jobs and simulates them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--logs", type=Path, help="keep them here, and take those that are here")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.jobs or JOBS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = (arguments.logs or Path(scratch)) / name.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            results[name] = examine(JOBS[name], record(JOBS[name], folder))
        print(render_row(name, results[name]), flush=True)
    publish({"jobs": results, **describe_machine(["torch"])}, arguments.output)


def render_row(name: str, figures: Figures) -> str:
    """Writes a row of a table: milliseconds sent, exposed, and exposed by the plan."""
    cells = [name, str(figures["gpus"]), f"{1000 * figures['seconds']:,.0f}"]
    for axis, sent in figures["sent"].items():
        exposed, planned = figures["exposed"][axis], figures["planned_exposed"][axis]
        values = [f"{1000 * value:,.0f}" for value in (sent, exposed, planned)]
        cells.append(" / ".join(values) if sent else "-")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
