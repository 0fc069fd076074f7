from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from trainyard.config import rules
from trainyard.config.load import build_run, field_value, load_run
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.layout.ranks import find_topology, is_legal, ranks_per_replica
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Machine
from trainyard.planning.memory import busiest_memory
from trainyard.planning.search import (
    FIELDS,
    Candidate,
    _Search,
    as_dense,
    explain_loss,
    find_remedies,
    first_saving,
    fits,
    hint_where_none_fits,
    list_shapes,
    node_bytes,
    predict,
    rescale,
    search,
    usable_bytes,
)

GIB = 2**30
POLARIS, H100 = find_machine("polaris"), find_machine(gpu="h100")
SMALL = ["train.global_batch_size=32", "train.batch_ramp=none"]


def with_memory(machine: Machine, gibibytes: float) -> Machine:
    return replace(machine, device=replace(machine.device, memory_bytes=int(gibibytes * GIB)))


def every_variant(run: Run, machine: Machine, n_devices: int) -> Iterator[Run]:
    for shape in list_shapes(run, machine, n_devices):
        n = math.ceil(run.model.n_layers / shape.parallel.pipeline / shape.parallel.chunks)
        values = itertools.product((1, 2, 3), (1, 2, 4), ("none", "attention", "block"))
        data = n_devices // ranks_per_replica(shape)
        for stage, replicas, recompute in values:
            if stage > 1 and replicas == data and shape.parallel.context == 1:
                continue  # nothing is sharded
            changes = {
                "parallel.zero_stage": stage,
                "parallel.data_replicate": replicas,
                "parallel.recompute": recompute,
            }
            for share in [k / n for k in range(1, n)] if recompute != "none" else []:
                part = rules.change(shape, changes | {"parallel.recompute_share": round(share, 3)})
                if is_legal(part, n_devices) and fits(
                    busiest_memory(part, resolve(part, n_devices)), machine, n_devices
                ):  # one with more takes longer
                    yield part
                    break
            changed = rules.change(shape, changes)
            if is_legal(changed, n_devices):
                yield changed


FEW = ["model.n_layers=4", "train.global_batch_size=8"]
JOBS = {
    "GPT": ("gpt3-125m", SMALL),
    "GPT in fp8, Muon": ("gpt3-125m", [*FEW, "precision.kind=fp8", "optimizer.kind=muon"]),
    "few blocks": ("gpt3-125m", [*FEW, "model.n_layers=2", "precision.kind=fp16"]),
    "rings": ("llama-3.2-1b", [*FEW, "model.sequence_length=4096"]),
    "experts": (
        "llama-3.2-1b",
        [*FEW, "model.n_experts=8", "model.d_expert=4096", "model.n_dense_blocks=1"],
    ),
}


@pytest.mark.parametrize(
    ("job", "gibibytes", "host_gibibytes"),
    [
        *(("GPT", 3.5, math.inf), ("GPT", 40, math.inf), ("GPT in fp8, Muon", 3.8, math.inf)),
        *(("few blocks", 3, math.inf), ("rings", 9, math.inf), ("rings", 40, 4.6)),
        ("experts", 9, math.inf),
    ],
)
def test_the_first_is_the_fastest_of_all_that_fit(
    job: str, gibibytes: float, host_gibibytes: float
) -> None:
    preset, changes = JOBS[job]
    run = load_run(preset, [*changes, "train.batch_ramp=none"]).run
    machine = replace(
        with_memory(H100 if "fp8" in run.precision.kind else POLARIS, gibibytes),
        devices_per_node=2,
        host_memory_bytes=host_gibibytes * GIB,
    )
    finder = _Search(run, machine, 4)
    found = search(run, machine, 4)
    next(finder.candidates(math.inf), None)
    variants = [predict(each, machine, 4) for each in every_variant(run, machine, 4)]
    assert len(variants) > 100
    for each in variants:
        assert finder._least_seconds(each.run) <= each.time.seconds
    fitting = [each for each in variants if fits(each.memory, machine, 4)]
    assert 0 < len(fitting) < len(variants) or (gibibytes, host_gibibytes) == (40, math.inf)
    fastest = min(each.time.seconds for each in fitting)
    assert found[0].time.seconds == pytest.approx(fastest)
    seconds = [each.time.seconds for each in found]
    assert seconds == sorted(seconds)
    for each in found:
        assert each == predict(build_run(each.run.model_dump()), machine, 4)
        assert each.memory.peak_bytes <= (usable_bytes(machine) or 0)
        assert node_bytes(each.memory, machine, 4) <= machine.host_memory_bytes
        assert each.plan.n_ranks == 4


