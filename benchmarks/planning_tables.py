"""Step times that others published, beside predictions; `planning.py` prints and records them.

What the programs do is estimated, and was refined once after a first comparison (both are in
docs/planning-accuracy.md); where a table does not say how it was measured, a docstring says what is
assumed. Constants are fitted to FSDP's table alone.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.config.precisions import Fp8, Precision
from trainyard.config.run import Model, Parallel, Run, Train
from trainyard.layout.flops import flops_per_token
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Machine
from trainyard.planning.memory import rank_memory
from trainyard.planning.time import step_time
from trainyard.planning.traffic import busiest_rank
from trainyard.planning.work import Program, twice
from trainyard.units import format_figure


def describe_program(kernels: float, gradient_bytes: float = 6, **figures: Any) -> Program:
    """Describes a program without compiled blocks, chunks of the loss and an update's launches.

    60 kernels in a block are an estimate, and as many outside them.
    """
    others: dict[str, Any] = {
        "stream_bytes": twice(24),
        "heads_bytes": twice(6),
        "mlp_bytes": twice(6),
        "logit_bytes": 40,
        "reduced_bytes": 2,
        "hides_data": False,
        "exposed_tensor_share": 1,
        "shared_speed": 1,
        "sharded_speed": 1,
        "gathered_bytes": 0,
        "copies_tokens": False,
        "attention_speed": 1,
    }
    names = ("fused_gradient_bytes", "table_bytes", "gradient_bytes")
    others |= dict.fromkeys(names, gradient_bytes)
    others |= dict.fromkeys(("block_kernels", "rest_kernels"), twice(kernels))
    nothing = ("recast_bytes", "unneeded_bytes", "chunk_kernels", "step_kernels", "list_kernels")
    others |= dict.fromkeys((*nothing, "matrix_kernels"), 0)
    return Program(**others | {"recast_kernels": (0, 0), "is_compiled": False} | figures)


# Without torch.compile: norm, bias, dropout and sum, GELU and the heads' order are kernels of their
# own. Softmax and dropout of the scores: read 1 (the fused kernel skips the upper triangle),
# written 2, read 2, written 2, mask 1. Gradients are fp16, and are summed after the backward pass.
MEGATRON_DEEPSPEED = describe_program(60, score_bytes=8)
# Its softmax kernel wants a multiple of 4 matrices; otherwise five plain ones take its place.
UNFUSED_SOFTMAX = describe_program(85, score_bytes=20)
FLASH_ATTENTION = describe_program(50)
# Of 2023: gradients are summed and exchanged in fp32. With Transformer Engine an fp8 operand is
# read and written once, in both orders, its scale being that of earlier steps.
FP32_SUMS: dict[str, Any] = {"reduced_bytes": 4, "cast_bytes": (2, 2)}
MEGATRON_LM = describe_program(50, 10, **FP32_SUMS)
# Of 2024: more kernels are fused, and most communication is hidden.
MEGATRON_CORE = describe_program(
    30,
    8,
    **FP32_SUMS,
    stream_bytes=twice(20),
    logit_bytes=20,
    hides_data=True,
    exposed_tensor_share=0.4,  # torchtitan's asynchronous one hides half to two thirds on 256 H100
    attention_speed=1.4,  # cuDNN's on H100
)
# Of 2023: FSDP that gathers weights late (BACKWARD_POST), and sums gradients in bf16. The speed of
# its attention, in Triton, and what it shows of its exchange are fitted.
COMPOSER = describe_program(50, attention_speed=0.6)


def make_run(model: Model, batch: tuple[int, int], parallel: Parallel, kind: Any) -> Run:
    return Run(
        model=model,
        train=Train(global_batch_size=batch[0], micro_batch_size=batch[1]),
        parallel=parallel,
        precision=Precision(kind=kind, fp8=Fp8(precise_blocks=0)),
    )


@dataclass(frozen=True)
class Published:
    """A row of a table that others published."""

    table: str
    row: str
    run: Run
    n_devices: int
    machine: Machine
    program: Program | None
    """None: this one."""
    seconds: float | None
    """Of a step; None where they did not measure it."""
    memory: float | None = None
    """Of a device, where they say it; GB as they count, which is GiB."""
    exchanged: float | None = None
    """Bytes of weights and their gradients that a device exchanges in a step, in the same unit."""

    def compare(self) -> dict[str, Any]:
        plan = resolve(self.run, self.n_devices)
        time = step_time(self.run, plan, self.machine, self.program)
        ours = step_time(self.run, plan, self.machine)
        flops = flops_per_token(self.run.model, plan.padded_vocabulary_size, "megatron_causal")
        batch = self.run.train.global_batch_size
        tokens = batch * self.run.model.sequence_length
        return {
            "table": self.table,
            "row": self.row,
            "batch": batch,
            "predicted_seconds": time.seconds,
            "our_seconds": ours.seconds,
            "published_seconds": self.seconds,
            "error": None if self.seconds is None else time.seconds / self.seconds - 1,
            "model_tflops_per_device": flops * tokens / time.seconds / self.n_devices / 1e12,
            "parts": time.parts,
        }

    def compare_sizes(self) -> tuple[float, float]:
        """Plans memory and exchanged weights of a device, in GiB."""
        plan = resolve(self.run, self.n_devices)
        stages = range(plan.topology.pipeline)
        peak = max(rank_memory(self.run, plan, stage).peak_bytes for stage in stages)
        traffic = busiest_rank(self.run, plan)
        exchanged = sum(each.n_bytes for each in traffic if each.axis in ("shard", "replicate"))
        return peak / 2**30, exchanged / 2**30


def gpt(
    layers: int, width: int, heads: int, vocabulary: int = 50257, sequence: int = 2048
) -> Model:
    return Model(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        d_ff=4 * width,
        vocabulary_size=vocabulary,
        sequence_length=sequence,
        dropout=0.0,
    )


FP8_LM = {
    # Devices, batch and layout; then precision, micro batch, samples/s, GB of memory, GB exchanged.
    "7B": (gpt(32, 4096, 32, 100_000), (1, 1), 32, 2048),
    "13B": (gpt(40, 5120, 40, 100_000), (2, 1), 32, 1280),
    "175B": (gpt(96, 12288, 96, 100_000), (8, 4), 128, 2048),
}
FP8_LM_ROWS = (
    ("7B", "bf16", 2, 159.2, 69.6, 37.2),
    ("7B", "fp8", 2, 224.5, 77.3, 37.2),
    ("7B", "fp8_lowbit", 2, 219.8, 49.4, 13.9),
    ("7B", "fp8_lowbit", 4, 230.5, 69.3, 13.9),
    ("13B", "bf16", 2, 79.3, 68.2, 34.3),
    ("13B", "fp8", 2, 111.7, 76.4, 34.3),
    ("13B", "fp8_lowbit", 2, 109.5, 48.9, 12.4),
    ("13B", "fp8_lowbit", 4, 121.5, 67.8, 12.4),
    ("175B", "bf16", 1, 22.4, 66.1, 23.4),
    ("175B", "fp8", 1, 28.7, 69.6, 23.4),
    ("175B", "fp8_lowbit", 1, 27.1, 40.3, 8.2),
    ("175B", "fp8_lowbit", 4, 39.3, 57.7, 8.2),
)


def fp8_lm() -> list[Published]:
    """H100, table in the documentation of MS-AMP; batches of the 7B and 13B are its examples',
    that of 175B is assumed."""
    machine, rows = find_machine("azure-ndv5"), []
    for name, kind, micro, samples, memory, exchanged in FP8_LM_ROWS:
        model, (tensor, pipeline), devices, batch = FP8_LM[name]
        parallel = Parallel(zero_stage=1, tensor=tensor, pipeline=pipeline, sequence=tensor > 1)
        run = make_run(model, (batch, micro), parallel, kind)
        row, seconds = f"{name} {kind}, micro batch {micro}", batch / samples
        how = (devices, machine, MEGATRON_LM, seconds, memory, exchanged)
        rows.append(Published("FP8-LM", row, run, *how))
    return rows


def msamp_345m() -> list[Published]:
    """H100, MS-AMP with 8 GPUs (by the formula of the TFLOP/s beside it): pull request 140."""
    run = make_run(gpt(24, 1024, 16, sequence=1024), (64, 8), Parallel(zero_stage=1), "fp8_lowbit")
    machine = find_machine("azure-ndv5")
    return [Published("MS-AMP", "345M fp8_lowbit", run, 8, machine, MEGATRON_LM, 64 / 519.5)]


def megatron_core() -> list[Published]:
    """H100 bf16, Megatron-Core r0.8; micro batches of 1 and 4 chunks are assumed, and its FLOP
    counted with all of attention."""
    machine, rows = find_machine("azure-ndv5"), []
    for layers, width, heads, tensor, pipeline, devices, batch, tflops in (
        (24, 2048, 16, 1, 1, 48, 192, 408.8),
        (30, 4096, 32, 2, 1, 96, 192, 465.9),
        (32, 6144, 48, 4, 1, 192, 192, 489.1),
        (48, 7168, 56, 8, 1, 384, 192, 459.6),
        (84, 8192, 64, 8, 2, 768, 384, 419.7),
        (92, 10240, 80, 8, 4, 1536, 768, 420.5),
        (96, 12288, 96, 8, 6, 2304, 1152, 432.8),
        (96, 16384, 128, 8, 8, 3072, 1536, 474.4),
        (112, 18432, 144, 8, 16, 6144, 3072, 459.9),
    ):
        model = gpt(layers, width, heads, 131_072, 4096)
        schedule: dict[str, Any] = {"schedule": "interleaved", "chunks": 4} if pipeline > 1 else {}
        parallel = Parallel(
            zero_stage=1, tensor=tensor, pipeline=pipeline, sequence=tensor > 1, **schedule
        )
        run = make_run(model, (batch, 1), parallel, "bf16")
        flops = flops_per_token(model, 131_072, "megatron") * batch * 4096
        seconds = flops / devices / tflops / 1e12
        name = f"{layers} x {width}, tensor {tensor}, pipeline {pipeline}"
        rows.append(Published("Megatron-Core", name, run, devices, machine, MEGATRON_CORE, seconds))
    return rows


def nemo() -> list[Published]:
    """H100 fp8, NeMo 24.12, with the micro batches of its table."""
    machine, rows = find_machine("azure-ndv5"), []
    parallel = Parallel(tensor=4, pipeline=8, chunks=6, schedule="interleaved", sequence=True)
    for devices, batch, micro, tokens in ((128, 256, 1, 716), (512, 2048, 2, 825)):
        run = make_run(gpt(96, 12288, 96), (batch, micro), parallel, "fp8")
        seconds = batch * 2048 / tokens / devices
        rows.append(
            Published("NeMo", f"175B on {devices}", run, devices, machine, MEGATRON_CORE, seconds)
        )
    return rows


def lumi() -> list[Published]:
    """MI250X fp16, 13B with recomputation and micro batches of 2, as in the guide's script."""
    machine, rows = find_machine("lumi"), []
    for devices, pipeline, tensor, stage, samples in (
        (8, 1, 1, 1, 2.686),
        (16, 1, 1, 1, 4.711),
        (16, 1, 1, 2, 5.166),
        (16, 8, 2, 1, 4.498),
        (16, 2, 4, 1, None),
        (16, 4, 2, 1, None),
    ):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, zero_stage=stage, recompute="block")
        run = make_run(gpt(40, 5120, 40), (1024, 2), parallel, "fp16")
        name = f"13B, {devices} GCDs, pipeline {pipeline}, tensor {tensor}, ZeRO {stage}"
        seconds = samples and 1024 / samples
        rows.append(Published("LUMI", name, run, devices, machine, FLASH_ATTENTION, seconds))
    return rows


