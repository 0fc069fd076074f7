"""Which layouts can be, against dealing everything out by hand; and the stages of a pipeline."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainyard.config import load
from trainyard.config.load import load_run
from trainyard.config.run import BatchRamp, Model, Parallel, Run, Train
from trainyard.errors import ConfigError
from trainyard.layout.ranks import Costs, balanced_stages
from trainyard.layout.resolve import resolve
from trainyard.topology import Topology
from trainyard.units import Length

# -- the oracle: deals heads, features, tokens, blocks, ranks and sequences out, one by one


class UnevenError(Exception):
    """Something does not come out even."""


def deal(things: Sequence[Any], n_hands: int) -> list[list[Any]]:
    hands: list[list[Any]] = [[] for _ in range(n_hands)]
    for index, thing in enumerate(things):
        hands[index % n_hands].append(thing)
    if not things or len({len(hand) for hand in hands}) > 1:
        raise UnevenError
    return hands


SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


@functools.cache
def torch_schedules(name: str, pipeline: int, chunks: int, n_micro_batches: int) -> bool:
    """Whether PyTorch's schedule, made for real stages of ranks that are not there, takes them."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    dist.init_process_group("fake", rank=0, world_size=pipeline, store=FakeStore())
    try:
        example = torch.empty(1, 2, device="meta", requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                torch.nn.Linear(2, 2),
                pipeline * chunk,
                pipeline * chunks,
                torch.device("cpu"),
                input_args=example,
                output_args=example,
            )
            for chunk in range(chunks)
        ]
        several = issubclass(SCHEDULES[name], pipelining.schedules.PipelineScheduleMulti)
        SCHEDULES[name](stages if several else stages[0], n_micro_batches, loss_fn=torch.sum)
    except ValueError:
        return False
    finally:
        dist.destroy_process_group()
    return True


def deal_out_model(values: dict[str, Any]) -> None:
    tensor, context = values["tensor"], values["context"]
    is_ring = values["context_method"] == "ring" and context > 1
    for heads in deal(range(values["n_heads"]), tensor):
        if not is_ring:
            deal(heads, context)
    deal(range(values["d_ff"]), tensor)
    tokens = range(values["sequence_length"])
    if is_ring:
        chunks = deal(tokens, 2 * context)
        shares = [chunks[rank] + chunks[-1 - rank] for rank in range(context)]
    else:
        shares = deal(tokens, context)
    for share in shares:
        if values["sequence"]:
            deal(share, tensor)
    if is_ring and values["dropout"] > 0:
        raise UnevenError


def deal_out_stages(values: dict[str, Any]) -> None:
    pipeline, chunks, schedule = values["pipeline"], values["chunks"], values["schedule"]
    blocks = list(range(values["n_layers"]))
    for _ in range(pipeline * chunks):
        if not blocks:
            raise UnevenError
        blocks.pop()
    if pipeline == 1:
        if chunks > 1:
            raise UnevenError
        return
    several_allowed = schedule not in ("gpipe", "1f1b")
    if (chunks > 1 and not several_allowed) or (chunks == 1 and schedule == "interleaved"):
        raise UnevenError
    if schedule == "zero_bubble" and values["zero_stage"] >= 2:
        raise UnevenError


def batches_of(values: dict[str, Any]) -> list[int]:
    size, increment = values["ramp"] or (values["global_batch_size"], 1)
    sizes = [size]
    while size < values["global_batch_size"]:
        size += increment
        sizes.append(size)
    if size != values["global_batch_size"]:
        raise UnevenError
    return sizes


def deal_out_ranks(values: dict[str, Any], n_ranks: int) -> None:
    replicas, pipeline = values["data_replicate"], values["pipeline"]
    together = values["tensor"] * pipeline * values["context"]
    data = deal(range(n_ranks), together)[0]
    if replicas > 1 and values["zero_stage"] == 0:
        raise UnevenError
    deal(data, replicas)
    for size in batches_of(values):
        for sequences in deal(range(size), len(data)):
            n_micro_batches = 0
            while sequences:
                if len(sequences) < values["micro_batch_size"]:
                    raise UnevenError
                del sequences[: values["micro_batch_size"]]
                n_micro_batches += 1
        schedule, chunks = values["schedule"], values["chunks"]
        if pipeline > 1 and not torch_schedules(schedule, pipeline, chunks, n_micro_batches):
            raise UnevenError


