from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planning_tables import COMPOSER, judge_composer

from trainyard.architecture import count_values, stage_layers
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import MachineError
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import CUDNN_SPEED, Machine
from trainyard.planning.time import PARTS, StepTime, step_time
from trainyard.planning.work import count_work, own_program

H100 = find_machine("azure-ndv5")
ROOT = Path(__file__).parents[2]
OURS = own_program(load_run("gpt3-13b").run.model, "tensorwise", is_compiled=True)


def run_of(*changes: str, preset: str = "gpt3-13b") -> Run:
    return load_run(preset, ["train.global_batch_size=256", "train.batch_ramp=none", *changes]).run


def step(
    *changes: str, n_ranks: int = 8, machine: Machine = H100, preset: str = "gpt3-13b"
) -> StepTime:
    run = run_of(*changes, preset=preset)
    return step_time(run, resolve(run, n_ranks), machine)


def with_shares(machine: Machine, **shares: float) -> Machine:
    return replace(machine, efficiencies=replace(machine.efficiencies, **shares))  # type: ignore[arg-type]


def test_parts_add_up() -> None:
    found = step("parallel.tensor=2", "parallel.pipeline=2")
    assert tuple(found.parts) == PARTS
    assert math.isclose(found.seconds, sum(found.parts.values()))
    assert min(found.parts.values()) >= 0


def test_products_follow_from_peak_and_memory_alone() -> None:
    ideal = with_shares(H100, matmul_share=1.0, sustained_share=1.0, memory_share=1.0)
    run = run_of()
    plan = resolve(run, 8)
    parts = step_time(run, plan, ideal).parts
    T, D, V = run.model.sequence_length, run.model.d_model, plan.padded_vocabulary_size
    n_values = run.model.n_layers * 12 * D * D + V * D
    flops = 6 * T * n_values
    # For each product, forward and twice backward: n x a, a x b and n x b values of 2 bytes.
    sides = [(D, 3 * D), (D, D), (D, 4 * D), (4 * D, D)] * run.model.n_layers + [(D, V)]
    n_bytes = 3 * 2 * sum(T * a + a * b + T * b for a, b in sides)
    expected = 256 / 8 * (flops / 989e12 + n_bytes / 3.35e12)
    assert parts["matmuls"] == pytest.approx(expected, rel=1e-9)


def test_all_network_devices_of_a_node_serve_a_ring_through_it() -> None:
    run = run_of("parallel.zero_stage=0")
    shown = replace(OURS, exposed_share=1)
    whole = step_time(run, resolve(run, 16), H100, shown).parts["data"]
    gradient_bytes = 4 * resolve(run, 16).n_parameters
    shares = H100.efficiencies
    bandwidth = min(450e9 * shares.link_share, 8 * 50e9 * shares.network_share)
    assert whole == pytest.approx(2 * 15 / 16 * gradient_bytes / bandwidth, rel=0.05)
    run = run_of("parallel.zero_stage=0", "parallel.tensor=8")
    cut = step_time(run, resolve(run, 16), H100, shown).parts["data"]
    bandwidth = 50e9 * shares.network_share
    assert cut == pytest.approx(gradient_bytes / 8 / bandwidth, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "chunks", "share"),
    [("gpipe", 1, 1), ("1f1b", 1, 1), ("interleaved", 2, 1 / 2), ("zero_bubble", 1, 1 / 3)],
)
def test_the_bubble_is_that_of_the_schedule(schedule: str, chunks: int, share: float) -> None:
    changes = [
        "parallel.pipeline=4",
        f"parallel.schedule={schedule}",
        f"parallel.chunks={chunks}",
        "train.compile=never",
        "model.n_layers=64",
        "model.vocabulary_size=128",
    ]
    found = step(*changes)
    m = 256 / 2
    one = sum(map(sum, found.stage_seconds)) / 4
    assert found.parts["bubble"] == pytest.approx(3 * one * share, rel=0.03)
    busy = found.seconds - found.parts["bubble"] - found.parts["data"] - found.parts["optimizer"]
    assert busy == pytest.approx(m * one, rel=0.03)


def test_the_slowest_stage_sets_the_pace() -> None:
    changes = ("parallel.pipeline=4", "model.vocabulary_size=128")
    even = step(*changes, "model.n_layers=40")
    uneven = step(*changes, "model.n_layers=41")
    stages = [sum(passes) for passes in uneven.stage_seconds]
    assert max(stages) / min(stages) == pytest.approx(11 / 10, rel=0.01)
    assert uneven.seconds / even.seconds == pytest.approx(11 / 10, rel=0.01)


