from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainyard.config import rules
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import Plan, resolve
from trainyard.planning import saving
from trainyard.planning.clusters import find_machine
from trainyard.planning.cost import (
    LEAST_USEFUL_SHARE,
    all_steps_seconds,
    better_saving,
    corpora_use,
    run_cost,
    training_blend,
)
from trainyard.planning.hardware import Machine
from trainyard.planning.time import StepTime, step_time

AZURE = find_machine("azure-ndv5")
CUT = ["parallel.tensor=8", "parallel.sequence=true", "parallel.pipeline=16"]


def planned(*overrides: str) -> tuple[Run, Plan, Machine, StepTime]:
    """The preset azure-175b on 1024 devices."""
    run = load_run("azure-175b", [*CUT, *overrides]).run
    plan = resolve(run, 1024)
    return run, plan, AZURE, step_time(run, plan, AZURE)


def test_a_run_adds_up() -> None:
    all_of_it = planned("checkpoint.background=false", "evaluate.batches=0")
    run, plan, _, time = all_of_it
    cost = run_cost(*all_of_it, (20e9, 100e9), price_per_device_hour=2.5)
    assert cost.step_seconds == pytest.approx(1500 * time.seconds)
    assert cost.evaluation_seconds == 0
    assert cost.interval_seconds == pytest.approx(run.checkpoint.interval * time.seconds)
    writes = [each.write_seconds for each in cost.savings]
    assert writes == pytest.approx([12 * plan.n_parameters / speed for speed in (20e9, 100e9)])
    assert [each.stall_seconds for each in cost.savings] == writes
    between = saving.mean_seconds_between_failures(128)
    assert cost.useful_share == saving.useful_share(cost.interval_seconds, writes[0], between)
    assert cost.useful_shares[0] < cost.useful_share < cost.useful_shares[1]
    assert cost.seconds == pytest.approx(cost.step_seconds / cost.useful_share)
    assert cost.device_hours == pytest.approx(cost.seconds * 1024 / 3600)
    assert cost.price == pytest.approx(2.5 * cost.device_hours)
    assert cost.n_failures == pytest.approx(cost.seconds / between)


def test_saves_in_the_background_cost_the_copy_alone_unless_the_next_one_waits() -> None:
    run, plan, _, time = planned()
    fast, slow = run_cost(run, plan, AZURE, time, (100e9, 0.1e9)).savings
    copy = saving.host_bytes(run, plan) / 20e9
    assert fast.stall_seconds == pytest.approx(copy)
    interval = run.checkpoint.interval * time.seconds
    assert slow.stall_seconds == pytest.approx(copy + slow.write_seconds - interval)
    assert slow.best_interval_seconds >= slow.write_seconds > interval


def test_a_ramp_is_the_sum_of_its_steps() -> None:
    lengths = ["train.length='40 steps'", "schedule.decay='40 steps'", "schedule.warmup='4 steps'"]
    ramp = "train.batch_ramp={start=8, increment=8, length='600 sequences'}"
    batch = ["train.global_batch_size=32", ramp]
    run = load_run("gpt3-125m", [*lengths, *batch, "parallel.pipeline=2"]).run
    plan = resolve(run, 2)
    found = all_steps_seconds(run, plan, AZURE, step_time(run, plan, AZURE))
    expected = 0.0
    for step in range(plan.n_steps):
        size = BatchSchedule(run).batch_size(step)
        same = rules.change(run, {"train.global_batch_size": size, "train.batch_ramp": None})
        expected += step_time(same, resolve(same, 2), AZURE).seconds
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("n_steps", "data", "n_evaluations"),
    [
        (40, [], 4 + 1),
        (41, [], 5 + 1),
        (41, ["data.split='9,1'"], 5),
        (41, ["data.split='1'"], 0),
        (40, ["data.train.prefixes=['a']", "data.test.prefixes=['b']"], 1),
    ],
)
def test_evaluations_of_each_split_are_forward_passes(
    n_steps: int, data: list[str], n_evaluations: int
) -> None:
    length = f"train.length='{n_steps} steps'"
    run, plan, _, time = planned(length, "evaluate.interval=10", "evaluate.batches=2", *data)
    even = replace(time, stage_seconds=((1.0, 2.0),), parts={"optimizer": 0.0})
    seconds = run_cost(run, plan, AZURE, even).evaluation_seconds
    assert seconds == pytest.approx(n_evaluations * 2 * time.seconds / 3)


