"""The parts of `python -m benchmarks.gpu`: what each times, and what it makes of the figures."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.gpu import kernels
from benchmarks.gpu.commands import TRAINYARD, Figures, Variant, bench, digests, run_python
from benchmarks.gpu.session import NO_DROPOUT, OWN_DROPOUT, Rung, Session

Write = Callable[[Figures], None]
FEW_SEQUENCES = 4
"""With micro batches this large, none with recomputing are tried."""
GPU_TESTS = ("tests/gpu", "tests/training/test_gpu.py", "tests/checkpoint/test_background.py")


def ceiling(session: Session, write: Write) -> None:
    """Measures what the device reaches without a model."""
    arguments = ["-m", "benchmarks.gpu.ceiling", *(["--small"] if session.small else [])]
    code, output, errors = run_python(arguments, session.budget)
    if code != 0:
        write({"failed": code, "said": errors})
        return
    found = json.loads(output.strip().splitlines()[-1])
    session.ceiling = found["tflops_per_second"]["bf16"]["large"]
    write(found)


def sizes(session: Session, write: Write) -> None:
    """Finds each size's fastest micro batch and recomputation, by MFU; then adds dropout."""
    items: list[Figures] = []
    summary: dict[str, Figures] = {}
    for size in session.sizes:
        for rung, found in _climb(session, size):
            items.append({"size": size, "rung": rung, **found})
            for figures in digests(found):
                known = summary.get(size)
                if known is None or figures["tokens_per_second"] > known["tokens_per_second"]:
                    summary[size] = {
                        "rung": rung,
                        **figures,
                        **_against_aim(session, size, figures),
                    }
                    session.best[size] = rung
            write({"ceiling_tflops": session.ceiling, "summary": summary, "items": items})
        if size in summary:
            found = bench(session.variant(f"{size} dropout", size, OWN_DROPOUT), session.budget)
            items.append({"size": size, "rung": session.rung(size), **found})
            summary[size]["with_dropout"] = next(iter(digests(found)), None)
            write({"ceiling_tflops": session.ceiling, "summary": summary, "items": items})


def _climb(session: Session, size: str) -> Iterable[tuple[Rung, Figures]]:
    """The largest micro batch that fits without recomputing; with it, where that is small."""
    best_micro = 0
    for recompute, micros in session.sizes[size].ladder.items():
        if best_micro >= FEW_SEQUENCES or (recompute == "block" and best_micro):
            return
        for micro in micros:
            name = f"{size} {recompute} {micro}"
            rung = (recompute, micro)
            found = bench(session.variant(name, size, rung=rung), session.budget)
            yield rung, found
            if "record" in found:
                best_micro = max(best_micro, micro)
                break


def _against_aim(session: Session, size: str, figures: Figures) -> Figures:
    aim, rate = session.sizes[size].aim, figures["tflops_per_second"]
    return {
        "aim": aim,
        "reached": None if aim is None else (figures["model_flops_utilization"] or 0) >= aim,
        "of_ceiling": round(rate / session.ceiling, 6) if session.ceiling else None,
    }


def precision(session: Session, write: Write) -> None:
    """Sets fp8 and fp8_lowbit against bf16: speed and memory."""
    emulate = ("precision.fp8.emulate=true",) if session.small else ()
    rowwise = ("precision.fp8.scaling=rowwise", *emulate)
    items: list[Figures] = []
    summary: dict[str, Figures] = {}
    variants = (
        ("bf16", "bf16", (), 1),
        ("fp8 tensorwise", "fp8", emulate, 1),
        ("fp8_lowbit", "fp8_lowbit", emulate, 1),
        ("fp8_lowbit, larger micro batches", "fp8_lowbit", emulate, 2),
        ("fp8 rowwise", "fp8", rowwise, 1),
    )
    sizes = ("6.7B",) if session.small else ("6.7B", "1.3B")
    for size, (name, kind, overrides, times) in itertools.product(sizes, variants):
        recompute, micro = session.rung(size)
        rung = (recompute, times * micro)
        variant = session.variant(f"{size} {name}", size, *overrides, rung=rung, kind=kind)
        found = bench(variant, session.budget)
        items.append({"size": size, "precision": name, "rung": rung, **found})
        for figures in digests(found):
            row = summary.setdefault(size, {})
            row[name] = figures
            if "bf16" in row:
                row[name] |= _ratios(figures, row["bf16"])
        write({"aims": {"speed": 1.35, "memory": -0.35}, "summary": summary, "items": items})


