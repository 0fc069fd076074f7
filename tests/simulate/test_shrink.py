"""What a run is shrunk to, and which layouts it is tried in."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainyard.config.load import build_run, field_value, load_run
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.ranks import describe_layout
from trainyard.layout.resolve import resolve
from trainyard.simulate.layout_check import precisions_of
from trainyard.simulate.shrink import N_STEPS, cover_pairs, plan_layout_check
from trainyard.topology import AXES

RECIPES = Path(__file__).parents[2] / "recipes"


def load(source: str, *overrides: str) -> Run:
    return load_run(source, list(overrides)).run


@pytest.mark.parametrize("n_axes", range(6))
def test_layouts_cut_every_pair_of_axes_with_three_at_most(n_axes: int) -> None:
    for axes in itertools.combinations(AXES, n_axes):
        layouts = cover_pairs(axes)
        assert len(layouts) == {4: 3, 5: 4}.get(n_axes, 1)
        assert all(len(layout) <= 3 for layout in layouts)
        assert {axis for layout in layouts for axis in layout} == set(axes)
        for pair in itertools.combinations(axes, 2):
            assert any(set(pair) <= set(layout) for layout in layouts)


def test_experts_become_few_that_two_ranks_share() -> None:
    experts = """model.n_experts=96 model.n_active_experts=6 model.n_shared_experts=1
        model.n_dense_blocks=2 model.n_expert_groups=6 model.n_active_groups=3 model.bias=false
        parallel.expert=12 parallel.pipeline=2 train.micro_batch_size=1
        train.global_batch_size=96 train.batch_ramp=none model.n_layers=8"""
    run = load("gpt3-125m", *experts.split())
    check = plan_layout_check(run, 48)
    (layout,) = check.layouts
    model = layout.model
    assert check.topologies[0].expert == 2 and check.topologies[0].pipeline == 2
    assert (model.n_experts, model.n_active_experts, model.n_dense_blocks) == (8, 2, 1)
    assert (model.n_expert_groups, model.n_active_groups, model.n_shared_experts) == (4, 2, 1)
    assert precisions_of(run) == ["fp64"]


def test_a_thousand_ranks_become_eight() -> None:
    run = load(str(RECIPES / "azure" / "175b.toml"))
    check = plan_layout_check(run, 1024)
    assert (check.topology.n_ranks, check.n_ranks) == (1024, 8)
    (layout,) = check.layouts
    (topology,) = check.topologies
    assert (topology.pipeline, topology.shard, topology.tensor) == (2, 2, 2)
    assert layout.parallel.sequence
    assert (layout.parallel.zero_stage, layout.parallel.schedule) == (1, "1f1b")
    assert layout.model.dropout == run.model.dropout == 0.1
    assert layout.model.n_layers == 4
    assert check.alone.parallel.pipeline == check.alone.parallel.tensor == 1
    assert check.alone.model == layout.model
    assert "n_layers 96 -> 4" in check.changes["model"]
    assert "epsilon 1e-08 -> 0.001" in check.changes["optimizer"]


KEPT = {
    "model.tied_embeddings": False,
    "model.dropout": 0.3,
    "model.attention_within_documents": True,
    "optimizer.betas": (0.8, 0.9),
    "optimizer.weight_decay": 0.3,
    "optimizer.clip_norm": math.inf,
    "schedule.kind": "warmup_stable_decay",
    "parallel.recompute": "block",
    "train.z_loss": 1e-3,
}


def test_what_the_mathematics_depends_on_stays() -> None:
    run = change(load("tiny", "schedule.cooldown=5 steps"), KEPT)
    small = plan_layout_check(run).layouts[0]
    assert {field: field_value(small, field) for field in KEPT} == KEPT
    assert (small.model.vocabulary_size, small.model.end_of_document_id) == (10, 3)


@pytest.mark.parametrize(
    ("changes", "n_ranks", "expected"),
    [
        ("", None, (1, 2)),  # without a number of ranks, one to share weights with
        ("", 1, (1, 1)),
        ("parallel.zero_stage=0", None, (1, 1)),
        ("parallel.zero_stage=0", 2, (1, 2)),
        ("parallel.data_replicate=4", 16, (2, 2)),
        ("parallel.data_replicate=4", 4, (2, 1)),
    ],
)
def test_axes_are_those_of_the_ranks_there_are(
    changes: str, n_ranks: int | None, expected: tuple[int, int]
) -> None:
    topology = plan_layout_check(load("mds-125m", *changes.split()), n_ranks).topologies[0]
    assert (topology.replicate, topology.shard) == expected


@pytest.mark.parametrize(
    ("n_layers", "pipeline", "chunks", "expected"),
    [
        *((24, 1, 1, 2), (1, 1, 1, 1), (24, 4, 1, 4), (10, 4, 1, 3), (3, 2, 1, 3)),
        *((24, 4, 3, 4), (25, 4, 3, 5), (8, 4, 1, 4), (4, 2, 2, 4), (6, 4, 1, 3)),
    ],
)
def test_stages_are_as_uneven_as_those_of_the_run(
    n_layers: int, pipeline: int, chunks: int, expected: int
) -> None:
    wide = ("model.d_model=8192", "model.n_heads=8", "model.d_ff=32768")  # beside such blocks the
    shape = (f"model.n_layers={n_layers}", f"parallel.pipeline={pipeline}")  # head weighs little
    schedule = f"parallel.schedule={'interleaved' if chunks > 1 else '1f1b'}"
    run = load("mds-125m", *wide, *shape, schedule, f"parallel.chunks={chunks}")
    check = plan_layout_check(run)
    assert check.alone.model.n_layers == expected
    sizes = {end - start for start, end in resolve(run).stages}
    small = resolve(check.layouts[0], check.n_ranks).stages
    assert len({end - start for start, end in small}) == min(2, len(sizes))


def test_a_growing_batch_grows() -> None:
    run = load(str(RECIPES / "benchmark64" / "full.toml"))
    check = plan_layout_check(run)
    for small in (check.alone, *check.layouts):
        batches = BatchSchedule(small)
        assert [batches.batch_size(step) for step in range(N_STEPS)] == [2, 2, 4]
    assert "batch_ramp.start 16 -> 2" in check.changes["train"]


def test_several_layouts_for_more_axes() -> None:
    axes = ("pipeline=2", "tensor=4", "context=3", "data_replicate=2", "recompute=attention")
    run = load("mds-125m", *(f"parallel.{axis}" for axis in axes), "model.sequence_length=2304")
    check = plan_layout_check(run, 96)
    texts = [
        describe_layout(small, topology)
        for small, topology in zip(check.layouts, check.topologies, strict=True)
    ]
    assert texts == [
        "pipeline 2 (1f1b) x replicas 2 x data 2 (ZeRO 1), recompute attention",
        "pipeline 2 (1f1b) x replicas 2 x context 2 (ulysses), recompute attention",
        "pipeline 2 (1f1b) x replicas 2 x tensor 2, recompute attention",
        "data 2 (ZeRO 1) x context 2 (ulysses) x tensor 2, recompute attention",
    ]


def test_ranks_that_share_keys_and_blocks_that_do_not_recompute_stay() -> None:
    words = ("tensor=16", "recompute=block", "recompute_share=0.5")
    run = load_run("llama-3.1-8b", [f"parallel.{word}" for word in words]).run
    (small,) = plan_layout_check(run, 16).layouts
    assert small.parallel.tensor > small.model.n_key_value_heads
    assert small.parallel.recompute_share == 0.5


@pytest.mark.exhaustive
def test_every_run_that_can_be_can_be_tried() -> None:
    space = {
        "pipeline": (1, 2, 4),
        "chunks": (1, 2, 3),
        "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble"),
        "context": (1, 2),
        "context_method": ("ulysses", "ring"),
        "tensor": (1, 4),
        "sequence": (False, True),
        "zero_stage": (0, 1, 2, 3),
        "data_replicate": (1, 2, 3),
    }
    whole = load("mds-125m", "model.dropout=0.0", "train.compile=never").model_dump()
    whole["train"].pop("batch_ramp")
    ramp = {"batch_ramp": {"start": 4, "increment": 4, "length": "100 sequences"}}
    chance = random.Random(1)
    n_tried = 0
    for _ in range(2000):
        batch = {"global_batch_size": chance.choice([8, 12, 16, 24, 36])}
        batch |= {"micro_batch_size": chance.choice([1, 2, 4])} | chance.choice([{}, ramp])
        values = {
            "model": whole["model"] | {"n_layers": chance.choice([12, 13, 16])},
            "train": whole["train"] | batch,
            "parallel": {name: chance.choice(choices) for name, choices in space.items()},
        }
        n_ranks = chance.choice([None, 16, 32, 48])
        try:
            run = build_run(whole | values)
            plan = resolve(run, n_ranks)
        except (ValidationError, ConfigError):
            continue
        check = plan_layout_check(run, n_ranks)
        assert check.topology == plan.topology
        sizes = [topology.n_ranks for topology in check.topologies]
        rings = [3, 4] if run.parallel.context > 1 and run.parallel.context_method == "ring" else []
        assert sizes[len(sizes) - len(rings) :] == rings
        assert set(sizes[: len(sizes) - len(rings)]) == {check.n_ranks}
        few = min(2, run.train.micro_batch_size)
        assert all(small.train.micro_batch_size == few for small in check.layouts)
        n_tried += 1
    assert n_tried > 100


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-0.6b", "smollm2-135m"])
def test_parts_stay_and_shared_keys_can_be_sharded(preset: str) -> None:
    n_tensor = math.gcd(12, load_run(preset).run.model.n_key_value_heads)
    run = load_run(preset, [f"parallel.tensor={n_tensor}", "precision.kind=fp8_lowbit"]).run
    small = plan_layout_check(run, 4 * n_tensor).alone.model
    for part in ("positions", "rotary_base", "norm", "norm_place", "mlp", "query_key_norm", "bias"):
        assert getattr(small, part) == getattr(run.model, part), part
    assert small.n_heads == 2 * small.n_key_value_heads
    is_wide = run.model.n_heads * run.model.d_head != run.model.d_model
    assert (small.n_heads * small.d_head != small.d_model) == is_wide
