"""Every run file of recipes/ planned, searched and simulated, on the machine of its guide.

`python -m benchmarks.pages` collects the record and writes docs/guides-planned.md of it.

For each job the command line, in processes of their own: `trainyard plan --json`, `--search`, and
`--simulate` of the rank in the middle of the pipeline, or of all ranks. Jobs whose step is the same
are simulated once. A command that takes longer than the limit is ended, and the record says so.

What failed is tried again, and the record is written after each answer. No GPU is needed. As many
jobs at once as there are cores, two at most: ten minutes on two.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import TRAINYARD, Budget, Figures, run_python
from benchmarks.measuring import describe_machine, render

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.ranks import describe_layout
from trainyard.layout.resolve import resolve

RECIPES = Path(__file__).parent.parent / "recipes"
GIB = 2**30
MOST_AT_ONCE = 2
LIMIT_SECONDS = 900.0
"""Of each command."""
PARTS = ("plan", "search", "simulation")


@dataclass(frozen=True)
class Guide:
    """The jobs of a guide, and what they run on."""

    title: str
    why: str
    """Where machine and numbers of devices come from."""
    machine: tuple[str, str]
    """As an option of `trainyard plan`."""
    jobs: Mapping[str, int]
    """Devices by run file, without its ending."""


GUIDES = (
    Guide(
        "MS-AMP",
        "One node of 8 H100, as in the guide's scripts; 345M with DeepSpeed runs a single process.",
        ("--cluster", "azure-ndv5"),
        {
            "msamp/345m-bf16": 8,
            "msamp/345m-fp8": 8,
            "msamp/345m-fp8-lowbit": 8,
            "msamp/345m-deepspeed-fp16": 1,
            "msamp/345m-deepspeed-fp8-lowbit": 1,
            "msamp/6.7b-bf16": 8,
            "msamp/6.7b-fp8": 8,
            "msamp/6.7b-fp8-lowbit": 8,
            "msamp/13b-bf16": 8,
            "msamp/13b-fp8": 8,
            "msamp/13b-fp8-lowbit": 8,
            "msamp/13b-deepspeed-bf16": 8,
            "msamp/13b-deepspeed-fp8-lowbit": 8,
        },
    ),
    Guide(
        "ALCF Polaris",
        "Nodes of 4 A100 40GB, the fewest the layout needs; the guide gives no number.",
        ("--cluster", "polaris"),
        {"polaris/gpt13b": 8, "polaris/gpt25b": 16},
    ),
    Guide(
        "Azure CycleCloud Slurm",
        "Nodes of 8 H100: 128 for 175B, one to eight for the smaller checks.",
        ("--cluster", "azure-ndv5"),
        {
            "azure/175b": 1024,
            "azure/30b": 64,
            "azure/13b": 32,
            "azure/1.3b": 16,
            "azure/356m": 8,
            "azure/64m": 8,
            "azure/125m": 8,
        },
    ),
    Guide(
        "LUMI",
        "Two nodes, 16 devices of 64 GB; 64 nodes for 175B, which has no job in the guide.",
        ("--cluster", "lumi"),
        {"lumi/175b": 512, "lumi/13b": 16, "lumi/125m": 16},
    ),
    Guide(
        "The benchmark on 64 GPUs",
        "The guide does not name the GPUs; its times match A100 80GB.",
        ("--gpu", "a100-80g"),
        {"benchmark64/tgs": 64, "benchmark64/full": 64},
    ),
    Guide(
        "Laptop",
        "Not from a guide: runs on the local CPU.",
        ("--cluster", "local"),
        {"laptop/gpt-10m": 1, "laptop/wikipedia": 1},
    ),
)


@dataclass(frozen=True)
class Job:
    """A run file on a number of devices."""

    guide: Guide
    name: str
    n_devices: int

    @property
    def arguments(self) -> list[str]:
        return [f"recipes/{self.name}.toml", *self.guide.machine, "--gpus", str(self.n_devices)]

    def load(self) -> Run:
        return load_run(str(RECIPES / f"{self.name}.toml")).run

    @property
    def step(self) -> str:
        """Equal where steps are."""
        run = self.load()
        sizes = {"micro_batch_size", "global_batch_size", "compile"}
        parts = (
            run.model.model_dump_json(),
            run.parallel.model_dump_json(),
            run.precision.model_dump_json(),
            run.train.model_dump_json(include=sizes),
        )
        return " ".join((*parts, str(self.n_devices)))

    @property
    def middle_rank(self) -> int:
        """In the middle of the pipeline, or of all."""
        n_places = resolve(self.load(), self.n_devices).topology.pipeline
        return self.n_devices // 2 if n_places == 1 else n_places // 2 * self.n_devices // n_places


def list_jobs(only: str = "") -> list[Job]:
    jobs = [Job(guide, name, n) for guide in GUIDES for name, n in guide.jobs.items()]
    return [job for job in jobs if only in job.name]


def ask(job: Job, options: list[str], limit_seconds: float) -> Figures:
    """Runs `trainyard plan` from the root; "answer" is its JSON, or "failed" what it said."""
    start = time.monotonic()
    words = ["plan", *job.arguments, *options, "--json"]
    words[1] = str(RECIPES.parent / words[1])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    code, output, errors = run_python(
        [*TRAINYARD, *words], Budget(start + limit_seconds), environment
    )
    seconds = round(time.monotonic() - start, 1)
    found: Figures = {"options": options, "wall_seconds": seconds, "exit_code": code}
    if output.lstrip().startswith("{") and code in (0, 2):
        return found | {"answer": json.loads(output)}
    return found | {"failed": errors or f"ended after {limit_seconds:.0f} s"}


def begin_row(job: Job) -> Figures:
    """Says what a job is, before anything is known of it."""
    return {
        "recipe": job.name,
        "command": " ".join(["trainyard", "plan", *job.arguments]),
        "layout": describe_run(job.load(), job.n_devices),
    }


def examine(job: Job, part: str, limit_seconds: float) -> Figures:
    """Asks for one of `PARTS`; keeps the main figures."""
    if part == "plan":
        return _main_figures(ask(job, [], limit_seconds), _of_plan)
    if part == "search":
        return _main_figures(ask(job, ["--search"], limit_seconds), _of_search)
    options = ["--simulate", "--rank", str(job.middle_rank)]
    return _main_figures(ask(job, options, limit_seconds), _of_simulation)


def describe_run(run: Run, n_devices: int) -> str:
    layout = describe_layout(run, resolve(run, n_devices).topology)
    return f"{layout}, micro batch {run.train.micro_batch_size}"


def _main_figures(found: Figures, choose: Any) -> Figures:
    answer = found.pop("answer", None)
    return found if answer is None else found | choose(answer)


def _of_plan(answer: Figures) -> Figures:
    step = answer["step"]
    return {
        "n_parameters": answer["plan"]["n_parameters"],
        "fits": answer["fits"],
        "peak_bytes_by_pipeline_rank": [each["peak_bytes"] for each in answer["memory"]],
        "usable_bytes": answer["usable_bytes"],
        "milliseconds_per_step": round(1000 * step["seconds"], 3),
        "tokens_per_second_per_device": round(step["tokens_per_second_per_device"], 1),
        "tflops_per_second_per_device": round(step["tflops_per_second_per_device"], 1),
        "model_flops_utilization": step["model_flops_utilization"],
        "cheapest_change": next((each["change"] for each in answer.get("remedies", [])), None),
    }


def _of_search(answer: Figures) -> Figures:
    first, *others = answer["candidates"]
    return {
        "layout": first["layout"],
        "changes": first["changes"],
        "milliseconds_per_step": round(1000 * first["step"]["seconds"], 3),
        "peak_bytes": first["memory"]["peak_bytes"],
        "others": [{name: each[name] for name in ("layout", "why")} for each in others],
    }


def _of_simulation(answer: Figures) -> Figures:
    (rank,) = answer["ranks"]
    return {
        "rank": rank["rank"],
        "peak_bytes": rank["peak_bytes"],
        "planned_bytes": rank["planned_bytes"],
        "moment": rank["moment"],
        "flop": sum(rank["flops"].values()),
        "message_bytes": sum(each["n_bytes"] for each in rank["messages"]),
        "n_micro_batches": rank["n_micro_batches"],
        "differences": rank["differences"],
        "seconds": round(rank["seconds"], 1),
    }


def of_steps(jobs: list[Job]) -> dict[str, Job]:
    """Gives the first job of each step."""
    return {job.step: job for job in reversed(jobs)}


def list_missing(jobs: list[Job], rows: Mapping[str, Figures]) -> list[tuple[Job, str]]:
    """Lists what is still to be asked: plans of all jobs first, and steps that differ once."""
    wanted = [(job, part) for part in PARTS[:2] for job in jobs]
    wanted += [(job, PARTS[2]) for job in of_steps(jobs).values()]
    return [(job, part) for job, part in wanted if _is_missing(rows.get(job.name, {}).get(part))]


def _is_missing(found: Figures | None) -> bool:
    return found is None or "failed" in found


# ---- the page


def write_page(rows: Mapping[str, Figures], record_name: str, commit: str) -> str:
    """Lays the record out in Markdown."""
    lines = [
        "# Plans for the jobs of every guide",
        "",
        "Results of `trainyard plan`, `plan --search` and `plan --simulate` for every run file in "
        "`recipes/`, on the",
        "machine of its guide. Accuracy of the predictions: "
        "[planning-accuracy.md](planning-accuracy.md).",
        "",
        "    python -m benchmarks.pages",
        "",
        f"Record: `benchmarks/records/{record_name}`, commit {commit}.",
        "",
        "- **memory**: of the rank that needs most, out of the memory the driver leaves free.",
        "- **step**: in the recipe's layout; tokens/s per device.",
        "- **simulated**: peak of the real step on fake tensors, for the rank in the middle of the "
        "pipeline, and how far the",
        "  formula exceeds it. It excludes context and libraries, which **memory** includes, "
        "and is not compiled: compiled",
        "  blocks mostly need less.",
        "- **best**: the fastest layout that fits, and its gain. A layout that does "
        "not fit is not slower.",
    ]
    for guide in GUIDES:
        found = [rows[name] for name in guide.jobs if name in rows]
        if found:
            machine = " ".join(guide.machine)
            lines += ["", f"## {guide.title}", "", f"{guide.why} `{machine}`.", "", *_table(found)]
    return "\n".join(lines) + "\n"


def _table(rows: list[Figures]) -> Iterator[str]:
    yield ("| recipe, devices | layout | memory, GiB | step | tokens/s | simulated, GiB | best |")
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        n_devices = row["command"].rsplit(" ", 1)[1]
        plan = row["plan"]
        cells = [f"`{row['recipe']}`, {n_devices}", row["layout"]]
        if "failed" in plan:
            cells += [f"refused: {_first_line(plan)}", "", ""]
        else:
            cells += [
                _memory(plan),
                format_step(plan["milliseconds_per_step"]),
                f"{plan['tokens_per_second_per_device']:,.0f}",
            ]
        yield f"| {' | '.join([*cells, _simulated(row), _best(row)])} |"


def _memory(plan: Figures) -> str:
    text = f"{max(plan['peak_bytes_by_pipeline_rank']) / GIB:.1f}"
    if plan["usable_bytes"] is not None:
        text += f" of {plan['usable_bytes'] / GIB:.1f}"
    if plan["fits"]:
        return text
    change = plan["cheapest_change"]
    return f"**{text}: does not fit**; would with {change}" if change else f"**{text}**"


def _simulated(row: Figures) -> str:
    found = row.get("simulation")
    if found is None:
        first = {job.name for job in of_steps(list_jobs()).values()}
        return "not done" if row["recipe"] in first else "step as above"
    if "failed" in found:
        return f"not done: {_first_line(found)}"
    above = found["planned_bytes"] / found["peak_bytes"] - 1
    return (
        f"rank {found['rank']}: {found['peak_bytes'] / GIB:.1f}, {above:+.1%} "
        f"(in {found['seconds']:.0f} s)"
    )


def _best(row: Figures) -> str:
    found, plan = row["search"], row["plan"]
    if "failed" in found:
        return f"none: {_first_line(found)}"
    if not found["changes"]:
        return "as it is"
    text = f"{format_step(found['milliseconds_per_step'])}: {found['layout']}"
    if "failed" in plan:
        return text
    faster = plan["milliseconds_per_step"] / found["milliseconds_per_step"] - 1
    return f"{text}; {faster:+.0%}" if plan["fits"] else f"{text}; fits"


def format_step(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def _first_line(part: Figures) -> str:
    return str(part["failed"]).splitlines()[0][:160]


def collect(output: Path, anew: str, only: str = "") -> None:
    """Asks for what a record lacks.

    Args:
        output: the record.
        anew: `PARTS` to ask for again, comma-separated.
        only: jobs with this in their name.
    """
    jobs = list_jobs(only)
    before = json.loads(output.read_text()) if output.exists() else {}
    known = {job.name for job in list_jobs()}
    rows = {row["recipe"]: row for row in before.get("jobs", []) if row["recipe"] in known}
    for job in jobs:
        row = rows.setdefault(job.name, {}) | begin_row(job)
        kept = {part: row[part] for part in row.keys() & {*PARTS} - {*anew.split(",")}}
        rows[job.name] = {name: row[name] for name in row if name not in PARTS} | kept
    missing = list_missing(jobs, rows)
    if not missing:
        return
    record = describe_machine(["torch", "torchao"])
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        asked = {pool.submit(examine, *each, LIMIT_SECONDS): each for each in missing}
        for each in as_completed(asked):
            job, part = asked[each]
            found = rows[job.name][part] = each.result()
            output.write_text(render({**record, "jobs": list(rows.values())}))
            outcome = _first_line(found) if "failed" in found else "done"
            print(
                f"{job.name:<34} {part:<12}{found['wall_seconds']:>6.1f} s  {outcome}", flush=True
            )
