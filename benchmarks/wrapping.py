"""What the machinery of parallel layouts costs where there is nothing to share: on one process.

    python benchmarks/wrapping.py --output wrapping.json

The same steps (forward, backward, clipped AdamW; the same weights and ids) on a CPU, as

    plain        the single-device model called directly, micro batch by micro batch
    product      what `trainyard train` does on one process: a ParallelModel without groups
    replicate, ZeRO 1, ZeRO 3
                 a ParallelModel on a mesh of one rank: FSDP2 with no peers, which the product never
                 does; these show what FSDP2 itself costs the host

All live in one process and take a step each in turn. Two cells: the preset "laptop", where products
of matrices dominate, and "tiny", whose micro batches take a few milliseconds, so that what the host
does besides is seen. `over_plain` is the median over rounds of a candidate's time over plain's in
the same round, by the clock and in processor time; `milliseconds_per_micro_batch` is the median
difference. The profiles are of steps of "tiny", by processor time in the functions themselves.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import Figures, describe_machine, render
from torch.distributed.device_mesh import init_device_mesh

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.model.gpt import GPT, initialize
from trainyard.optim.adamw import AdamW
from trainyard.optim.clip import StepStats, reduce_step_stats
from trainyard.parallel.mesh import Mesh, keep_freed_memory
from trainyard.parallel.model import ParallelModel

Step = Callable[[], float]
Seconds = tuple[float, float]  # by the clock, and of processor time

# Changes to the preset of the same name, and rounds for each that is asked for.
CELLS = {
    "laptop": ("train.micro_batch_size=4 train.global_batch_size=8", 1),
    "tiny": ("train.micro_batch_size=1 train.global_batch_size=16", 10),
}
ZERO_STAGES = {"replicate": 0, "ZeRO 1": 1, "ZeRO 3": 3}
PROFILED = ("plain", "product", "ZeRO 1")
N_PROFILED_STEPS, N_FUNCTIONS = 10, 15


def batch(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (run.train.global_batch_size, run.model.sequence_length + 1)
    ids = torch.randint(0, run.model.vocabulary_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_plain(run: Run) -> Step:
    model = GPT(run.model, resolve(run, 1).padded_vocabulary_size)
    initialize(model, run.train.seed)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, run.optimizer)
    tokens, labels = batch(run)
    size, one = run.train.micro_batch_size, torch.ones(())

    def step() -> float:
        total = torch.zeros(())
        for inputs, targets in zip(tokens.split(size), labels.split(size), strict=True):
            loss = model.summed_loss(model(inputs), targets, 1 / labels.numel())
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        divisor = StepStats(total, norm, one).divisor(run.optimizer.clip_norm)
        optimizer.step(run.optimizer.learning_rate, divisor, (~norm.isfinite()).float())
        model.zero_grad()
        return total.item()

    return step


def build_replica(run: Run, zero_stage: int | None) -> Step:
    """Builds the product's way, or on a mesh of one rank if a ZeRO stage is given."""
    plan, device = resolve(run, 1), torch.device("cpu")
    mesh = Mesh(plan.topology, 0, device)
    if zero_stage is not None:
        run = run.model_copy(
            update={"parallel": run.parallel.model_copy(update={"zero_stage": zero_stage})}
        )
        share = init_device_mesh("cpu", (1,), mesh_dim_names=("share",))
        mesh = Mesh(plan.topology, 0, device, data=share)
    parallel_model = ParallelModel(run, plan, mesh, torch.float32)
    optimizer = AdamW([local.parameter for local in parallel_model.local_parameters], run.optimizer)
    tokens, labels = batch(run)
    n = labels.numel()

    def step() -> float:
        loss = parallel_model.forward_backward(tokens, labels, None, 1 / n)
        totals = reduce_step_stats(parallel_model, loss, n, n)
        divisor = totals.divisor(run.optimizer.clip_norm)
        optimizer.step(run.optimizer.learning_rate, divisor, (~totals.is_finite).float())
        parallel_model.zero_grad()
        return totals.loss.item()

    return step