@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_the_fewest_blocks_are_recomputed_that_fit(recompute: str) -> None:
    run = load_run("gpt3-1.3b", [*SMALL, "train.micro_batch_size=4", "parallel.tensor=4"]).run
    shares = [
        rules.change(run, {"parallel.recompute": recompute, "parallel.recompute_share": k / 24})
        for k in range(1, 25)
    ]
    sizes = [predict(each, POLARIS, 4) for each in (run, *shares)]
    most = [each.memory.peak_bytes for each in sizes]
    seconds = [each.time.seconds for each in sizes]
    assert seconds == sorted(seconds) and most[0] > most[5] > most[-1]
    machine = with_memory(POLARIS, (most[7] + most[8]) / 2 / 0.98 / GIB)
    savings: list[rules.Fix] = [
        {"parallel.recompute": recompute, "parallel.recompute_share": 1.0},
    ]
    changes = first_saving(run, savings, lambda r: fits(predict(r, machine, 4).memory, machine, 4))
    assert changes == {"parallel.recompute": recompute, "parallel.recompute_share": 0.333}
    assert predict(rules.change(run, changes), machine, 4).memory.peak_bytes == most[8]


def test_experts_are_shared_where_they_do_not_fit_otherwise() -> None:
    experts = ["model.n_experts=64", "model.n_active_experts=4", "model.d_expert=2048"]
    run = load_run("llama-3.2-1b", [*SMALL, *experts]).run
    found = search(run, H100, 8)
    assert found and all(is_legal(one.run, 8) for one in found)
    assert all(64 % one.run.parallel.expert == 0 for one in found)
    assert found[0].run.parallel.expert > 1
    alone = rules.change(found[0].run, {"parallel.expert": 1})
    held, shared = (busiest_memory(each, resolve(each, 8)) for each in (alone, found[0].run))
    assert shared.peak_bytes < held.peak_bytes
    dense = as_dense(found[0].run)
    flops = [resolve(each, 8).model_flops_per_token for each in (run, dense)]
    assert flops[1] == pytest.approx(flops[0], rel=0.01)
    assert is_legal(dense, 8) and dense.model.n_experts == 0


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
    assert search(odd, POLARIS, 13) == []  # no schedule has a rank without a block


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
    # Two micro batches of 2 would add up their gradients, whole with ZeRO 1.
    assert any(remedy.change == "train.micro_batch_size=1" for remedy in found)
    fastest = search(run, machine, 8, most=1)
    assert [remedy.candidate for remedy in found if remedy.candidate in fastest] == fastest
    costs = [remedy.device_seconds for remedy in found]
    assert costs == sorted(costs)
    for remedy in found:
        assert fits(remedy.candidate.memory, machine, remedy.candidate.plan.n_ranks)
        n = remedy.candidate.plan.n_ranks
        again = load_run(
            "gpt3-1.3b",
            [*SMALL, "train.micro_batch_size=4"]
            + [text.strip(",") for text in remedy.change.split() if "=" in text],
        ).run
        assert again == remedy.candidate.run
        assert f"{n} devices" in remedy.change or n == 8


