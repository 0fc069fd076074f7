"""The formulas of memory against the simulated step, of many layouts and of all recipes.

The peaks of simulations are in the record of benchmarks/planned_memory.py; some are simulated here
again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.circles import everyday

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.planning.memory import ITEMS, busiest_memory, rank_memory
from trainyard.simulate.simulation import simulate

ROOT = Path(__file__).parents[2]
RECORD = sorted((ROOT / "benchmarks" / "records").glob("*-planned-memory.json"))[-1]
ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text())["formulas"]
BASE = """train.compile=never train.micro_batch_size=1 train.global_batch_size=8 model.dropout=0.0
    precision.kind=bf16 parallel.zero_stage=0"""
SMALL = """model.n_layers=4 model.d_model=256 model.n_heads=4 model.d_ff=1024
    model.sequence_length=512 model.vocabulary_size=8000"""


def load(source: str, changes: str) -> Run:
    # Simulations do not compile; tests/fake_cuda/test_memory.py has blocks that are compiled.
    words = ["train.compile=never"]
    words += [word if "." in word else f"parallel.{word}" for word in changes.split()]
    if source == "tiny":
        return load_run("tiny", [*BASE.split(), *SMALL.split(), *words]).run
    return load_run(str(ROOT / source), words).run


def planned(run: Run, n_ranks: int, pipeline_rank: int, *, on_gpu: bool = True) -> int:
    memory = rank_memory(run, resolve(run, n_ranks), pipeline_rank, on_gpu)
    return memory.peak_bytes - memory.items["context and libraries"]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['source']} {row['changes']} on {row['n_ranks']}, {row['pipeline_rank']}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_within_ten_per_cent_of_the_simulation_and_never_below(row: dict[str, Any]) -> None:
    found = planned(load(row["source"], row["changes"]), row["n_ranks"], row["pipeline_rank"])
    assert 0 <= found / row["simulated_bytes"] - 1 <= 0.10


def test_the_record_is_of_many_layouts_and_all_recipes() -> None:
    assert len({(row["source"], row["n_ranks"], row["changes"]) for row in ROWS}) >= 40
    # Those whose precision can be simulated.
    recipes = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "recipes").glob("*/*.toml")
        if "fp8" not in path.name
    }
    assert recipes - {row["source"] for row in ROWS} <= {
        "recipes/benchmark64/tgs.toml",  # as full.toml but for its length
        "recipes/laptop/wikipedia.toml",  # as gpt-10m.toml but for its vocabulary
    }


# Simulating every recipe takes 20 minutes; `benchmarks/planned_memory.py` does it.
SIMULATED = {"recipes/azure/1.3b.toml", "recipes/lumi/125m.toml", "recipes/msamp/345m-bf16.toml"}
AGAIN = [
    row
    for row in ROWS
    if row["source"] == "tiny" or (row["source"] in SIMULATED and row["pipeline_rank"] == 0)
]
EVERY_DAY = [r for r in ROWS if r["changes"].startswith("zero_stage=1 ") and r["n_ranks"] == 2]


@pytest.mark.parametrize("row", everyday(AGAIN, EVERY_DAY), ids=name_of)
def test_simulations_are_still_those_of_the_record(row: dict[str, Any]) -> None:
    run, n_ranks = load(row["source"], row["changes"]), row["n_ranks"]
    rank = row["pipeline_rank"] * n_ranks // run.parallel.pipeline
    found = simulate(run, n_ranks, rank).peak_bytes
    assert found == pytest.approx(row["simulated_bytes"], rel=0.01)
    assert 0 <= planned(run, n_ranks, row["pipeline_rank"]) / found - 1 <= 0.10


MODERN = """model.positions=rotary model.norm=rms model.mlp=swiglu model.bias=false
    model.query_key_norm=head model.n_heads=8 model.n_key_value_heads=2 model.d_head=48"""
OLMO = f"{MODERN} model.query_key_norm=all model.norm_place=after"
DOCUMENTS = "model.attention_within_documents=true"
EXPERTS = """model.mlp=swiglu model.bias=false model.norm=rms model.n_experts=8
    model.n_active_experts=2 model.d_expert=512"""
DEEPSEEK = f"""{EXPERTS} model.n_shared_experts=1 model.n_dense_blocks=1 model.router=sigmoid
    model.balance=bias"""
PARTS = {
    "experts": (EXPERTS, 1),
    "experts, fp32": (f"{EXPERTS} precision.kind=fp32", 1),
    "experts, recompute block": (f"{EXPERTS} recompute=block", 1),
    "experts, tensor, sequence": (f"{EXPERTS} tensor=2 sequence=true", 2),
    "experts, pipeline": (f"{EXPERTS} pipeline=2", 2),
    "experts, zero 3": (f"{EXPERTS} zero_stage=3", 2),
    "experts on two ranks": (f"{EXPERTS} expert=2 zero_stage=1", 2),
    "experts, muon": (f"{EXPERTS} optimizer.kind=muon", 1),
    "experts on two ranks, muon, tensor": (
        f"{EXPERTS} optimizer.kind=muon expert=2 zero_stage=1 tensor=2",
        4,
    ),
    "shared experts, dense first": (DEEPSEEK, 1),
    "shared experts, tensor": (f"{DEEPSEEK} tensor=2", 2),
    "shared experts on two ranks, zero 3": (f"{DEEPSEEK} expert=2 zero_stage=3", 4),
    "shared experts on two ranks, zero 3, recompute block": (
        f"{DEEPSEEK} expert=2 zero_stage=3 recompute=block",
        2,
    ),
    "shared experts on four ranks": (f"{DEEPSEEK} expert=4 recompute=attention", 4),
    "rotary": ("model.positions=rotary model.norm=rms", 1),
    "swiglu": ("model.mlp=swiglu model.n_heads=8 model.n_key_value_heads=2", 1),
    "query-key norm": ("model.query_key_norm=head", 1),
    "query-key norm of all heads, tensor": ("model.query_key_norm=all tensor=2", 2),
    "norm after, recompute attention": ("model.norm_place=after recompute=attention", 1),
    "norm after, tensor, sequence": ("model.norm_place=after tensor=2 sequence=true", 2),
    "olmo": (OLMO, 1),
    "olmo, recompute block": (f"{OLMO} recompute=block", 1),
    "modern": (MODERN, 1),
    "modern, fp32, pipeline": (f"{MODERN} precision.kind=fp32 pipeline=2", 2),
    "modern, tensor, sequence": (f"{MODERN} tensor=2 sequence=true", 2),
    "modern, tensor ranks share keys": (f"{MODERN} tensor=4 sequence=true", 4),
    "modern, half recomputed": (f"{MODERN} recompute=block parallel.recompute_share=0.5", 1),
    "modern, tensor, sequence, half recomputed": (
        f"{MODERN} tensor=2 sequence=true recompute=block parallel.recompute_share=0.5",
        2,
    ),
    "modern, ring, zero 3": (f"{MODERN} context=2 context_method=ring zero_stage=3", 4),
    "documents, fp32": (f"{DOCUMENTS} precision.kind=fp32 model.sequence_length=2048", 1),
    "documents, modern, pipeline": (f"{DOCUMENTS} {MODERN} precision.kind=fp32 pipeline=2", 2),
    "documents, modern, ulysses": (f"{DOCUMENTS} {MODERN} context=2", 2),
}


@pytest.mark.parametrize(
    "name", everyday(PARTS, ("modern, half recomputed", "experts on two ranks"))
)
def test_other_parts_than_those_of_gpt3(name: str) -> None:
    changes, n_ranks = PARTS[name]
    run = load("tiny", changes)
    found = simulate(run, n_ranks, 0).peak_bytes
    assert 0 <= planned(run, n_ranks, 0) / found - 1 <= 0.10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        *("", "model.dropout=0.1", "model.dropout=0.1 recompute=block", "zero_stage=3"),
        DOCUMENTS,
    ],
)
def test_a_cpu_differs_where_its_kernels_do(changes: str) -> None:
    run = load("tiny", changes)
    n_ranks = 2 if "zero" in changes else 1
    found = simulate(run, n_ranks, 0, on_gpu=False).peak_bytes
    assert 0 <= planned(run, n_ranks, 0, on_gpu=False) / found - 1 <= 0.10
    memory = rank_memory(run, resolve(run, n_ranks), 0, on_gpu=False)
    assert memory.items["context and libraries"] == 0


def test_states_of_one_rank_are_counted_by_hand() -> None:
    run = load("tiny", "precision.kind=fp32")
    plan = resolve(run, 1)
    memory = rank_memory(run, plan, 0)
    n = plan.n_parameters
    assert tuple(memory.items) == ITEMS
    assert memory.items["weights"] == 4 * n
    assert memory.items["optimizer"] == 8 * n
    assert memory.items["gradients"] == 4 * n
    assert memory.items["gathered weights"] == 0
    assert memory.peak_bytes == sum(memory.items.values())
    assert busiest_memory(run, plan).host_bytes == 12 * n, "of a save in the background"


def test_zero_shares_states_and_low_bits_shrink_them() -> None:
    run = load("tiny", "zero_stage=1 precision.kind=bf16")
    alone, shared = (rank_memory(run, resolve(run, n), 0).items for n in (1, 8))
    assert shared["weights"] == alone["weights"] / 8
    assert shared["optimizer"] == alone["optimizer"] / 8
    low = run.model_copy(
        update={"precision": run.precision.model_copy(update={"kind": "fp8_lowbit"})}
    )
    items = rank_memory(low, resolve(low, 8), 0).items
    # Vectors have a master weight besides one in bf16.
    matrices, vectors = 4 * 12 * 256**2 // 8, 4 * 13 * 256 // 8
    assert shared["weights"] - items["weights"] == 2 * (matrices + vectors)
    assert shared["optimizer"] - items["optimizer"] == matrices * (3 - 3 / 32) - 4 * vectors


def test_micro_batches_of_a_pipeline_share_one_cast_of_each_weight() -> None:
    run = load("tiny", "pipeline=2")
    plan = resolve(run, 2)
    of_a_block = 12 * 256**2 + 13 * 256
    for rank, (first, end) in enumerate(plan.stages):  # with two of them in flight, and with one
        items = rank_memory(run, plan, rank).items
        of_head = plan.padded_vocabulary_size * 256 if rank == 1 else 0
        assert items["gathered weights"] == 2 * (of_a_block * (end - first) + of_head)
