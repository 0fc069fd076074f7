from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from trainyard.config import rules
from trainyard.config.load import build_run, field_value, load_run
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.layout.ranks import find_topology, is_legal
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Machine
from trainyard.planning.search import (
    FIELDS,
    Candidate,
    explain_loss,
    find_remedies,
    fits,
    hint_where_none_fits,
    list_shapes,
    predict,
    rescale,
    search,
    usable_bytes,
)

GIB = 2**30
POLARIS = find_machine("polaris")
SMALL = ["train.global_batch_size=32", "train.batch_ramp=none"]


def with_memory(machine: Machine, gibibytes: float) -> Machine:
    return replace(machine, device=replace(machine.device, memory_bytes=int(gibibytes * GIB)))


def every_variant(run: Run, machine: Machine, n_devices: int) -> Iterator[Run]:
    for shape in list_shapes(run, machine, n_devices):
        values = itertools.product((1, 2, 3), (1, 2, 4), ("none", "attention", "block"))
        for stage, replicas, recompute in values:
            changes = {
                "parallel.zero_stage": stage,
                "parallel.data_replicate": replicas,
                "parallel.recompute": recompute,
            }
            changed = rules.change(shape, changes)
            if is_legal(changed, n_devices):
                yield changed


@pytest.mark.parametrize("gibibytes", [3.5, 40])
def test_the_first_is_the_fastest_of_all_that_fit(gibibytes: float) -> None:
    run = load_run("gpt3-125m", SMALL).run
    machine = replace(with_memory(POLARIS, gibibytes), devices_per_node=2)
    found = search(run, machine, 4)
    variants = [predict(each, machine, 4) for each in every_variant(run, machine, 4)]
    assert len(variants) > 200
    fitting = [each for each in variants if fits(each.memory, machine)]
    assert fitting
    fastest = min(each.time.seconds for each in fitting)
    assert found[0].time.seconds == pytest.approx(fastest)
    seconds = [each.time.seconds for each in found]
    assert seconds == sorted(seconds)
    for each in found:
        assert each == predict(build_run(each.run.model_dump()), machine, 4)
        assert each.memory.peak_bytes <= (usable_bytes(machine) or 0)
        assert each.plan.n_ranks == 4


def test_only_the_layout_changes() -> None:
    run = load_run("gpt3-125m", SMALL).run
    for each in search(run, POLARIS, 4):
        same = {name: field_value(run, name) for name in FIELDS}
        assert rules.change(each.run, same) == run


def test_nothing_is_found_where_nothing_can_be() -> None:
    run = load_run("gpt3-175b").run
    assert search(run, POLARIS, 4) == []
    sizes = ["train.micro_batch_size=1", "train.global_batch_size=1", "train.batch_ramp=none"]
    odd = load_run("gpt3-125m", sizes).run
    assert search(odd, POLARIS, 7) == []


def test_legality_is_that_of_training() -> None:
    run = load_run("gpt3-125m", SMALL).run
    fields = ("parallel.pipeline", "parallel.schedule", "train.micro_batch_size")
    values = ((1, 2, 3), ("1f1b", "gpipe", "zero_bubble"), (1, 8, 32))
    for n_devices, *chosen in itertools.product((1, 2, 6, 8, 64), *values):
        changed = rules.change(run, dict(zip(fields, chosen, strict=True)))
        try:
            find_topology(changed, n_devices)
            possible = not rules.broken_rules(changed)
        except ConfigError:
            possible = False
        assert is_legal(changed, n_devices) == possible, (n_devices, chosen)


def timed(candidate: Candidate, seconds: float, **parts: float) -> Candidate:
    return replace(candidate, time=replace(candidate.time, seconds=seconds, parts=parts))


def test_why_one_loses() -> None:
    any_one = predict(load_run("gpt3-125m", SMALL).run, POLARIS, 8)
    first = timed(any_one, 2.0, matmuls=1.5, bubble=0.1, tensor=0.4)
    other = timed(any_one, 2.3, matmuls=1.5, bubble=0.6, tensor=0.2)
    assert explain_loss(first, other) == "bubble +25.0%, though tensor -10.0%"
    third = timed(any_one, 2.4, matmuls=1.6, bubble=0.2, tensor=0.6)
    assert explain_loss(first, third) == "tensor +10.0%, matmuls +5.0%"
    assert explain_loss(first, first) == "as fast"


def test_what_was_measured_ranks_again() -> None:
    any_one = predict(load_run("gpt3-125m", SMALL).run, POLARIS, 8)
    candidates = [timed(any_one, seconds, matmuls=seconds) for seconds in (1.0, 1.1, 1.5, 1.2)]
    scale, ranked = rescale(candidates, {0: 4.0, 1: 1.1})
    assert scale == pytest.approx(2)
    assert [each.time.seconds for each in ranked] == pytest.approx([1.1, 2.4, 3.0, 4.0])
    assert all(each.time.parts["matmuls"] == each.time.seconds for each in ranked)


def test_the_smallest_changes_make_it_fit() -> None:
    run = load_run("gpt3-1.3b", [*SMALL, "train.micro_batch_size=4"]).run
    planned = predict(run, POLARIS, 8)
    machine = with_memory(POLARIS, 0.8 * planned.memory.peak_bytes / GIB)
    found = find_remedies(run, machine, 8)
    assert any(remedy.change == "train.micro_batch_size=2" for remedy in found)
    fastest = search(run, machine, 8, most=1)
    assert [remedy.candidate for remedy in found if remedy.candidate in fastest] == fastest
    costs = [remedy.device_seconds for remedy in found]
    assert costs == sorted(costs)
    for remedy in found:
        assert fits(remedy.candidate.memory, machine)
        n = remedy.candidate.plan.n_ranks
        again = load_run(
            "gpt3-1.3b",
            [*SMALL, "train.micro_batch_size=4"]
            + [text.strip(",") for text in remedy.change.split() if "=" in text],
        ).run
        assert again == remedy.candidate.run
        assert f"{n} devices" in remedy.change or n == 8


def test_more_devices_fill_nodes() -> None:
    """A layout of 12 devices would be the first that fits."""
    run = load_run("gpt3-1.3b", [*SMALL, "train.global_batch_size=24"]).run
    machine = replace(with_memory(POLARIS, 6), devices_per_node=8)
    assert hint_where_none_fits(run, machine, 1).startswith("one fits on 8 devices")
    for remedy in find_remedies(run, machine, 1):
        n = remedy.candidate.plan.n_ranks
        assert n == 1 or 8 % n == 0 or n % 8 == 0


def test_what_never_fits() -> None:
    run = load_run("gpt3-175b", SMALL).run
    machine = with_memory(POLARIS, 0.001)
    assert find_remedies(run, machine, 1) == []
    assert hint_where_none_fits(run, machine, 1) == "a smaller model, or devices with more memory"