def _ratios(figures: Figures, base: Figures) -> Figures:
    memory = figures["peak_memory_bytes"] / base["peak_memory_bytes"] - 1
    return {
        "times_bf16": round(figures["tokens_per_second"] / base["tokens_per_second"], 4),
        "memory_against_bf16": round(memory, 4),
    }


def peers(session: Session, write: Write) -> None:
    """Runs each peer in turn with ours; the fastest of each counts."""
    items: list[Figures] = []
    summary: dict[str, dict[str, Figures]] = {}
    compiled = "train.compile=never" if session.small else "train.compile=gpu"
    candidates = (
        ("transformers", compiled, False),
        ("plain-torch", compiled, False),
        ("megatron-core", compiled, True),
        ("transformers", "train.compile=never", False),
    )
    for size in [size for size in ("1.3B", "350M") if size in session.sizes]:
        for peer, compiling, recomputes in candidates:
            name = peer + (", eager" if compiling.endswith("never") else "")
            for rung in _peer_rungs(session.rung(size)[1], recomputes):
                options = ("--against", peer, "--rounds", "1")
                variant = session.variant(
                    f"{size} {name} {rung[0]} {rung[1]}",
                    size,
                    compiling,
                    rung=rung,
                    options=options,
                )
                found = bench(variant, session.budget)
                items.append({"size": size, "peer": name, "rung": rung, **found})
                for figures, who in zip(digests(found), ("ours", name), strict=False):
                    best = summary.setdefault(size, {})
                    known = best.get(who, {"tokens_per_second": 0.0})
                    if figures["tokens_per_second"] > known["tokens_per_second"]:
                        best[who] = {"rung": rung, **figures}
                _compare(summary)
                write({"summary": summary, "items": items})
                if "record" in found and not recomputes:
                    break


