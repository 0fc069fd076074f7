from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planning_tables import COMPOSER, judge_composer
from benchmarks.timeline import JOBS

from trainyard.architecture import block_layers, count_values, stage_layers
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import MachineError
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import ALONE, CAST_SPEEDS, CUDNN_SPEED, Machine
from trainyard.planning.memory import rank_memory
from trainyard.planning.time import PARTS, StepTime, _Timer, step_time, time_of
from trainyard.planning.timeline import lay_out
from trainyard.planning.work import count_work, own_program

H100 = find_machine("azure-ndv5")
ROOT = Path(__file__).parents[2]
TIMELINE = ROOT / "benchmarks/records/2026-11-29-timeline-after.json"
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


EXPERTS = """model.n_experts=64 model.n_active_experts=8 model.d_expert=1024 parallel.expert=8
    train.micro_batch_size=4 parallel.zero_stage=1"""


def test_rows_for_experts_take_the_way_that_there_is() -> None:
    """All-to-alls over links and network at once, counted by hand."""
    run = run_of(*EXPERTS.split(), preset="modern-1.3b")
    for n_ranks, per_node in ((8, 8), (8, 4)):
        machine = replace(H100, devices_per_node=per_node)
        plan = resolve(run, n_ranks)
        shares = machine.efficiencies
        n_micro_batches = 256 // 8 // 4
        n_bytes = 4 * run.model.sequence_length * 8 * run.model.d_model * 2 / 8  # to each rank
        links = machine.link_bytes_per_second * shares.link_share
        network = machine.network_bytes_per_second * shares.network_share
        seconds = max((per_node - 1) * n_bytes / links, (8 - per_node) * n_bytes / network)
        expected = 4 * run.model.n_layers * n_micro_batches * seconds
        found = step_time(run, plan, machine).parts["expert"]
        assert expected < found < 1.2 * expected, "more only by latency"


def test_router_and_experts_multiply_what_a_token_uses() -> None:
    more = [f"model.n_experts={n}" for n in (16, 64)]
    few, many = (
        count_work(run, resolve(run, 8))
        for run in (run_of(*EXPERTS.split(), each, preset="modern-1.3b") for each in more)
    )
    of_router = [
        sum(p.flops for stage in work.ranks[0].stages[0] for p in stage.products if p.in_fp32)
        for work in (few, many)
    ]
    of_all = [
        sum(p.flops for stage in work.ranks[0].stages[0] for p in stage.products)
        for work in (few, many)
    ]
    assert of_router[1] == 4 * of_router[0]
    assert of_all[1] - of_router[1] == of_all[0] - of_router[0]
    waits = [sum(stage.n_waits for stage in few.ranks[0].stages[0])]
    assert waits == [few.run.model.n_layers]
    # More experts are more weights to read, to gather and to update, for as many rows each.
    times = [sum(time_of(work, H100).parts.values()) for work in (few, many)]
    assert times[1] > times[0]


def test_parts_add_up() -> None:
    found = step("parallel.tensor=2", "parallel.pipeline=2")
    assert tuple(found.parts) == PARTS
    assert math.isclose(found.seconds, sum(found.parts.values()))
    assert min(found.parts.values()) >= 0


@pytest.mark.parametrize(
    ("changes", "n_ranks", "share"),
    [
        ("", 1, 1),
        ("parallel.tensor=2", 2, 1),
        ("parallel.pipeline=2", 2, 1),
        ("parallel.zero_stage=1", 2, 3 / 4),  # in the last micro batch FSDP adds
        ("parallel.zero_stage=3", 2, 0),
        ("parallel.pipeline=2 parallel.zero_stage=2", 4, 0),
        ("parallel.tensor=2 precision.kind=fp8 precision.fp8.precise_blocks=0", 2, 0),
        ("parallel.recompute=block", 1, 0),
    ],
)
def test_gradients_that_matmuls_add_to_move_fewer_bytes(
    changes: str, n_ranks: int, share: float
) -> None:
    """Of each parameter in a block, per micro batch, where four follow each other."""
    data = resolve(run_of(*changes.split()), n_ranks).topology.data
    run = run_of(*changes.split(), f"train.global_batch_size={4 * data}")
    plan = resolve(run, n_ranks)

    def moved(**bytes_each: float) -> float:
        work = count_work(run, plan, replace(OURS, **bytes_each))  # type: ignore[arg-type]
        return work.ranks[0].stages[0][1].memory_bytes

    n_values = count_values(block_layers(run.model, plan.topology.tensor))
    n_values *= run.model.n_layers // plan.topology.pipeline
    more = moved(fused_gradient_bytes=7) - moved(fused_gradient_bytes=6)
    assert more == pytest.approx(share * n_values)
    more = moved(gradient_bytes=11) - moved(gradient_bytes=10)
    assert more == pytest.approx((1 - share) * n_values)