def test_muon_multiplies_and_exchanges_in_the_update() -> None:
    adamw, muon = (step(f"optimizer.kind={kind}", n_ranks=8) for kind in ("adamw", "muon"))
    assert {**adamw.parts, "optimizer": 0} == {**muon.parts, "optimizer": 0}
    run = run_of("optimizer.kind=muon")
    work = count_work(run, resolve(run, 8))
    flops = sum(2 * p.rows * p.inner * p.columns * p.count for p in work.update_products)
    (sent,) = (each.n_bytes for each in work.ranks[0].traffic if each.axis == "stage")
    fastest = flops / 989e12 + 7 / 8 * sent / 450e9
    more = muon.parts["optimizer"] - adamw.parts["optimizer"]
    assert fastest < more < 3 * fastest
    alone = step("optimizer.kind=muon", n_ranks=1).parts["optimizer"]
    assert muon.parts["optimizer"] < alone / 4  # ranks share the matrices


@pytest.mark.parametrize(
    ("change", "gpu", "speed"),
    [
        ("model.dropout=0", "h100", CUDNN_SPEED),
        ("model.dropout=0", "a100-80g", 1),
        ("model.dropout=0.1", "h100", 1),
        ("train.deterministic=true", "h100", 1),
        ("model.sequence_length=2112", "h100", 1),
        ("model.attention_within_documents=true", "h100", 1),
    ],
)
def test_attention_is_priced_by_its_kernel(change: str, gpu: str, speed: float) -> None:
    """cuDNN's is faster where a run takes it."""
    machine = find_machine(gpu=gpu)
    flash, auto = (
        step("model.dropout=0", change, f"kernels.attention={name}", machine=machine)
        for name in ("flash", "auto")
    )
    assert flash.parts["attention"] / auto.parts["attention"] == pytest.approx(speed)


def test_data_ranks_hide_behind_computation() -> None:
    run = run_of()
    plan = resolve(run, 64)
    hidden = step_time(run, plan, H100)
    shown = step_time(run, plan, H100, replace(OURS, exposed_share=1))
    # What the exchange takes from computing shows, and a little at the ends of a step.
    assert hidden.parts["data"] < 0.21 * shown.parts["data"]
    slow = replace(H100, network_bytes_per_second=1e9)
    assert step_time(run, plan, slow).parts["data"] > 1


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_context_ranks_share_attention(method: str) -> None:
    changes = ("model.sequence_length=16384", "model.dropout=0.0", "kernels.attention=flash")
    alone = step(*changes, n_ranks=8)
    context = ("parallel.context=2", f"parallel.context_method={method}")
    shared = step(*changes, *context, n_ranks=16)
    assert shared.parts["context"] > 0
    assert shared.parts["attention"] == pytest.approx(alone.parts["attention"] / 2)


@pytest.mark.parametrize(
    ("gpu", "kind", "known"),
    [("a100-80g", "fp8", "fp32, fp16, bf16"), ("t4", "bf16", "fp32, fp16")],
)
def test_a_precision_the_device_does_not_have(gpu: str, kind: str, known: str) -> None:
    with pytest.raises(MachineError, match=f"has no known peak for {kind} matmuls") as caught:
        step(f"precision.kind={kind}", machine=find_machine(gpu=gpu))
    assert known in caught.value.hint


def test_a_device_of_unknown_memory_bandwidth() -> None:
    machine = replace(H100, device=replace(H100.device, memory_bytes_per_second=None))
    with pytest.raises(MachineError, match="memory bandwidth of H100 is unknown"):
        step(machine=machine)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 7])
def test_parameters_of_a_stage_are_those_of_its_shapes(n_layers: int) -> None:
    run = run_of(f"model.n_layers={n_layers}", "parallel.tensor=2", preset="gpt3-125m")
    plan = resolve(run, 2)
    expected = count_values(stage_layers(run.model, plan.padded_vocabulary_size, tensor=2))
    assert [rank.n_parameters for rank in count_work(run, plan).ranks] == [expected]