def oracle_allows(values: dict[str, Any]) -> bool:
    together = values["tensor"] * values["pipeline"] * values["context"]
    tried = [values["n_ranks"]]
    if values["n_ranks"] is None:
        tried = [together * data for data in range(1, values["global_batch_size"] + 1)]
    for n_ranks in tried:
        try:
            deal_out_model(values)
            deal_out_stages(values)
            deal_out_ranks(values, n_ranks)
        except UnevenError:
            continue
        return True
    return False


# -- random runs, most of whose fields are at rest


def mostly(rest: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([rest, rest, *others])


VALUES = st.fixed_dictionaries(
    {
        "n_layers": st.integers(1, 8),
        "n_heads": st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
        "d_ff": st.sampled_from([3, 4, 12, 16, 24]),
        "sequence_length": st.sampled_from([6, 8, 12, 16, 24]),
        "dropout": mostly(0.0, 0.1),
        "micro_batch_size": mostly(1, 2, 3),
        "global_batch_size": st.integers(1, 16),
        "ramp": mostly(None, (2, 2), (4, 4), (3, 1), (8, 2)),
        "compile": mostly("never", "gpu", "always"),
        "tensor": mostly(1, 2, 3, 4),
        "sequence": st.booleans(),
        "pipeline": mostly(1, 2, 3, 4),
        "chunks": mostly(1, 2, 3),
        "schedule": st.sampled_from(list(SCHEDULES)),
        "context": mostly(1, 2, 3, 4),
        "context_method": st.sampled_from(["ulysses", "ring"]),
        "zero_stage": st.integers(0, 3),
        "data_replicate": mostly(1, 2, 3),
        "recompute": mostly("none", "attention", "block"),
        "data": st.sampled_from([None, 1, 2, 3, 4, 6]),
        "odd_rank": mostly(0, 0, 0, 1),
    }
).map(lambda values: values | {"n_ranks": n_ranks_of(values)})


def n_ranks_of(values: dict[str, Any]) -> int | None:
    together = int(values["tensor"] * values["pipeline"] * values["context"])
    return values["data"] and together * values["data"] + values["odd_rank"]


def build_run(values: dict[str, Any]) -> Run:
    def section(kind: Any, **more: Any) -> Any:
        named = {name: values[name] for name in kind.model_fields if name in values}
        return kind(**named, **more)

    ramp = values["ramp"] and BatchRamp(
        start=values["ramp"][0], increment=values["ramp"][1], length=Length(64, "sequences")
    )
    model = section(Model, d_model=4 * values["n_heads"])
    train = section(Train, batch_ramp=ramp, length=Length(9, "sequences"))
    return load.build_run({"model": model, "train": train, "parallel": section(Parallel)})


def is_allowed(values: dict[str, Any]) -> bool:
    try:
        resolve(build_run(values), values["n_ranks"])
    except (ValidationError, ConfigError):
        return False
    return True


@settings(max_examples=600)
@given(VALUES)
def test_the_rules_allow_just_what_comes_out_even(values: dict[str, Any]) -> None:
    assert is_allowed(values) == oracle_allows(values)


# -- what is named as near does work


def named_changes(text: str) -> list[dict[str, Any]]:
    """Reads "nearest that works: parallel.tensor=2, or 8 ranks"."""
    found = re.search(r"nearest that works: (.*)", text)
    changes = []
    for way in found[1].split(", or ") if found else []:
        pairs = [pair.partition("=") for pair in way.split(" with ")]
        changes.append(
            {"n_ranks": int(way.split()[0])}
            if way.endswith(("rank", "ranks"))
            else {
                name.rpartition(".")[2]: None if value == "none" else json.loads(value)
                for name, _, value in pairs
            }
        )
    return changes


def apply(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    ramp = values["ramp"] or (None, None)
    ramp = (changes.get("start", ramp[0]), changes.get("increment", ramp[1]))
    has_ramp = values["ramp"] and "batch_ramp" not in changes
    rest = {name: value for name, value in changes.items() if name != "batch_ramp"}
    return values | {"ramp": ramp if has_ramp else None} | rest


@settings(max_examples=400)
@given(VALUES)
def test_every_named_change_works(values: dict[str, Any]) -> None:
    try:
        run = build_run(values)
    except ValidationError as error:
        problems = str(error.errors()[0]["ctx"]["error"]).splitlines()
        for problem in problems:
            changes = named_changes(problem)
            assert changes, problem
            for change in changes:
                try:
                    build_run(apply(values, change))
                except ValidationError as rest:
                    left = str(rest.errors()[0]["ctx"]["error"]).splitlines()
                    assert len(left) < len(problems), (problem, left)
        return
    try:
        resolve(run, values["n_ranks"])
    except ConfigError as error:
        changes = named_changes(error.hint)
        assert changes or "--search" in error.hint
        for change in changes:
            assert is_allowed(apply(values, change)), (str(error), change)


# -- refusals that need the number of ranks


NEAREST = "nearest that works: "
SPLIT = "model.n_layers=8, parallel.pipeline=4, parallel.chunks=2"
INTERLEAVED = f"{SPLIT}, parallel.schedule=interleaved"


@pytest.mark.parametrize(
    ("n_ranks", "changes", "problem", "hint"),
    [
        (
            6,
            "parallel.tensor=2, parallel.pipeline=2",
            "6 ranks cannot be divided by parallel.tensor=2 x parallel.pipeline=2 x "
            "parallel.context=1",
            "4 ranks",
        ),
        (2, "parallel.tensor=4", "2 ranks cannot be divided by", "4 ranks"),
        (
            3,
            "",
            "train.global_batch_size=8 cannot be divided by train.micro_batch_size=1 x 3, "
            "the data parallel size of 3 ranks",
            "2 ranks, or train.global_batch_size=9",
        ),
        (
            4,
            "train.batch_ramp={start=2,increment=3,length='99 sequences'}",
            "train.batch_ramp.start=2 .*\ntrain.batch_ramp.increment=3 ",
            "1 rank, or train.batch_ramp=none",
        ),
        (
            8,
            "parallel.data_replicate=3",
            "8 ranks have a data parallel size of 8, which cannot be divided by "
            "parallel.data_replicate=3",
            "parallel.data_replicate=2",
        ),
        (
            16,
            "parallel.pipeline=2",
            "parallel.schedule='1f1b' on parallel.pipeline=2 needs 2 micro batches or more, "
            "but a batch of 8 on 16 ranks is 1",
            "8 ranks, or train.global_batch_size=16",
        ),
        (
            4,
            f"{INTERLEAVED}, train.global_batch_size=13",
            "parallel.schedule='interleaved' on parallel.pipeline=4 needs micro batches in 3 equal "
            "rounds, but a batch of 13 on 4 ranks is 13",
            ".*train.global_batch_size=12",
        ),
    ],
)
def test_ranks_that_do_not_work_are_refused_with_the_nearest_that_do(
    n_ranks: int, changes: str, problem: str, hint: str
) -> None:
    run = load_run("tiny", ["train.micro_batch_size=1", *filter(None, changes.split(", "))]).run
    with pytest.raises(ConfigError) as caught:
        resolve(run, n_ranks)
    assert re.match(problem, caught.value.problem)
    assert re.match(NEAREST + hint, caught.value.hint)


def test_ranks_that_no_single_change_suits_need_another_layout() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_run("gpt3-175b").run, 1024)
    assert caught.value.hint == "trainyard plan --search lists layouts of 1,024 ranks, if any"


def test_without_a_number_of_ranks_the_fewest_that_work_are_taken() -> None:
    zero_bubble = ["parallel.pipeline=4", "model.n_layers=4", "parallel.schedule=zero_bubble"]
    batch = ["train.compile=never", "train.micro_batch_size=1", "train.global_batch_size=14"]
    plan = resolve(load_run("tiny", [*zero_bubble, *batch]).run)
    assert plan.n_ranks == 8  # 14 micro batches do not go in 3 rounds, 7 go in 1
    assert plan.topology == Topology(pipeline=4, shard=2)


# -- stages


def test_the_worked_example() -> None:
    assert balanced_stages(Costs(0, 2, 3), 8, 4, 4) == ((0, 2), (2, 4), (4, 7), (7, 8))


def every_cut(n_layers: int, n_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, n_layers)))
        for cuts in itertools.combinations(range(1, n_layers), n_stages - 1)
    ]