def test_products_follow_from_peak_and_memory_alone() -> None:
    ideal = with_shares(H100, matmul_share=1.0, sustained_share=1.0, memory_share=1.0)
    run = run_of("parallel.zero_stage=1")
    plan = resolve(run, 8)
    parts = step_time(run, plan, ideal, replace(OURS, shared_speed=1)).parts
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
    shown = replace(OURS, hides_data=False)
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
    assert found.parts["bubble"] == pytest.approx(3 * one * share, rel=0.06)
    busy = found.seconds - found.parts["bubble"] - found.parts["data"] - found.parts["optimizer"]
    assert busy == pytest.approx(m * one, rel=0.06)


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


@pytest.mark.parametrize(
    ("schedule", "chunks", "n_micro_batches"),
    [
        *(("1f1b", 1, 12), ("interleaved", 8, 12), ("zero_bubble", 2, 12)),
        *(("interleaved", 8, 2), ("interleaved", 2, 1), ("zero_bubble", 1, 2)),
        *(("zero_bubble", 2, 1), ("zero_bubble", 2, 2), ("zero_bubble", 2, 3)),
    ],
)
def test_a_step_takes_as_long_as_its_timeline(
    schedule: str, chunks: int, n_micro_batches: int
) -> None:
    """Also with fewer micro batches than pipeline ranks."""
    found = step(
        *("parallel.tensor=8", "parallel.pipeline=4", "parallel.zero_stage=1"),
        *(f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"),
        *("train.micro_batch_size=1", f"train.global_batch_size={n_micro_batches}"),
        n_ranks=32,
        preset="azure-175b",
    )
    ranks = lay_out(schedule, 4, n_micro_batches, found.stage_seconds)
    alone = found.seconds - found.parts["data"] - found.parts["optimizer"]
    assert alone == pytest.approx(max(passes[-1].end for passes in ranks), rel=0.06)


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 8])
def test_zero_of_one_data_rank_changes_nothing(tensor: int, pipeline: int) -> None:
    layout = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}")
    sizes = ("train.micro_batch_size=4", "model.tied_embeddings=true")
    n_ranks = tensor * pipeline
    found = []
    for stage in (1, 2, 3, 0):
        run = run_of(*layout, *sizes, f"parallel.zero_stage={stage}")
        plan = resolve(run, n_ranks)
        memories = [rank_memory(run, plan, rank) for rank in range(pipeline)]
        traffic = [rank.traffic for rank in count_work(run, plan).ranks]
        found.append((step_time(run, plan, H100), traffic, memories))
    first, *others = found
    for other in others:
        assert other == first


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_ranks_hide_behind_computation(stage: int) -> None:
    run = run_of(f"parallel.zero_stage={stage}")
    plan = resolve(run, 64)
    hidden = step_time(run, plan, H100)
    shown = step_time(run, plan, H100, replace(OURS, hides_data=False))
    # What no computation is beside: a block, or the embedding, at either end of a step.
    rank = count_work(run, plan).ranks[0]
    alone = max(1 / (run.model.n_layers + 1), rank.n_first / rank.n_parameters)
    gathers = [kind for kind in rank.traffic if kind.collective == "all-gather"]
    gather_seconds = step_time(
        run, plan, H100, replace(OURS, hides_data=False, reduced_bytes=0)
    ).parts["data"]
    assert gathers
    n_sums = 256 // 64 // run.train.micro_batch_size if stage == 2 else 1
    sums = (shown.parts["data"] - gather_seconds) / n_sums
    assert hidden.parts["data"] == pytest.approx(alone * (gather_seconds + sums))
    slow = replace(H100, network_bytes_per_second=1e9)
    assert step_time(run, plan, slow).parts["data"] > 1


