"""Right results: compiled against eager, the GPU against the CPU, chosen tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.gpu.item import Row, Session
from benchmarks.gpu.runs import building

from trainyard.bench.job import Steps, prepare_run
from trainyard.config.load import load_run
from trainyard.errors import CheckpointError
from trainyard.launch.environment import Process
from trainyard.model.attention import CausalAttention
from trainyard.model.compiled import compile_blocks
from trainyard.model.gpt import GPT, initialize
from trainyard.parallel.mesh import choose_device

SMALL = (
    *("model.d_model=256", "model.n_heads=4", "model.d_ff=512", "model.sequence_length=128"),
    *("model.vocabulary_size=512", "train.micro_batch_size=4", "train.global_batch_size=8"),
)
MODERN = (
    *("model.positions=rotary", "model.norm=rms", "model.mlp=swiglu", "model.bias=false"),
    "model.n_key_value_heads=2",
)
FAMILIES = {
    "gpt3": ("model.dropout=0",),
    "gpt3, dropout": ("model.dropout=0.1",),
    "modern": (*MODERN, "model.dropout=0"),
    "modern, other norms": (
        *(*MODERN, "model.dropout=0", "model.query_key_norm=head"),
        "model.norm_place=after",
    ),
}
STEPS = 5
ROOT = Path(__file__).parents[2]
TESTS = {
    "gpu": ("tests/gpu/test_gpu.py", "fp8_are or wait or kernel or expandable or memory or full"),
    "training": ("tests/training/test_gpu.py", "(equal_the_cpus or resumes) and (bf16 or fp8-)"),
    "rest": ("tests/gpu tests/training/test_gpu.py tests/checkpoint/test_background.py", ""),
}
"""Files and an expression of `pytest -k`."""


def compare_gradients(session: Session) -> Iterator[Row]:
    """Compares every gradient of a compiled block of each family with the eager one."""
    choose_device(Process())
    for name, overrides in FAMILIES.items():
        run = load_run("tiny", [*SMALL, "model.n_layers=1", *overrides]).run
        ids = torch.randint(0, 512, (2, 128), device="cuda")
        seeds = torch.tensor([5, 7], device="cuda") if run.model.dropout else None
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for compiles in (False, True):
                torch._dynamo.reset()
                model = GPT(run.model, 512, dtype)
                initialize(model, 1)
                model.cuda().train()
                for module in model.modules():
                    if isinstance(module, CausalAttention):
                        module.dropout = 0.0  # drawn from the device's generator
                if compiles:
                    compile_blocks(model)
                model.summed_loss(model(ids, seeds), ids, 1 / 256).backward()
                found.append([each.grad for each in model.parameters() if each.grad is not None])
            worst = max(
                ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
                for b, a in zip(*found, strict=True)
            )
            bound = 1e-3 if dtype == torch.float32 else 3e-2
            row = {"row": f"{name}, {str(dtype)[6:]}: largest difference", "found": worst}
            decides = "train.compile=never where wrong"
            row |= {"estimate": bound, "decides": decides}
            yield session.judge(row, is_right=worst < bound)


def compare_losses(session: Session) -> Iterator[Row]:
    """Trains small models on GPU, compiled, and CPU, in fp32: the losses must be the same."""
    for name, overrides in {
        "gpt3": ("model.dropout=0",),
        "modern": (*MODERN, "model.dropout=0"),
        "documents": (
            *("model.dropout=0", "model.attention_within_documents=true"),
            "model.end_of_document_id=3",
        ),
        "muon": ("model.dropout=0", "optimizer.kind=muon"),
    }.items():
        losses = []
        for device in ("cuda", "cpu"):
            losses.append(_losses(overrides, torch.device(device)))
        worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
        row = {"row": f"{name}: largest difference of a loss", "found": worst, "estimate": 1e-4}
        yield session.judge(row, is_right=worst < 1e-3)


def _losses(overrides: tuple[str, ...], device: torch.device) -> list[float]:
    from trainyard.bench.measure import OurTraining, Timeline
    from trainyard.parallel.mesh import build_clock, build_mesh
    from trainyard.training.context import build_context
    from trainyard.training.run_folder import open_run

    with TemporaryDirectory() as name:
        folder = Path(name)
        fixed = (*SMALL, "precision.kind=fp32", "model.n_layers=2", "train.compile=gpu")
        run = prepare_run(load_run("tiny", [*fixed, *overrides]).run, Steps(1, STEPS), folder)
        opened = open_run(folder, 1, run)
        mesh = build_mesh(opened.plan.topology, 0, device)
        context = build_context(opened, mesh, Timeline(build_clock(device)))
        training = OurTraining(context)
        found = [training.step().item() for _ in range(STEPS)]
    torch._dynamo.reset()
    return found


def resume(session: Session) -> Iterator[Row]:
    """Trains deterministically, saves, goes on; loads, goes on: the weights must be the same."""
    from trainyard.training.checkpoints import build_saver, load_state, save_state

    settings = (*SMALL, *MODERN, "model.dropout=0.1", "precision.kind=bf16")
    run = load_run("tiny", [*settings, "train.deterministic=true", "model.n_layers=2"]).run
    with TemporaryDirectory() as name:
        folder = Path(name)
        run = prepare_run(run, Steps(2, 8), folder)
        with building(run, folder) as build:
            first, _, _ = build()
            context, saver = first.context, build_saver(first.context)
            for number in range(4):
                if number == 2:
                    save_state(context, first.state, saver, None)
                first.step()
            saver.wait()
            second, _, _ = build()
            second.state = load_state(second.context)
            for _ in range(2):
                second.step()
            pairs = zip(
                *([e.parameter for e in t.context.model.local_parameters] for t in (first, second)),
                strict=True,
            )
            n_unequal = sum(not torch.equal(a, b) for a, b in pairs)
    torch.use_deterministic_algorithms(False)
    row: Row = {"row": "unequal weights after a resume", "found": n_unequal, "estimate": 0}
    yield session.judge(row, is_right=n_unequal == 0)


def write_greedily(session: Session) -> Iterator[Row]:
    """Generates greedily with one model on the GPU and on the CPU."""
    from trainyard.evaluation.generate import Sampling, generate

    run = load_run("tiny", [*SMALL, *MODERN, "model.n_layers=2"]).run
    choose_device(Process())
    found = []
    for device in ("cpu", "cuda"):
        model = GPT(run.model, 512)
        initialize(model, 1)
        model.to(device).eval()
        sampling = Sampling(temperature=0.0)
        try:
            found.append(generate(model, [[1, 2, 3], [4, 5]], 40, sampling))
        except CheckpointError:  # no numbers: on the fake GPU whatever was in memory
            if not session.fake:
                raise
            found.append(found[0])
    same = sum(a == b for x, y in zip(*found, strict=True) for a, b in zip(x, y, strict=True))
    row: Row = {"row": "equal greedy tokens of 80", "found": same, "estimate": 80}
    yield session.judge(row, is_right=same == 80)


def run_tests(session: Session, which: str) -> Iterator[Row]:
    """Runs chosen tests that need a GPU; a row for each that failed."""
    files, expression = TESTS[which]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x" if session.fake else "-q"]
    command += ["-p", "no:cacheprovider", "--tb=line", *files.split(), "-k", expression]
    if session.fake:
        command.append("--collect-only")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    said = done.stdout.strip().splitlines()
    counts = dict(
        (what, int(count)) for count, what in re.findall(r"(\d+) (\w+)", said[-1] if said else "")
    )
    row: Row = {"row": f"tests that passed: {which}", "found": counts.get("passed", 0), **counts}
    yield session.judge(row, is_right=done.returncode == 0)
    for line in said:
        if line.startswith(("FAILED", "ERROR")):
            yield {"row": "failed test", "found": line[:300]}
