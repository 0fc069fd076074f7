"""The headers of job scripts in `jobs/`, for each cluster and every kind of start.

    python -m tests.golden.render_jobs      writes them anew; look at what differs before a commit

The rest of a script is `src/trainyard/jobs/lib`. Recipes of one cluster differ in their names and
numbers; one of them is there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from trainyard.api.launching import Request, plan_jobs
from trainyard.api.sweeping import plan_array
from trainyard.jobs.job import Job
from trainyard.jobs.script import render_header
from trainyard.sweeps.sets import build_set

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "jobs"
PROJECT = Path("/project/me")
PYTHON = "/project/me/.venv/bin/python"

LUMI = {"account": "project_465000001", "image": "/project/me/trainyard.sif"}
AZURE = {"image": "/project/me/trainyard.sqsh"}
POLARIS = {"account": "MyProject"}

# Of a recipe: cluster, nodes, ranks of a node where they are not all, options.
RECIPES: dict[str, tuple[str, int, int | None, dict[str, str]]] = {
    "msamp/345m-bf16": ("azure-ndv5", 1, None, AZURE),
    "msamp/345m-fp8": ("azure-ndv5", 1, None, AZURE),
    "msamp/345m-fp8-lowbit": ("azure-ndv5", 1, None, AZURE),
    "msamp/345m-deepspeed-fp16": ("azure-ndv5", 1, 1, AZURE),
    "msamp/345m-deepspeed-fp8-lowbit": ("azure-ndv5", 1, 1, AZURE),
    "msamp/6.7b-bf16": ("azure-ndv5", 4, None, AZURE),
    "msamp/6.7b-fp8": ("azure-ndv5", 4, None, AZURE),
    "msamp/6.7b-fp8-lowbit": ("azure-ndv5", 4, None, AZURE),
    "msamp/13b-bf16": ("azure-ndv5", 4, None, AZURE),
    "msamp/13b-fp8": ("azure-ndv5", 4, None, AZURE),
    "msamp/13b-fp8-lowbit": ("azure-ndv5", 4, None, AZURE),
    "msamp/13b-deepspeed-bf16": ("azure-ndv5", 4, None, AZURE),
    "msamp/13b-deepspeed-fp8-lowbit": ("azure-ndv5", 4, None, AZURE),
    "polaris/gpt13b": ("polaris", 16, None, POLARIS),
    "polaris/gpt25b": ("polaris", 16, None, POLARIS),
    "azure/125m": ("azure-ndv5", 2, None, AZURE),
    "azure/64m": ("azure-ndv5", 2, None, AZURE),
    "azure/356m": ("azure-ndv5", 2, None, AZURE),
    "azure/1.3b": ("azure-ndv5", 2, None, AZURE),
    "azure/13b": ("azure-ndv5", 4, None, AZURE),
    "azure/30b": ("azure-ndv5", 16, None, AZURE),
    "azure/175b": ("azure-ndv5", 128, None, AZURE),
    "lumi/125m": ("lumi", 2, None, LUMI),
    "lumi/13b": ("lumi", 2, None, LUMI),
    "lumi/175b": ("lumi", 64, None, LUMI),
    "benchmark64/full": ("azure-ndv5", 8, None, AZURE),
    "benchmark64/tgs": ("azure-ndv5", 8, None, AZURE),
    "laptop/gpt-10m": ("local", 1, None, {}),
    "laptop/wikipedia": ("local", 1, None, {}),
}
# The same run on every other cluster and by every other kind of start.
OTHERS: dict[str, tuple[str, int, int | None, dict[str, str]]] = {
    "perlmutter": ("perlmutter", 4, None, {"account": "m0000_g"}),
    "frontier": ("frontier", 2, None, {"account": "ABC123"}),
    "azure-ndv5-h200": ("azure-ndv5-h200", 2, None, AZURE),
    "slurm": ("slurm", 2, None, {}),
    "slurm-torchrun": ("tests/golden/clusters/torchrun.toml", 2, None, {}),
    "pbs": ("pbs", 2, None, {"time": "12:00:00"}),
    "mpi": ("mpi", 2, None, {"hosts": "n1,n2"}),
    "mpi-openmpi-apptainer": ("tests/golden/clusters/apptainer.toml", 2, None, {}),
    "ssh": ("ssh", 2, None, {"hosts": "me@n1,me@n2,me@n3"}),
}
# Download, prepare, train.
STAGES: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "msamp-345m-bf16": ("recipes/msamp/345m-bf16.toml", "azure-ndv5", 1, AZURE),
    "benchmark64-full": ("recipes/benchmark64/full.toml", "polaris", 16, POLARIS),
}


# Sets of runs: cluster, tasks of the array, options.
SETS: dict[str, tuple[str, int, dict[str, str]]] = {
    "slurm": ("slurm", 3, {"time": "02:00:00"}),
    "pbs": ("pbs", 2, {"time": "12:00:00"}),
    "lumi": ("lumi", 4, LUMI),
}

# Jobs with a golden file.
GOLDEN = (
    "laptop-wikipedia",
    "on-slurm",
    "msamp-345m-bf16",
    "msamp-345m-deepspeed-fp16",
    "lumi-125m",
    "on-perlmutter",
    "on-frontier",
    "on-slurm-torchrun",
    "on-pbs",
    "polaris-gpt25b",
    "on-mpi",
    "on-mpi-openmpi-apptainer",
    "on-ssh",
    "set-on-slurm",
    "set-on-pbs",
    "set-on-lumi",
    "all-msamp-345m-bf16.prepare-wikipedia",
    "all-benchmark64-full.download-openwebtext",
)


def requests() -> dict[str, Request]:
    """What is asked for, by the name of the golden file."""
    found = {}
    for recipe, (cluster, nodes, ranks, options) in RECIPES.items():
        run_file = f"recipes/{recipe}.toml"
        found[recipe.replace("/", "-")] = Request(
            run_file, (), cluster, nodes, ranks, options=options
        )
    for name, (cluster, nodes, ranks, options) in OTHERS.items():
        run_file = "recipes/lumi/125m.toml"
        found[f"on-{name}"] = Request(run_file, (), cluster, nodes, ranks, options=options)
    for name, (run_file, cluster, nodes, options) in STAGES.items():
        found[f"all-{name}"] = Request(run_file, (), cluster, nodes, None, "all", options)
    return found


def all_jobs() -> dict[str, Job]:
    """All jobs by name; recipes are named as from the folder of the project."""
    found = {}
    for name, request in requests().items():
        jobs = plan_jobs(request, PROJECT)[1]
        for stage, job in jobs.items():
            found[f"{name}.{stage}" if len(jobs) > 1 else name] = job
    values = ["optimizer.learning_rate=1e-3,2e-3,4e-3,8e-3"]
    run_set, runs = build_set("recipes/lumi/125m.toml", values, "rates")
    for name, (cluster, nodes, options) in SETS.items():
        request = Request("recipes/lumi/125m.toml", values, cluster, nodes, options=options)
        command = f"trainyard sweep recipes/lumi/125m.toml --cluster {cluster} --nodes {nodes}"
        job = plan_array(run_set, runs.values(), request, command, ["--stop-hopeless"])
        found[f"set-on-{name}"] = replace(job, folder=PROJECT / run_set.folder)
    return found


def golden_files(jobs: dict[str, Job]) -> dict[str, str]:
    """Contents of the golden files by their names."""
    found = {f"{name}.sh": render_header(jobs[name]) for name in GOLDEN}
    return {name: text.replace(sys.executable, PYTHON) for name, text in found.items()}


if __name__ == "__main__":
    os.chdir(ROOT)
    for path in FOLDER.iterdir():
        path.unlink()
    for name, text in golden_files(all_jobs()).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