def test_a_job_that_never_ends() -> None:
    cost = run_cost(*planned("train.length='1_000_000 steps'", "checkpoint.interval=0"))
    assert cost.useful_share == 0
    assert math.isinf(cost.seconds)


LLAMA_405B = [
    *("model.n_layers=126", "model.d_model=16384", "model.n_heads=128", "model.d_ff=53248"),
    *("model.n_key_value_heads=8", "train.global_batch_size=2048", "train.micro_batch_size=1"),
    *("train.length='15.6T tokens'", "parallel.tensor=8", "parallel.sequence=true"),
    *("parallel.pipeline=16", "parallel.chunks=4", "parallel.schedule=interleaved"),
]
"""arXiv:2407.21783, table 4; its number of chunks is not published."""


def test_llama_takes_the_published_device_hours() -> None:
    run = load_run("llama-3.1-8b", LLAMA_405B).run
    plan, machine = resolve(run, 16_384), find_machine(None, "h100-80g")
    cost = run_cost(run, plan, machine, step_time(run, plan, machine))
    assert cost.device_hours == pytest.approx(30.84e6, rel=0.1), "of the model card"


@pytest.mark.parametrize(
    ("changes", "storage", "better"),
    [
        (["checkpoint.interval=1000"], 5, ["checkpoint.interval='20 minutes'"]),
        (["checkpoint.interval='1 minute'"], 20, ["checkpoint.interval='15 minutes'"]),
        (["checkpoint.interval='3 hours'"], 1000, ["checkpoint.interval='10 minutes'"]),
        (
            ["checkpoint.background=false"],
            5,
            ["checkpoint.background=true", "checkpoint.interval='20 minutes'"],
        ),
        (
            ["checkpoint.background=false"],
            0.5,
            ["checkpoint.background=true", "checkpoint.interval='20 minutes'", "--storage 5"],
        ),
    ],
)
def test_how_more_time_is_useful(changes: list[str], storage: float, better: list[str]) -> None:
    def useful(overrides: list[str], speed: float) -> float:
        run = load_run("llama-3.1-8b", [*LLAMA_405B, *overrides]).run
        return run_cost(run, plan, machine, time, (speed * 1e9,)).useful_share

    run = load_run("llama-3.1-8b", [*LLAMA_405B, *changes]).run
    plan, machine = resolve(run, 8192), find_machine(None, "h100-80g")
    time = step_time(run, plan, machine)
    found, share = better_saving(run, plan, machine, time, storage * 1e9)
    assert found == " ".join(better).replace("'", '"')
    *overrides, last = better
    speed = float(last.removeprefix("--storage ")) if "--storage" in last else storage
    overrides += [last] * (speed == storage)
    assert useful(changes, storage) < LEAST_USEFUL_SHARE
    assert share == useful([*changes, *overrides], speed) > useful(changes, storage) + 0.015
    for minutes in (1, 3, 10, 40, 120):
        assert (
            share > useful([*overrides, f"checkpoint.interval='{minutes} minutes'"], speed) - 0.02
        )


def test_epochs() -> None:
    blend = ["data.blend.prefixes=['wiki', 'web']", "data.split='98,2,0'"]
    run = load_run("tiny", [*blend, "data.blend.weights=[1, 3]"]).run
    plan = resolve(run)
    assert plan.n_tokens == 50 * 8 * 64
    wiki, web = corpora_use(run, plan, {"wiki": 1000})
    assert (wiki.share, web.share) == (0.25, 0.75)
    assert wiki.epochs == pytest.approx(25_600 * 0.25 / 980)
    assert web.epochs is None
    # Without weights shares follow from sizes, all of which must be known.
    run = load_run("tiny", blend).run
    assert [use.share for use in corpora_use(run, plan, {"wiki": 1000})] == [None, None]
    wiki, web = corpora_use(run, plan, {"wiki": 1000, "web": 4000})
    assert (wiki.share, web.share) == (0.2, 0.8)
    assert wiki.epochs == web.epochs == pytest.approx(25_600 / 4900)


def test_blends_that_training_has_alone_are_read_whole() -> None:
    run = load_run("tiny", ["data.train.prefixes=['a']"]).run
    assert training_blend(run)[1] == 1