def lumi_125m() -> list[Published]:
    """The same, 125M: printed as 2/1/4, 8 devices; 16 devices and a vocabulary padded for tensor 2,
    which give its 11.94 TFLOP/s (tensor 1: 11.93), are 2/2/4."""
    machine, rows = find_machine("lumi"), []
    for devices, tensor, samples in ((16, 1, 76.843), (16, 2, 76.843)):
        parallel = Parallel(tensor=tensor, pipeline=2, zero_stage=1, recompute="block")
        run = make_run(gpt(12, 768, 12), (256, 2), parallel, "fp16")
        name = f"125M, {devices} GCDs, pipeline 2, tensor {tensor}"
        seconds = 256 / samples
        rows.append(Published("LUMI", name, run, devices, machine, FLASH_ATTENTION, seconds))
    return rows


def benchmark_175b() -> list[Published]:
    """The benchmark of AI chips, whose 64 GPUs are unnamed: A100 with 80 GB are assumed."""
    run = make_run(gpt(96, 12288, 96), (1536, 1), Parallel(tensor=8, pipeline=8), "fp16")
    machine = find_machine(gpu="a100-80g")
    return [
        Published("64 GPUs", name, run, 64, machine, FLASH_ATTENTION, seconds)
        for name, seconds in (("175B, steps 5 to 10", 346.0), ("175B, step 2400", 315.88))
    ]