@pytest.mark.parametrize("n_stages", [1, 2])
def test_the_message_that_nothing_hides_is_an_embedding(n_stages: int) -> None:
    """Norm and head of the same stage travel apart from it."""
    run = run_of(f"parallel.pipeline={n_stages}", preset="llama-3.1-8b")
    first = count_work(run, resolve(run, 8)).ranks[0].n_first
    assert first == run.model.vocabulary_size * run.model.d_model


def test_devices_of_a_group_wait_for_the_slowest_in_every_layout() -> None:
    alone, pair = step(n_ranks=1), step("parallel.tensor=2", "parallel.zero_stage=1", n_ranks=2)
    assert alone.parts["attention"] / 2 == pytest.approx(
        OURS.shared_speed / ALONE * pair.parts["attention"]
    )
    layouts = ("parallel.tensor=8", "parallel.pipeline=8", "parallel.zero_stage=1")
    found = {step(layout, n_ranks=8).parts["attention"] for layout in layouts}
    assert max(found) == pytest.approx(min(found))
    sharded = step("parallel.zero_stage=3").parts["attention"]
    assert min(found) / sharded == pytest.approx(OURS.sharded_speed)


def test_a_device_alone_is_faster_but_not_than_isolated_matmuls() -> None:
    layout = "parallel.zero_stage=1"
    for machine, alone in (
        (find_machine(gpu="a100-80g"), 1),  # its fitted share is 1
        (H100, ALONE),
        (with_shares(H100, sustained_share=0.8), ALONE),
    ):
        one, two = (step(layout, n_ranks=n, machine=machine).parts["attention"] for n in (1, 2))
        assert one / 2 == pytest.approx(OURS.shared_speed / alone * two)


def test_scales_of_rows_cost_time_in_casts_as_published() -> None:
    """Llama 3 8B on 8 H100 of 500 W by torchao's page of pretraining: 7,020 and 6,300 tokens/s,
    with tensorwise scales 7,640."""
    fp8 = ("precision.kind=fp8", "precision.fp8.precise_blocks=0")
    layout = ("parallel.zero_stage=3", "parallel.recompute=attention", "kernels.attention=flash")
    found = [
        step(
            *("train.global_batch_size=8", "train.micro_batch_size=1", *layout, *precision),
            n_ranks=8,
            preset="llama-3.1-8b",
            machine=find_machine(gpu="h100-96g"),
        ).seconds
        for precision in (
            ("precision.kind=bf16",),
            (*fp8, "precision.fp8.scaling=tensorwise"),
            (*fp8, "precision.fp8.scaling=rowwise"),
        )
    ]
    assert found[0] / found[1] == pytest.approx(7640 / 6300, rel=0.04)
    assert found[0] / found[2] == pytest.approx(7020 / 6300, rel=0.04)
    assert CAST_SPEEDS["rowwise"] < CAST_SPEEDS["tensorwise"]


def test_gathers_between_nodes_pass_every_node() -> None:
    far = replace(H100, network_latency_seconds=1.0, link_latency_seconds=0.0)
    run = run_of("parallel.zero_stage=3")
    shown = replace(OURS, hides_data=False)
    for n_ranks, n_hops in ((16, 1), (64, 7)):
        plan = resolve(run, n_ranks)
        calls = sum(kind.calls for kind in count_work(run, plan).ranks[0].traffic)
        seconds = [step_time(run, plan, each, shown).parts["data"] for each in (H100, far)]
        assert seconds[1] - seconds[0] == pytest.approx(calls * n_hops, rel=1e-3)