def test_the_175b_benchmark_on_64_gpus_is_near_its_published_time() -> None:
    found = step(
        "train.global_batch_size=1536",
        "parallel.tensor=8",
        "parallel.pipeline=8",
        "precision.kind=fp16",
        preset="gpt3-175b",
        n_ranks=64,
        machine=find_machine(gpu="a100-80g"),
    )
    assert found.seconds == pytest.approx(316, rel=0.2)


@pytest.mark.parametrize("how", ["compiled", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_are_those_that_a_cuda_build_launches(how: str, dropout: float) -> None:
    """Of 3 blocks, one of them fp8, in steps of 2 micro batches: 12 matrices."""
    counted = json.loads((ROOT / "tests" / "fake_cuda" / "launches.json").read_text())
    model = run_of(f"model.dropout={dropout}").model
    program = own_program(model, "tensorwise", is_compiled=how == "compiled")
    with_dropout = f"dropout, nothing recomputed, {how}"
    found = counted[f"bf16 on sm_90, {'' if dropout else 'no '}{with_dropout}"]
    rest = sum(program.rest_kernels) + program.chunk_kernels
    predicted = 2 * (3 * sum(program.block_kernels) + rest) + program.step_kernels
    assert predicted == pytest.approx(found, rel=0.1)
    bf16, fp8, low = (
        counted[f"{kind} on sm_90, {with_dropout}"] for kind in ("bf16", "fp8", "fp8_lowbit")
    )
    assert 2 * sum(program.fp8_kernels) == pytest.approx(fp8 - bf16, rel=0.03)
    assert 12 * program.matrix_kernels == pytest.approx(low - fp8, rel=0.03)


def test_published_steps_of_fsdp_are_predicted_as_well_as_the_documentation_says() -> None:
    found = judge_composer(COMPOSER)
    assert {table: figures["rows"] for table, figures in found.items()} == {
        "h100": 70, "a100-80g": 61, "a100-40g": 78,
    }  # fmt: skip
    assert all(figures["mean_absolute_error"] < 0.045 for figures in found.values())


def test_measured_steps_are_predicted_as_well_as_the_documentation_says(shared_data: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "planning.py"
    folder = shared_data / "planner"
    if not folder.is_dir():
        pytest.skip("the measured steps are not on this machine")
    command = [sys.executable, script, folder]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures = json.loads(printed[: printed.index("| table |")])["shipped constants"]
    assert figures["multi"]["mean_absolute_error"] < 0.08
    assert figures["single"]["mean_absolute_error"] < 0.07
    for table in ("multi", "single"):
        choice = figures[table]["choice"]["jobs_of_2_layouts_or_more"]
        assert choice["first_three_within_10_per_cent"] >= 0.95


@pytest.mark.parametrize(
    ("changes", "n_hidden"),
    [
        ("", 2),
        ("parallel.sequence=true", 4),
        ("parallel.sequence=true parallel.recompute=block", 2),
        ("parallel.schedule=zero_bubble parallel.pipeline=2 parallel.chunks=2", 0),
    ],
)
def test_tensor_ranks_exchange_beside_matmuls_in_the_backward_pass(
    changes: str, n_hidden: int
) -> None:
    fixed = ("parallel.tensor=2", "parallel.zero_stage=1", "train.compile=never")
    run = run_of(*fixed, *changes.split())
    plan = resolve(run, 8)
    programs = (replace(OURS, hides_tensor="none"), OURS)

    def hidden(machine: Machine) -> float:
        exposed = [step_time(run, plan, machine, each).parts["tensor"] for each in programs]
        return exposed[0] - exposed[1]

    n_blocks = run.model.n_layers // plan.topology.pipeline
    n_passes = n_blocks * 256 // plan.topology.data // run.train.micro_batch_size
    values = run.train.micro_batch_size * run.model.sequence_length * run.model.d_model
    rounds = 1 if run.parallel.sequence else 2
    n_bytes = rounds * n_hidden * values * 2 / 2  # half of it is another rank's
    link = with_shares(replace(H100, link_latency_seconds=0.0), link_share=1.0)
    expected = (1 - OURS.exposed_share) * n_passes * n_bytes / link.link_bytes_per_second
    assert hidden(link) == pytest.approx(expected, rel=1e-9)
    # No more than the matmuls take, on any slower link.
    slow, slower = (replace(link, link_bytes_per_second=speed) for speed in (1e7, 1e6))
    assert hidden(slow) == pytest.approx(hidden(slower))