COMPOSER_COLUMNS = ("sequence length", "GPUs", "micro batch", "global batch", "tokens/s/GPU")
COMPOSER_SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def composer(program: Program | None = COMPOSER) -> list[Published]:
    """A100 and H100 bf16, MPT with FSDP (ZeRO 3), scripts/train/benchmarking/README.md of
    github.com/mosaicml/llm-foundry at 8c8dd48; rows whose micro batches are unequal are left out.
    50 GB/s for each H100 between nodes is assumed, 25 GB/s for each A100 is said."""
    rows = []
    text = (Path(__file__).parent / "published_fsdp.csv").read_text()
    for line in csv.DictReader(text.splitlines()):
        sequence, n_devices, micro, batch, tokens = (int(line[name]) for name in COMPOSER_COLUMNS)
        model = gpt(*COMPOSER_SHAPES[line["model"]], 50368, sequence)
        parallel = Parallel(zero_stage=3, recompute=line["recompute"])  # type: ignore[arg-type]
        run = make_run(model, (batch, micro), parallel, "bf16")
        machine, seconds = find_machine(gpu=line["gpu"]), batch * sequence / tokens / n_devices
        name = f"{line['model']}, sequences of {sequence}, {n_devices} GPUs"
        rows.append(Published(line["gpu"], name, run, n_devices, machine, program, seconds))
    return rows