def test_zero_2_is_the_remedy_where_whole_gradients_do_not_fit() -> None:
    run = load_run("gpt3-1.3b", [*SMALL, "train.micro_batch_size=1"]).run
    sharded = predict(rules.change(run, {"parallel.zero_stage": 2}), POLARIS, 8)
    machine = with_memory(POLARIS, 1.05 * sharded.memory.peak_bytes / GIB)
    assert run.parallel.zero_stage == 1 and not fits(predict(run, POLARIS, 8).memory, machine, 8)
    changes = [remedy.change for remedy in find_remedies(run, machine, 8)]
    assert any("parallel.zero_stage=2" in change for change in changes)


def test_more_devices_fill_nodes() -> None:
    """A layout of 12 devices would be the first that fits."""
    run = load_run("gpt3-1.3b", [*SMALL, "train.global_batch_size=24"]).run
    machine = replace(with_memory(POLARIS, 6), devices_per_node=8)
    assert hint_where_none_fits(run, machine, 1).startswith("one fits on 8 devices")
    for remedy in find_remedies(run, machine, 1):
        n = remedy.candidate.plan.n_ranks
        assert n == 1 or 8 % n == 0 or n % 8 == 0


def test_copies_that_do_not_fit_in_host_memory() -> None:
    run = load_run("gpt3-1.3b", SMALL).run
    best = search(run, POLARIS, 1, most=1)[0]
    machine = replace(POLARIS, host_memory_bytes=0.7 * node_bytes(best.memory, POLARIS, 1))
    assert search(run, machine, 1) == []
    assert hint_where_none_fits(run, machine, 1).startswith("checkpoint.background=false")
    changes = [remedy.change for remedy in find_remedies(best.run, machine, 1)]
    assert "checkpoint.background=false" in changes


def test_copies_and_layout_change_together_before_more_devices_are_asked_for() -> None:
    machine = replace(find_machine(gpu="a100-40g"), devices_per_node=8, host_memory_bytes=48 * GIB)
    run = load_run("gpt3-13b", ["train.micro_batch_size=1", "train.batch_ramp=none"]).run
    assert run.parallel.tensor == 1
    (remedy,) = find_remedies(run, machine, 8)
    assert "checkpoint.background=false" in remedy.change and "parallel." in remedy.change
    candidate = remedy.candidate
    assert candidate.plan.n_ranks == 8 and fits(candidate.memory, machine, 8)


def test_more_devices_are_no_remedy_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def count(run: Run, machine: Machine, n_devices: int, most: int) -> list[Candidate]:
        counts.append(n_devices)
        return search(run, machine, n_devices, most)

    monkeypatch.setattr("trainyard.planning.search.search", count)
    machine = replace(find_machine(gpu="a100-80g"), host_memory_bytes=2 * GIB)
    run = load_run("gpt3-1.3b", SMALL).run
    assert find_remedies(run, machine, 8) == []
    hint = hint_where_none_fits(run, machine, 8)
    found = re.fullmatch(r"nodes with ([\d.]+) GiB of host memory, .* without copies", hint)
    assert found and 2 < float(found[1]) < 40
    enough = replace(machine, host_memory_bytes=(float(found[1]) + 0.1) * GIB)
    direct = rules.change(run, {"checkpoint.background": False})
    assert search(direct, enough, 8) and set(counts) == {8}


def test_ranks_without_a_copy_have_nothing_to_shard() -> None:
    run = load_run("gpt3-1.3b", [*SMALL, "train.global_batch_size=1", "train.micro_batch_size=1"])
    for each in search(run.run, POLARIS, 4):
        assert each.run.parallel.zero_stage == 1 or each.plan.topology.context > 1


def test_a_search_up_to_a_time() -> None:
    run = load_run("gpt3-125m", SMALL).run
    found = search(run, POLARIS, 4)
    most = found[2].time.seconds
    assert search(run, POLARIS, 4, most_seconds=most) == found[:3]
    assert search(run, POLARIS, 4, most_seconds=0.99 * found[0].time.seconds) == []


def test_what_never_fits() -> None:
    run = load_run("gpt3-175b", SMALL).run
    machine = with_memory(POLARIS, 0.001)
    assert find_remedies(run, machine, 1) == []
    assert hint_where_none_fits(run, machine, 1) == "a smaller model, or devices with more memory"