def _peer_rungs(micro: int, recomputes: bool) -> list[Rung]:
    sizes = [size for size in (micro, micro // 2, micro // 4) if size]
    rungs = [("none", size) for size in sizes]
    # Its attention keeps all scores unless it computes them again.
    return [("attention", sizes[min(1, len(sizes) - 1)]), rungs[-1]] if recomputes else rungs


def _compare(summary: dict[str, dict[str, Figures]]) -> None:
    for rows in summary.values():
        ours = rows["ours"]["tokens_per_second"] if "ours" in rows else None
        for who, row in rows.items():
            if ours is not None and who != "ours":
                row["ours_over_this"] = round(ours / row["tokens_per_second"], 4)


def trials(session: Session, write: Write) -> None:
    """Tries what might help at 1.3B, one change at a time; what did not help is told so."""
    size = "1.3B"
    micro = session.rung(size)[1]
    profile = ("--profile",)
    on = "1"
    listed: list[Variant] = [session.variant("as it is", size, options=profile)]
    for name, environment in (
        ("max-autotune", {"TORCHINDUCTOR_MAX_AUTOTUNE": on}),
        ("CUDA graphs of inductor", {"TORCHINDUCTOR_CUDAGRAPHS": on}),
        ("coordinate descent", {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": on}),
        ("no expandable segments", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    ):
        listed.append(session.variant(name, size, environment=environment))
    for name, overrides in (
        ("nothing compiled", ("train.compile=never",)),
        ("head not padded", ("model.vocabulary_multiple=1",)),
        ("attention computed again", ("parallel.recompute=attention",)),
        ("blocks computed again", ("parallel.recompute=block",)),
        ("micro batches of half", (f"train.micro_batch_size={max(1, micro // 2)}",)),
        ("micro batches of a quarter", (f"train.micro_batch_size={max(1, micro // 4)}",)),
    ):
        listed.append(session.variant(name, size, *overrides))
    items: list[Figures] = []
    summary: list[Figures] = []
    for variant in listed:
        found = bench(variant, session.budget)
        items.append(found)
        for figures in digests(found):
            base = summary[0]["tokens_per_second"] if summary else figures["tokens_per_second"]
            gain = figures["tokens_per_second"] / base - 1
            verdict = "helps" if gain > 0.01 else "does not help"
            verdict = verdict if summary else "the base"
            summary.append(
                {"trial": variant.name, "gain": round(gain, 4), "verdict": verdict} | figures
            )
        if "record" not in found:
            summary.append(
                {"trial": variant.name, "verdict": found["failed"], "tokens_per_second": 0.0}
            )
            if len(summary) == 1:
                summary.clear()  # without a base nothing can be compared with it
        write({"size": size, "summary": summary, "items": items})


def budget(session: Session, write: Write) -> None:
    """Takes the fastest variants apart, kernel by kernel, and counts what the host waits for."""
    items: list[Figures] = []
    summary: dict[str, Figures] = {}
    for size in ("1.3B", "6.7B"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            variant = session.variant(f"{size} profile", size, options=("--profile",))
            found = bench(variant, session.budget, keep=folder)
            items.append({"size": size, **found})
            for figures in digests(found):
                candidate = found["record"]["candidates"][0]
                step = figures["milliseconds_per_step"]
                profile = candidate["profile"]
                traces = list(folder.glob("*trace.json"))
                rows = kernels.read_kernels(traces[0]) if traces else []
                told = (
                    kernels.add_up(rows, step)
                    if rows
                    else kernels.add_up_operators(profile["operators"], step)
                )
                summary[size] = {
                    **figures,
                    "where_time_goes": told,
                    "host_waits_per_step": profile["host_waits_per_step"],
                    "host_reads_per_step": profile["host_reads_per_step"],
                }
        write({"summary": summary, "items": items})


def accuracy(session: Session, write: Write) -> None:
    """Trains 1,000 steps of 350M on real text in bf16, fp8 and fp8_lowbit."""
    if not session.data:
        write({"skipped": "no token files were given: --data PREFIX"})
        return
    size = "350M" if "350M" in session.sizes else next(iter(session.sizes))
    n_steps, micro, preset = (20, 4, "tiny") if session.small else (1000, 16, "gpt3-350m")
    # Whatever made the token files, the rehearsal's model is to have their vocabulary.
    small = ["model.vocabulary_size=51200"] if session.small else []
    emulate = ["precision.fp8.emulate=true"] if session.small else []
    summary: dict[str, Figures] = {}
    items: list[Figures] = []
    for kind in ("bf16", "fp8", "fp8_lowbit"):
        name = f"gpu-accuracy-{kind}"
        overrides = [
            f"name={name}",
            f"data.blend.prefixes={list(session.data)}",
            f"precision.kind={kind}",
            *(emulate if kind != "bf16" else []),
            *session.sizes[size].overrides,
            *small,
            *(NO_DROPOUT, f"train.micro_batch_size={micro}", f"train.global_batch_size={micro}"),
            *(f"train.length='{n_steps} steps'", f"schedule.decay='{n_steps} steps'"),
            *(f"schedule.warmup='{n_steps // 10} steps'", "train.batch_ramp=none"),
            *("evaluate.batches=0", "checkpoint.interval=0", "log.tensorboard=false"),
        ]
        command = ["train", preset, *overrides, "--resume", "never", "--ranks", "1"]
        code, _, errors = run_python([*TRAINYARD, *command], session.budget)
        losses = _losses(Path("runs") / name / "metrics.jsonl") if code == 0 else []
        items.append({"precision": kind, "command": ["trainyard", *command], "losses": losses})
        if not losses:
            items[-1] |= {"failed": code, "said": errors}
        else:
            last = losses[-max(1, len(losses) // 10) :]  # a single step's loss is noise
            final = sum(loss for _, loss in last) / len(last)
            summary[kind] = {"final_loss": final}
            if "bf16" in summary:
                difference = final / summary["bf16"]["final_loss"] - 1
                summary[kind] |= {"against_bf16": difference, "reached": abs(difference) < 0.005}
        write({"aim": 0.005, "steps": n_steps, "summary": summary, "items": items})


def _losses(metrics: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row and "step" in row]


def tests(session: Session, write: Write) -> None:
    """Runs the tests that need a GPU."""
    command = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *GPU_TESTS]
    if session.small:
        command.append("--collect-only")
    code, output, errors = run_python(command, session.budget)
    said = output.strip().splitlines()
    counts = re.findall(
        r"(\d+) (passed|failed|skipped|errors?|deselected)", said[-1] if said else ""
    )
    write(
        {
            "exit_code": code,
            "counts": {what: int(count) for count, what in counts},
            "said": "\n".join(said[-40:])[-6000:],
            "errors": errors,
        }
    )


PARTS: dict[str, Callable[[Session, Write], None]] = {
    "ceiling": ceiling,
    "sizes": sizes,
    "precision": precision,
    "tests": tests,
    "budget": budget,
    "peers": peers,
    "trials": trials,
    "accuracy": accuracy,
}