def measure(name: str, rounds: int) -> Figures:
    changes, factor = CELLS[name]
    fields = [*changes.split(), "model.dropout=0.0", "precision.kind=fp32"]
    run = load_run(name, fields).run
    steps = {"plain": build_plain(run), "product": build_replica(run, None)}
    steps |= {who: build_replica(run, stage) for who, stage in ZERO_STAGES.items()}
    first_losses = {who: step() for who, step in steps.items()}
    seconds: dict[str, list[Seconds]] = {who: [] for who in steps}
    for number in range(rounds * factor):
        order = list(steps)
        for who in order[number % len(order) :] + order[: number % len(order)]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[who]()
            seconds[who].append((time.perf_counter() - wall, time.process_time() - cpu))
    n_micro_batches = run.train.global_batch_size // run.train.micro_batch_size
    rows = {
        who: summary(found, seconds["plain"], n_micro_batches) for who, found in seconds.items()
    }
    for who, row in rows.items():
        print(
            f"{name:7} {who:10} min {row['min_milliseconds']:8.2f} median "
            f"{row['median_milliseconds']:8.2f} ms a step, over plain {row['over_plain']:.3f}, "
            f"in processor time {row['over_plain_cpu']:.3f}, "
            f"{row['milliseconds_per_micro_batch_cpu']:+.3f} ms a micro batch",
            flush=True,
        )
    figures: Figures = {
        "changes": fields,
        "rounds": rounds * factor,
        "micro_batches": n_micro_batches,
        "first_losses": first_losses,
        "candidates": rows,
    }
    if name == "tiny":
        figures["profiles"] = {who: profile(steps[who], n_micro_batches) for who in PROFILED}
    return figures


def summary(found: list[Seconds], plain: list[Seconds], n_micro_batches: int) -> Figures:
    figures: Figures = {}
    for place, suffix in enumerate(("", "_cpu")):
        own, other = [each[place] for each in found], [each[place] for each in plain]
        pairs = list(zip(own, other, strict=True))
        difference = statistics.median(a - b for a, b in pairs)
        figures |= {
            f"min_milliseconds{suffix}": round(1e3 * min(own), 3),
            f"median_milliseconds{suffix}": round(1e3 * statistics.median(own), 3),
            f"over_plain{suffix}": round(statistics.median(a / b for a, b in pairs), 4),
            f"min_over_plain{suffix}": round(min(own) / min(other), 4),
            f"milliseconds_per_micro_batch{suffix}": round(1e3 * difference / n_micro_batches, 4),
        }
    return figures


def profile(step: Step, n_micro_batches: int) -> list[str]:
    """Lists the functions that most time passes in, in microseconds and calls a micro batch."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(N_PROFILED_STEPS):
        step()
    profiler.disable()
    n = N_PROFILED_STEPS * n_micro_batches
    # By (file, line, function): calls without recursion, calls, own seconds, with callees', callers
    entries = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    longest = sorted(entries, key=lambda entry: -entry[1][2])[:N_FUNCTIONS]
    return [
        f"{1e6 * own / n:8.1f} us {calls / n:7.2f} calls  {place(path, line)} {function}"
        for (path, line, function), (_, calls, own, _, _) in longest
    ]


def place(path: str, line: int) -> str:
    """Names a file by its package."""
    parts = Path(path).parts
    for package in ("torch", "trainyard", "benchmarks"):
        if package in parts:
            start = len(parts) - 1 - parts[::-1].index(package)
            if package == "torch":
                start = parts.index(package)
            return f"{'/'.join(parts[start:])}:{line}"
    return "built in" if path == "~" else parts[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path("wrapping.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    keep_freed_memory(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    record = describe_machine(["torch"]) | {"threads": arguments.threads}
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        for name in arguments.cells.split(","):
            record[name] = measure(name, arguments.rounds)
        dist.destroy_process_group()
    arguments.output.write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main()