@given(
    costs=st.builds(Costs, st.integers(0, 9), st.integers(1, 5), st.integers(0, 30)),
    n_layers=st.integers(1, 9),
    pipeline=st.integers(1, 4),
    chunks=st.integers(1, 3),
)
def test_no_other_cut_has_a_faster_slowest_stage(
    costs: Costs, n_layers: int, pipeline: int, chunks: int
) -> None:
    n_stages = pipeline * chunks
    if n_stages > n_layers:
        return

    def stage_costs(n_blocks: Sequence[int]) -> list[int]:
        each = [n * costs.block for n in n_blocks]
        each[0] += costs.first
        each[-1] += costs.last
        return each

    stages = balanced_stages(costs, n_layers, n_stages, pipeline)
    assert [block for stage in stages for block in range(*stage)] == list(range(n_layers))
    sizes = tuple(end - first for first, end in stages)
    assert min(sizes) >= 1
    every = every_cut(n_layers, n_stages)
    assert sizes in every
    assert max(stage_costs(sizes)) == min(max(stage_costs(cut)) for cut in every)
    # Not the slowest alone: the squares tell how uneven all of them are.
    assert sum(c * c for c in stage_costs(sizes)) == min(
        sum(c * c for c in stage_costs(cut)) for cut in every
    )


