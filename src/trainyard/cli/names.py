"""Names of runs, presets, clusters and fields: found as every verb finds them, without torch.

The functions `complete_...` return what a shell may offer at the word being typed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from trainyard.errors import CheckpointError
from trainyard.extras import require

RUNS_FOLDER = Path("runs")


def run_names() -> list[str]:
    """Lists the runs in `runs`."""
    return sorted(file.parent.name for file in RUNS_FOLDER.glob("*/run.toml"))


def set_names() -> list[str]:
    """Lists the sets of runs in `runs`."""
    return sorted(file.parent.name for file in RUNS_FOLDER.glob("*/set.toml"))


def find_run(name: str | Path) -> Path:
    """Finds a run by its name in `runs`, or a run or checkpoint folder by its path.

    Raises:
        CheckpointError: there is none; the hint names the closest run.
    """
    for folder in (RUNS_FOLDER / name, Path(name)):
        if folder.is_dir():
            return folder
    close = difflib.get_close_matches(Path(name).name, run_names(), n=1, cutoff=0.5)
    raise CheckpointError(
        f"no folder {name}, and no run of that name in {RUNS_FOLDER}/",
        f"did you mean {close[0]}?" if close else "give a run folder, such as runs/my-run",
    )


def without_ending(name: str) -> str:
    """Returns the prefix of token files, without the extension of a file name."""
    for ending in (".bin", ".idx", ".json"):
        if name.endswith(ending) and not Path(f"{name}.idx").exists():
            return name.removesuffix(ending)
    return name


def holds_checkpoint(folder: Path) -> bool:
    """Returns whether `folder` is a checkpoint, intact or not, or a folder of a run with some."""
    is_step = (folder / "manifest.json").exists() or folder.name.startswith("step-")
    steps = ("step-*", "checkpoints/step-*")
    return is_step or any(any(folder.glob(pattern)) for pattern in steps)


def find_trained(name: str | Path) -> Path:
    """Finds a run or checkpoint folder, as `find_run`, that has weights.

    Raises:
        CheckpointError: there is none.
        MachineError: torch, which reads them, is not installed.
    """
    require("torch")
    folder = find_run(name)
    if not holds_checkpoint(folder):
        raise CheckpointError(
            f"no checkpoint in {folder}",
            "give a run that has trained, or one of the step-... folders in its checkpoints/",
        )
    return folder


def with_formula(overrides: list[str] | None, name: str | None) -> list[str]:
    """Returns the overrides, with `log.flop_formula` if it was asked for."""
    return [*(overrides or ()), *([] if name is None else [f"log.flop_formula={name}"])]


def complete_run(incomplete: str) -> list[str]:
    """Completes a run: its name, or the path of a folder."""
    return _starting(incomplete, run_names()) + _paths(incomplete, "")


def complete_run_or_set(incomplete: str) -> list[str]:
    """Completes a run, or the name of a set of runs."""
    return _starting(incomplete, set_names()) + complete_run(incomplete)


def complete_run_file(incomplete: str) -> list[str]:
    """Completes a run file, a preset or a run."""
    from trainyard.config.load import preset_names

    return _starting(incomplete, [*run_names(), *preset_names()]) + _paths(incomplete, ".toml")


def complete_cluster(incomplete: str) -> list[str]:
    """Completes a cluster: its name, or the path of a cluster file."""
    from trainyard.config.cluster import cluster_names

    return _starting(incomplete, cluster_names()) + _paths(incomplete, ".toml")


def complete_override(incomplete: str) -> list[str]:
    """Completes the field of an override."""
    from trainyard.config.load import all_fields

    return _starting(incomplete, [f"{field}=" for field in all_fields()])


def complete_device(incomplete: str) -> list[str]:
    """Completes the name of a device."""
    from trainyard.planning.clusters import NODES

    return _starting(incomplete, NODES)


def complete_shown(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes what `show` shows: a run or preset and its fields, a cluster, or an order."""
    given = [*(ctx.params.get("what") or []), "", ""]
    if given[0] == "cluster":
        return complete_cluster(incomplete)
    if given[1] or (given[0] and given[0] != "order"):
        return complete_override(incomplete)
    if given[0]:
        return complete_run_file(incomplete)
    return _starting(incomplete, ["cluster", "order"]) + complete_run_file(incomplete)


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, ending: str) -> list[str]:
    """Lists folders, with a slash, and files with the ending, that a path may go on to."""
    folder, _, start = incomplete.rpartition("/")
    base = f"{folder}/" if "/" in incomplete else ""
    try:
        found = sorted(Path(base or ".").iterdir())
    except OSError:
        return []
    found = [path for path in found if path.name.startswith(start) and path.name[0] != "."]
    return [f"{base}{path.name}/" for path in found if path.is_dir()] + [
        base + path.name for path in found if ending and path.name.endswith(ending)
    ]


CLUSTER = typer.Option(
    help="A cluster name, such as lumi, or your own cluster file: mine.toml.",
    autocompletion=complete_cluster,
)
RunFileOrSet = Annotated[
    str,
    typer.Argument(
        help="A run file (.toml), a preset name, or a run or a set of runs in runs/.",
        autocompletion=lambda incomplete: (
            _starting(incomplete, set_names()) + complete_run_file(incomplete)
        ),
    ),
]
RunFile = Annotated[
    str,
    typer.Argument(
        help="A run file (.toml), a preset name, or a run in runs/.",
        autocompletion=complete_run_file,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides: section.field=value ...", autocompletion=complete_override),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="A device name, such as h100-80g; with --cluster: in its nodes.",
        autocompletion=complete_device,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes on this machine. Default: one per GPU, or the ranks of the run's layout.",
    ),
]
Trained = Annotated[
    Path, typer.Argument(help="A run, its folder or a checkpoint.", autocompletion=complete_run)
]
FlopFormulaOption = Annotated[
    str | None,
    typer.Option(
        help="Show TFLOP/s by this formula too, with its share of the peak: megatron_deepspeed "
        "(what MS-AMP, LUMI and the 64-GPU benchmark print), megatron (ALCF's [LM]), "
        "deepspeed_2024 (ALCF's [DS]). MFU is always by megatron_causal."
    ),
]
