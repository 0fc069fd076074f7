"""Training runs that are timed, and one row for each: speed and memory, beside the predictions."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.item import Row, Session

from trainyard.bench.job import BenchJob, Steps, prepare_run
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.flops import model_flops_utilization
from trainyard.layout.resolve import Plan, resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.memory import busiest_memory
from trainyard.planning.time import step_time

if TYPE_CHECKING:
    import torch

STEPS = Steps(warm_up=2, timed=4)
FAKE_BLOCKS = 3
"""With two, none would be in fp8: the first and the last stay in bf16."""
DEVICE = "h100"
PREDICTIONS = "predictions.json"
TOKENS = "tokens/text"
"""Real text in the packed folder: what `prepare` was told to write."""
SUFFIX = "_text_document"


@dataclass(frozen=True)
class Timed:
    """A run to time.

    Args:
        preset: its name.
        overrides: of fields.
        estimate: MFU, where one is written down.
        against: the run whose speed this one's is divided by.
        decides: what a ratio above or below 1 means.
        baseline: another project that trains it.
    """

    preset: str
    overrides: tuple[str, ...]
    estimate: str = ""
    against: str = ""
    decides: str = ""
    baseline: str = ""


def _sizes(micro: int, batch: int, *others: str) -> tuple[str, ...]:
    sizes = (f"train.micro_batch_size={micro}", f"train.global_batch_size={batch}")
    return (*sizes, "model.dropout=0", *others)


_WIDE = ("model.n_layers=8", "model.d_model=4096", "model.n_heads=32", "model.d_ff=16384")
_SMALLER_LLAMA = ("model.n_layers=8", "model.sequence_length=2048")
_CUDNN, _FLASH = "kernels.attention=cudnn", "kernels.attention=flash"
_FASTER = "kernels.{}: true where above 1.01"


BESIDE_PEERS = ("gpt ", "llama ")


def _peer(preset: str, micro: int, baseline: str, *overrides: str) -> Timed:
    aim = "aim: ours 1.05 times as fast" if baseline else ""
    ours = "llama ours" if preset.startswith("llama") else "gpt ours"
    sizes = _sizes(micro, 4 * micro, *overrides)
    return Timed(preset, sizes, "", ours if baseline else "", aim, baseline)


RUNS: dict[str, Timed] = {
    "1.3b flash": Timed("gpt3-1.3b", _sizes(8, 32, _FLASH), "0.45-0.50"),
    "1.3b cudnn": Timed(
        "gpt3-1.3b",
        _sizes(8, 32, _CUDNN),
        "0.49-0.54, x1.07",
        "1.3b flash",
        "kernels.attention: auto takes cuDNN where above 1.01",
    ),
    "350m micro 16": Timed("gpt3-350m", _sizes(16, 64), "0.43-0.48"),
    "350m micro 32": Timed(
        "gpt3-350m", _sizes(32, 64), "x1.01", "350m micro 16", "micro batch of the preset"
    ),
    "1.3b micro 16": Timed(
        "gpt3-1.3b", _sizes(16, 32), "x1.01", "1.3b cudnn", "micro batch of the preset"
    ),
    "modern-1.3b": Timed("modern-1.3b", _sizes(8, 32), "0.48-0.53"),
    "llama-3.2-1b at 8k": Timed(
        "llama-3.2-1b", _sizes(2, 8, "model.sequence_length=8192"), "0.45-0.50"
    ),
    "2.7b": Timed("gpt3-2.7b", _sizes(4, 16), "0.50"),
    "1.3b dropout": Timed(
        "gpt3-1.3b",
        (*_sizes(8, 32), "model.dropout=0.1"),
        "x0.85",
        "1.3b cudnn",
        "presets stay without dropout where below 0.95",
    ),
    "wide bf16": Timed("gpt3-6.7b", _sizes(4, 16, *_WIDE), "0.55"),
    "wide fp8": Timed(
        "gpt3-6.7b",
        _sizes(4, 16, *_WIDE, "precision.kind=fp8", "precision.fp8.scaling=tensorwise"),
        "x1.25",
        "wide bf16",
        "aim: 1.2; tensorwise stays the default",
    ),
    "wide fp8_lowbit": Timed(
        "gpt3-6.7b",
        _sizes(4, 16, *_WIDE, "precision.kind=fp8_lowbit", "precision.fp8.scaling=tensorwise"),
        "x1.2",
        "wide bf16",
        "memory: 35 % less",
    ),
    "gpt ours": _peer("gpt3-1.3b", 8, "", "model.n_layers=8"),
    "gpt plain torch": _peer("gpt3-1.3b", 8, "plain-torch", "model.n_layers=8"),
    "gpt transformers": _peer("gpt3-1.3b", 8, "transformers", "model.n_layers=8"),
    "llama ours": _peer("llama-3.2-1b", 4, "", *_SMALLER_LLAMA),
    "llama transformers": _peer("llama-3.2-1b", 4, "transformers", *_SMALLER_LLAMA),
    "llama litgpt": _peer("llama-3.2-1b", 4, "litgpt", *_SMALLER_LLAMA),
    "350m muon": Timed(
        "gpt3-350m",
        (*_sizes(16, 64), "optimizer.kind=muon"),
        "x0.95",
        "350m micro 16",
        "price of Muon's step in plan",
    ),
    "350m documents": Timed(
        "gpt3-350m",
        (*_sizes(16, 64), "model.attention_within_documents=true"),
        "x0.95",
        "350m micro 16",
        "price of documents",
    ),
    "125m": Timed("gpt3-125m", _sizes(8, 64), "0.30"),
    "modern-1.3b pairs": Timed(
        "modern-1.3b",
        _sizes(8, 32, "kernels.swiglu_halves=false"),
        "x0.98",
        "modern-1.3b",
        "kernels.swiglu_halves: true where below 0.99",
    ),
    "1.3b reduced precision": Timed(
        "gpt3-1.3b",
        _sizes(8, 32, _CUDNN, "kernels.reduced_precision=true"),
        "x1.01",
        "1.3b cudnn",
        _FASTER.format("reduced_precision"),
    ),
}


def load(name: str, *, is_small: bool, tokens: Path | None = None) -> Run:
    """Loads a run; small, it has `FAKE_BLOCKS` blocks, but for those beside peers.

    Peers compile all blocks as one graph, which the packed cache should hold.
    """
    timed = RUNS[name]
    overrides = [*timed.overrides, "train.batch_ramp=none"]
    if is_small and not name.startswith(BESIDE_PEERS):
        overrides.append(f"model.n_layers={FAKE_BLOCKS}")
    if tokens is not None:
        overrides += [f"data.blend.prefixes=['{tokens}']", "data.split=1,0,0"]
    run = load_run(timed.preset, overrides).run
    parallel = run.parallel.model_copy(update={"tensor": 1, "pipeline": 1, "context": 1})
    return run.model_copy(update={"parallel": parallel, "name": name.replace(" ", "-")})


def predict(name: str, run: Run, plan: Plan, packed: Path | None) -> Row:
    """Predicts speed and memory: by `plan` now, by the roofline when it was packed."""
    machine = find_machine(gpu=DEVICE)
    seconds = step_time(run, plan, machine).seconds
    peak = machine.device.peak_flops_per_second(run.precision.kind)
    tokens = run.train.global_batch_size * run.model.sequence_length / seconds
    found: Row = {
        "mfu_plan": model_flops_utilization(plan.model_flops_per_token, tokens, peak),
        "gib_plan": busiest_memory(run, plan).peak_bytes / 2**30,
    }
    if packed is not None and (packed / PREDICTIONS).exists():
        stored = json.loads((packed / PREDICTIONS).read_text(encoding="utf-8"))
        found |= {"mfu_roofline": stored[name]} if name in stored else {}
    return found


def measured(session: Session) -> Mapping[str, Row]:
    """Reads the rows of timed runs, by name; the last of each."""
    from benchmarks.gpu.supervisor import RESULTS, read_results

    rows = read_results(session.output / RESULTS)
    return {row["row"]: row for row in rows if "tokens_per_second" in row}


@contextmanager
def building(run: Run, folder: Path) -> Iterator[Any]:
    """Yields what builds trainings of a run on the device; afterwards its memory is free."""
    import torch
    from benchmarks.baseline_worker import import_builder

    from trainyard.bench.measure import Timeline, build_ours
    from trainyard.launch.environment import Process
    from trainyard.parallel.mesh import build_clock, build_mesh, choose_device

    device = choose_device(Process(), run)
    plan = resolve(run, 1)
    mesh, timeline = build_mesh(plan.topology, 0, device), Timeline(build_clock(device))
    torch.cuda.reset_peak_memory_stats()

    def build(baseline: str = "") -> Any:
        build_training = import_builder(baseline) if baseline else build_ours
        with weights_on(device):
            return build_training(folder, run, plan, mesh, timeline), timeline, mesh

    try:
        yield build
    finally:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def weights_on(device: torch.device) -> Iterator[None]:
    """Lets our model draw its weights on the device, in a second, within its block."""
    import torch

    from trainyard.architecture import parameters_of
    from trainyard.parallel import model as parallel_model
    from trainyard.simulate.fake_world import replaced

    def draw(model: Any, seed: int, *_: object) -> None:
        specs = parameters_of(model.layers)
        model.to_empty(device=device)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(specs[name].mean, specs[name].std)

    with replaced(parallel_model, "initialize", draw):
        yield


def time_run(session: Session, name: str, profiles: str = "") -> Iterator[Row]:
    """Times a run; gives speed and memory beside what was predicted, and a ratio."""
    from torch._dynamo.utils import counters

    from trainyard.bench.measure import measure
    from trainyard.bench.record import compute_figures
    from trainyard.parallel.mesh import device_name

    timed = RUNS[name]
    has_text = "documents" in name and session.packed is not None
    tokens = session.packed / (TOKENS + SUFFIX) if has_text and session.packed else None
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        run = prepare_run(load(name, is_small=session.fake, tokens=tokens), STEPS, folder)
        plan = resolve(run, 1)
        job = BenchJob(STEPS, has_breakdown=False, profiles=bool(profiles))
        counters["inductor"].clear()
        with building(run, folder) as build:
            training, timeline, mesh = build(timed.baseline)
            result = measure(training, job, timeline, mesh, folder)
            del training
        seconds = [max(each, 1e-9) for each in result["step_seconds"]]
        figures = compute_figures(run, plan, seconds, device_name(mesh.device))
        if profiles:
            yield from _take_apart(session, name, folder, result, seconds)
            return
    speed = figures["tokens_per_second_per_device"]
    row: Row = {
        "row": name,
        "found": figures["model_flops_utilization"] or 0.0,
        "unit": "MFU",
        "estimate": timed.estimate,
        "decides": timed.decides,
        **predict(name, run, plan, session.packed),
        "gib": result["peak_memory_bytes"] / 2**30,
        "tokens_per_second": speed,
        "step_ms": figures["milliseconds_per_step"]["median"],
        "first_step_s": result["first_step_seconds"],
        "loss": result["last_loss"],
        "cached_graphs": counters["inductor"]["fxgraph_cache_hit"],
        "compiled_graphs": counters["inductor"]["fxgraph_cache_miss"],
    }
    base = measured(session).get(timed.against)
    if base is not None:
        row["times " + timed.against] = speed / base["tokens_per_second"]
    yield session.judge(row, is_right=0 < result["last_loss"] < 20)


def _take_apart(
    session: Session, name: str, folder: Path, result: Row, seconds: list[float]
) -> Iterator[Row]:
    from benchmarks.gpu.kernels import add_up, read_kernels

    from trainyard.bench.job import TRACE

    told = add_up(read_kernels(folder / TRACE), 1000 * statistics.median(seconds))
    for group, milliseconds in sorted(told["milliseconds_per_step"].items(), key=lambda i: -i[1]):
        share = told["shares"][group]
        yield {"row": f"{name}: {group}", "found": milliseconds, "unit": "ms", "share": share}
    for each in told["top"][:12]:
        kernel = {"row": f"{name}: {each['group']}", "found": each["ms_per_step"], "unit": "ms"}
        yield kernel | {"kernel": each["name"][:120]}
    waits = sum(result["profile"]["host_waits_per_step"].values())
    yield {"row": f"{name}: waits of the host", "found": waits, "unit": "a step", "estimate": 0}