@given(
    costs=st.builds(Costs, st.integers(0, 9), st.integers(1, 5), st.integers(0, 30)),
    n_layers=st.integers(1, 60),
    pipeline=st.integers(1, 8),
    chunks=st.integers(1, 4),
)
def test_each_block_goes_to_the_cheapest_stage(
    costs: Costs, n_layers: int, pipeline: int, chunks: int
) -> None:
    n_stages = pipeline * chunks
    if n_stages > n_layers:
        return
    of_stages = [costs.block] * n_stages
    of_stages[0] += costs.first
    of_stages[-1] += costs.last
    sizes = [1] * n_stages
    for _ in range(n_layers - n_stages):
        of_ranks = [sum(of_stages[rank::pipeline]) for rank in range(pipeline)]
        _, _, later = min((of_stages[s], of_ranks[s % pipeline], -s) for s in range(n_stages))
        of_stages[-later] += costs.block
        sizes[-later] += 1
    stages = balanced_stages(costs, n_layers, n_stages, pipeline)
    assert [end - first for first, end in stages] == sizes


@given(
    first=st.integers(0, 9),
    block=st.integers(1, 5),
    last=st.integers(0, 30),
    dense=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 5)),
)
def test_dense_first_blocks_count_as_much_as_they_take(
    first: int, block: int, last: int, dense: tuple[int, int], sizes: tuple[int, int]
) -> None:
    (n_layers, n_stages), costs = sizes, Costs(first, block, last, dense)
    if n_stages > n_layers:
        return
    of_blocks = [dense[1] if number < dense[0] else block for number in range(n_layers)]
    of_blocks[0] += first
    of_blocks[-1] += last

    def slowest(cut: Sequence[int]) -> int:
        ends = list(itertools.accumulate(cut, initial=0))
        return max(sum(of_blocks[a:b]) for a, b in itertools.pairwise(ends))

    stages = balanced_stages(costs, n_layers, n_stages, n_stages)
    assert [number for stage in stages for number in range(*stage)] == list(range(n_layers))
    found = tuple(end - start for start, end in stages)
    assert min(found) >= 1
    if dense[1] != block:
        assert slowest(found) == min(map(slowest, every_cut(n_layers, n_stages)))


def test_head_and_embedding_count() -> None:
    plan = resolve(load_run("gpt3-125m", ["parallel.pipeline=4"]).run)
    sizes = [end - first for first, end in plan.stages]
    assert sizes == [3, 4, 4, 1]  # the head is worth 4.5 blocks
    plan = resolve(load_run("gpt3-175b", ["parallel.pipeline=8", "parallel.tensor=8"]).run)
    assert [end - first for first, end in plan.stages] == [12] * 8


def test_plans_are_json() -> None:
    layout = ["parallel.pipeline=2", "parallel.tensor=2", "train.micro_batch_size=1"]
    plan = resolve(load_run("tiny", layout).run, 8)
    stored = plan.as_json()
    assert json.loads(json.dumps(stored)) == stored
    assert stored["topology"] == {
        "pipeline": 2, "replicate": 1, "shard": 2, "context": 1, "tensor": 2, "expert": 1
    }  # fmt: skip
    assert stored["stages"] == [[0, 1], [1, 2]]
    assert stored["data_parallel_size"] == 2