def test_gathered_tokens_of_several_sequences_are_copied() -> None:
    changes = ("parallel.tensor=8", "parallel.sequence=true", "parallel.zero_stage=1")
    run = run_of(*changes, "train.micro_batch_size=2")
    plan = resolve(run, 8)
    copied, uncopied = (
        step_time(run, plan, H100, replace(OURS, copies_tokens=copies)).parts["tensor"]
        for copies in (True, False)
    )
    sent = [each for each in count_work(run, plan).ranks[0].traffic if each.axis == "tensor"]
    n_bytes = sum(each.n_bytes for each in sent if each.collective == "all-gather")
    assert copied - uncopied == pytest.approx(H100.memory_seconds(2 * n_bytes))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_context_ranks_share_attention(method: str) -> None:
    changes = ("model.sequence_length=16384", "model.dropout=0.0", "kernels.attention=flash")
    alone = step(*changes, n_ranks=8)
    context = ("parallel.context=2", f"parallel.context_method={method}")
    shared = step(*changes, *context, n_ranks=16)
    assert (shared.parts["context"] > 0) == (method == "ulysses")  # a ring hides it
    assert shared.parts["attention"] == pytest.approx(alone.parts["attention"] / 2)


def test_a_ring_exposes_as_much_as_in_the_timeline() -> None:
    """Nothing where attention takes longer than messages (log of 2026-11-29), else the rest."""
    job = JOBS["Llama 3.1 8B, ring of 4, 32k"]
    run, machine = job.load(), find_machine(None, job.gpu)
    exposed = []
    for length in (32768, 1024):
        model = run.model.model_copy(update={"sequence_length": length})
        short = run.model_copy(update={"model": model})
        work = count_work(short, resolve(short, job.n_gpus))
        sent = [kind for kind in work.ranks[0].traffic if kind.axis == "context"]
        seconds = sum(map(_Timer(work, machine).message_seconds, sent))
        exposed.append(time_of(work, machine).parts["context"] / seconds)
    assert exposed[0] == 0 and 0.1 < exposed[1] < 1


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
    assert 2 * sum(program.fp8_kernels) == pytest.approx(fp8 - bf16, rel=0.06)
    assert 12 * program.matrix_kernels == pytest.approx(low - fp8, rel=0.06)


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
        # Gradients are gathered beside matmuls that wait, except in the last of 64 micro batches.
        ("parallel.sequence=true", 4 + 2 * 63 / 64),
        ("parallel.sequence=true parallel.zero_stage=2", 4),
        ("parallel.sequence=true parallel.pipeline=2", 6),
        ("parallel.sequence=true parallel.recompute=block", 2 + 2 * 63 / 64),
        ("parallel.schedule=zero_bubble parallel.pipeline=2 parallel.chunks=2", 0),
        ("parallel.schedule=zero_bubble parallel.pipeline=2 parallel.sequence=true", 2),
        # Two pieces hide half of each message of a forward pass, and of its recomputation.
        ("train.micro_batch_size=2", 2 + 2 / 2),
        ("train.micro_batch_size=2 parallel.sequence=true", 4 + 4 / 2 + 2 * 31.5 / 32),
        (
            "train.micro_batch_size=2 parallel.sequence=true parallel.recompute=block",
            2 + 8 / 2 + 2 * 31.5 / 32,
        ),
        ("train.micro_batch_size=2 parallel.sequence=true parallel.zero_stage=2", 4 + 6 / 2),
    ],
)
def test_tensor_ranks_exchange_beside_matmuls(changes: str, n_hidden: float) -> None:
    fixed = ("parallel.tensor=2", "parallel.zero_stage=1", "train.compile=never")
    run = run_of(*fixed, *changes.split())
    plan = resolve(run, 8)
    programs = (replace(OURS, exposed_tensor_share=1), OURS)

    def hidden(machine: Machine) -> float:
        exposed = [step_time(run, plan, machine, each).parts["tensor"] for each in programs]
        return exposed[0] - exposed[1]

    n_blocks = run.model.n_layers // plan.topology.pipeline
    n_passes = n_blocks * 256 // plan.topology.data // run.train.micro_batch_size
    values = run.train.micro_batch_size * run.model.sequence_length * run.model.d_model
    rounds = 1 if run.parallel.sequence else 2
    n_bytes = rounds * n_hidden * values * 2 / 2  # half of it is another rank's
    link = with_shares(replace(H100, link_latency_seconds=0.0), link_share=1.0)
    expected = n_passes * n_bytes / link.link_bytes_per_second
    assert hidden(link) == pytest.approx(expected, rel=1e-9)
    # No more than the matmuls take, on any slower link.
    slow, slower = (replace(link, link_bytes_per_second=speed) for speed in (1e7, 1e6))
    assert hidden(slow) == pytest.approx(hidden(slower))