def judge_composer(program: Program | None) -> dict[str, Any]:
    """Errors by device."""
    errors: dict[str, list[float]] = {}
    for row in composer(program):
        errors.setdefault(row.table, []).append(row.compare()["error"])
    return {
        table: {
            "rows": len(each),
            "mean_absolute_error": statistics.mean(map(abs, each)),
            "mean_signed_error": statistics.mean(each),
            "largest_absolute_error": max(map(abs, each)),
        }
        for table, each in errors.items()
    }


def fill_gaps(rows: Sequence[dict[str, Any]]) -> None:
    """Scales predictions of what was not measured as those of the rest of the table are off, with
    an error bar of two standard deviations of that."""
    for row in rows:
        ratios = [
            math.log(each["published_seconds"] / each["predicted_seconds"])
            for each in rows
            if each["batch"] == row["batch"]  # LUMI's 13B, without its 125M
            if each["table"] == row["table"] and each["published_seconds"]
        ]
        if row["published_seconds"] is None:
            row["scaled_seconds"] = row["predicted_seconds"] * math.exp(statistics.mean(ratios))
            row["scaled_error_bar"] = 2 * statistics.stdev(ratios)


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Formats rows in samples/s; in brackets how many times as fast as published."""
    lines = [
        "| table | row | published, samples/s | predicted for its program | for Trainyard |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["published_seconds"]:
            lines.append(
                f"| {row['table']} | {row['row']} | {samples(row, 'published_seconds')} | "
                f"{faster(row, 'predicted_seconds')} | {faster(row, 'our_seconds')} |"
            )
    return "\n".join(lines)


def samples(row: dict[str, Any], key: str) -> str:
    return format_figure(row["batch"] / row[key], 4)


def faster(row: dict[str, Any], key: str) -> str:
    return f"{samples(row, key)} ({row['published_seconds'] / row[key]:.2f} x)"


def show_sizes() -> str:
    """Formats memory and exchanged weights of FP8-LM's rows beside Trainyard's."""
    lines = [
        "| row | memory, published | planned | exchanged in a step, published | planned |",
        "|---|---|---|---|---|",
    ]
    for row in fp8_lm():
        assert row.memory and row.exchanged
        memory, exchanged = row.compare_sizes()
        lines.append(
            f"| {row.row} | {row.memory} | {memory:.1f} ({memory / row.memory:.2f} x) | "
            f"{row.exchanged} | {exchanged:.1f} ({exchanged / row.exchanged:.2f} x) |"
        )
    return "\n".join(lines)


def show_gaps(rows: Sequence[dict[str, Any]], multi_node_error: float = 0.1) -> str:
    """Formats what `fill_gaps` filled; the error of multi-node rows adds to the bar."""
    lines = [
        "| pipeline x tensor x data | samples/s, the guide's program | samples/s, Trainyard |",
        "|---|---|---|",
    ]
    for row in rows:
        if row["published_seconds"]:
            continue
        bar = math.hypot(row["scaled_error_bar"], multi_node_error)
        seconds = row["scaled_seconds"]
        low, high = (row["batch"] / (seconds * factor) for factor in (1 + bar, 1 - bar))
        numbers = re.findall(r"(?:pipeline|tensor) (\d+)", row["row"])
        data = 16 // math.prod(map(int, numbers))
        lines.append(
            f"| {' x '.join(numbers)} x {data} | **{row['batch'] / seconds:.1f}** ({low:.1f} to "
            f"{high:.1f}) | {samples(row, 'our_seconds')} |"
        )
    return "\n".join(lines)


def published_rows() -> list[dict[str, Any]]:
    """Compares all tables: those of the guides first."""
    tables = (
        *(msamp_345m(), fp8_lm(), lumi(), lumi_125m(), benchmark_175b()),
        *(megatron_core(), nemo()),
    )
    rows = [row.compare() for table in tables for row in table]
    fill_gaps(rows)
    return rows
