"""What `trainyard check layout` proves, proven for every recipe and every preset.

Many of them shrink to the same small run; that is trained once. The processes are forks of this
one, which is faster than starting them; tests/cli/test_check_layout.py starts them as a user does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Run
from trainyard.plan.rehearsal import Rehearsal, plan_rehearsal
from trainyard.train.parity import BOUNDS, Difference, Outcome, compare, train_three_steps
from trainyard.train.rehearsal import precisions_of

pytestmark = pytest.mark.exhaustive

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.toml"))
SOURCES = [str(path) for path in RECIPES] + preset_names()

Ranks = Callable[..., list[list[Outcome]]]


def short(source: str) -> str:
    return source.partition("/recipes/")[2] or source


def key_of(rehearsal: Rehearsal) -> str:
    runs = (rehearsal.alone, *rehearsal.layouts)
    return f"{rehearsal.n_ranks} {[run.model_dump_json() for run in runs]}"


def train_all(runs: Sequence[Run], n_ranks: int, precisions: Sequence[str]) -> list[Outcome]:
    rank = dist.get_rank()
    return [train_three_steps(run, rank, n_ranks, p) for p in precisions for run in runs]


def differences_of(
    run_ranks: Ranks, rehearsal: Rehearsal, precisions: Sequence[str]
) -> dict[str, list[Difference]]:
    """Maps precisions to how far each layout is from the single device."""
    (references,) = run_ranks(1, train_all, [rehearsal.alone], 1, precisions)
    ranks = run_ranks(
        rehearsal.n_ranks, train_all, rehearsal.layouts, rehearsal.n_ranks, precisions
    )
    by_layout = [list(outcomes) for outcomes in zip(*ranks, strict=True)]
    n = len(rehearsal.layouts)
    return {
        precision: [
            compare(references[index], outcomes)
            for outcomes in by_layout[index * n : (index + 1) * n]
        ]
        for index, precision in enumerate(precisions)
    }


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[str]]:
    """All precisions in which a small run is wanted, by whatever shrinks to it."""
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        run = load_run(source).run
        kinds = found.setdefault(key_of(plan_rehearsal(run)), [])
        kinds += [kind for kind in precisions_of(run) if kind not in kinds]
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, list[Difference]]]:
    return {}


@pytest.mark.parametrize("source", SOURCES, ids=short)
def test_every_recipe_and_preset_computes_what_one_device_computes(
    source: str,
    run_ranks: Ranks,
    wanted: dict[str, list[str]],
    known: dict[str, dict[str, list[Difference]]],
    record_property: Callable[[str, object], None],
) -> None:
    run = load_run(source).run
    rehearsal = plan_rehearsal(run)
    key = key_of(rehearsal)
    if key not in known:
        known[key] = differences_of(run_ranks, rehearsal, wanted[key])
        for precision, differences in known[key].items():
            record_property("difference", f"{differences[0]}  {precision}")
    for precision in precisions_of(run):
        for difference in known[key][precision]:
            assert difference.is_within(BOUNDS[precision]), (precision, difference)


FIVE_AXES = ["parallel.pipeline=2", "parallel.tensor=2", "parallel.context=2", "model.dropout=0.1"]


@pytest.mark.parametrize(
    ("overrides", "n_ranks", "n_layouts"),
    [
        ([*FIVE_AXES, "parallel.replicas=2", "parallel.sequence=true"], 32, 4),
        (["parallel.replicas=4"], 4, 1),  # nothing is shared: each rank is a replica
        (
            [
                "parallel.schedule=interleaved",
                "parallel.pipeline=4",
                "parallel.chunks=3",
                "parallel.context=4",
                "parallel.context_method=ring",
                "model.dropout=0.0",
            ],
            64,
            1,
        ),
    ],
    ids=["five axes", "replicas alone", "interleaved ring"],
)
def test_layouts_that_no_recipe_has(
    overrides: list[str], n_ranks: int, n_layouts: int, run_ranks: Ranks
) -> None:
    rehearsal = plan_rehearsal(load_run("mds-125m", overrides).run, n_ranks)
    assert len(rehearsal.layouts) == n_layouts
    differences = differences_of(run_ranks, rehearsal, ["fp64"])["fp64"]
    assert len(differences) == n_layouts
    for layout, difference in zip(rehearsal.layouts, differences, strict=True):
        assert difference.is_within(BOUNDS["fp64"]), (layout.parallel, difference)
