"""One training process: reads the run folder, builds the parts, trains, and says how it ended.

    python -m trainyard.train.worker runs/my-run --resume auto

Everything comes from `run.toml` in the folder; there is nothing else to keep equal on many ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.resume import check_resumable
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.data.loader import Loader, build_orders, data_fingerprint, data_prefixes
from trainyard.data.publish import publish_text
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import Tokenizer, load_tokenizer
from trainyard.errors import ConfigError, UserError
from trainyard.launch.environment import read_process, read_versions
from trainyard.log import build_logger, show_progress
from trainyard.model.gpt import GPT, compile_blocks
from trainyard.model.init import initialise
from trainyard.optim.adamw import build_adamw
from trainyard.plan.batches import BatchSchedule
from trainyard.plan.hardware import cpu_multiplies_bf16_natively
from trainyard.plan.resolve import Plan, resolve
from trainyard.train.allocator import keep_freed_memory
from trainyard.train.checkpoints import Resume, find_checkpoint, load_state
from trainyard.train.guard import Guard
from trainyard.train.loop import train
from trainyard.train.metrics import Metrics
from trainyard.train.state import Parts, State
from trainyard.units import format_large

logger = logging.getLogger("trainyard")

Show = Callable[[int, str], None]
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_worker(folder: Path, resume: Resume = "auto") -> str:
    """Trains the run of a folder from its newest checkpoint, or from the beginning.

    Args:
        folder: holds run.toml; everything else is written here.
        resume: "auto" continues if there is a checkpoint, "must" insists on one, "never" on none.

    Returns:
        why training ended, "done" at the end of the plan.

    Raises:
        UserError: the run, its data or its checkpoint is not usable.
    """
    run = load_run(str(folder / "run.toml")).run
    process = read_process()
    plan = resolve(run, process.n_ranks)
    refuse_what_is_not_built(run, plan)
    device = _choose_device(process.local_rank)
    _warn_of_slow_precision(run, device)
    parts = build_parts(folder, run, plan, device)
    state = load_state(parts, resume)
    _write_facts(folder, plan)
    metrics = Metrics(parts)
    metrics.write("start", {"step": state.step, "resumed": state.step > 0, "device": str(device)})
    guard = Guard(run.train.stop_after_minutes)
    try:
        with guard.catch_signals(), show_training(state.step, plan.n_steps) as show:
            show(state.step, _describe(parts, state))
            reason = train(parts, state, metrics, guard, show)
            metrics.write("end", {"step": state.step, "reason": reason})
            show(state.step, f"{reason}: step {state.step} is saved in {folder / 'checkpoints'}")
    finally:
        metrics.close()
    return reason


def write_run_folder(folder: Path, run: Run, resume: Resume) -> None:
    """Writes run.toml for the workers, once everything that can be checked before is in order.

    Raises:
        UserError: the run cannot be trained here, or differs from the one already in the folder.
    """
    refuse_what_is_not_built(run, resolve(run))
    fingerprint = data_fingerprint(run)
    checkpoint = find_checkpoint(folder, resume)
    if checkpoint is not None:
        check_resumable(read_manifest(checkpoint), run, fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    publish_text(folder / "run.toml", render_run(run))


def build_parts(folder: Path, run: Run, plan: Plan, device: torch.device) -> Parts:
    """Builds model, optimizer and data; checks that data, tokenizer and model belong together."""
    tokenizer = load_tokenizer(Path(run.tokenizer.path)) if run.tokenizer.path else None
    _check_vocabularies(run, tokenizer)
    batches = BatchSchedule(run)
    orders = build_orders(run, plan, ("train", "valid"))
    if orders["train"] is None:
        raise ConfigError(
            f"data.split={run.data.split!r} leaves no sequences for training",
            "give the first share more than 0",
        )
    if device.type == "cpu":
        keep_freed_memory()
    model = build_model(run, plan, device)
    return Parts(
        folder=folder,
        run=run,
        plan=plan,
        batches=batches,
        device=device,
        model=model,
        optimizer=build_adamw(model, run.optimizer),
        train_data=Loader(
            orders["train"],
            batches,
            run.model.vocabulary_size,
            pin_memory=device.type == "cuda",
        ),
        valid_order=orders["valid"],
        tokenizer=tokenizer,
        data_fingerprint=data_fingerprint(run),
    )


def build_model(run: Run, plan: Plan, device: torch.device) -> GPT:
    """Builds the model with its initial weights."""
    dtype = COMPUTE_DTYPES[run.precision.kind]
    model = GPT(run.model, plan.padded_vocabulary_size, dtype, run.parallel.recompute)
    initialise(model, run.model, run.train.seed)
    model.to(device).train()
    if run.train.compile == "always" or (run.train.compile == "gpu" and device.type == "cuda"):
        compile_blocks(model)
    return model


def refuse_what_is_not_built(run: Run, plan: Plan) -> None:
    """Refuses runs that this version can describe but not train.

    Raises:
        ConfigError: names the field.
    """
    if run.precision.kind not in COMPUTE_DTYPES:
        raise ConfigError(
            f"precision.kind={run.precision.kind!r} cannot be trained yet",
            "precision.kind=bf16 and precision.kind=fp32 can",
        )
    if plan.n_ranks > 1:
        raise ConfigError(
            f"this run is cut over {plan.n_ranks} ranks (parallel.tensor={run.parallel.tensor}, "
            f"pipeline={run.parallel.pipeline}, context={run.parallel.context}); "
            "training on several ranks is not built yet",
            "for one process: parallel.tensor=1 parallel.pipeline=1 parallel.context=1",
        )


@contextmanager
def show_training(first_step: int, n_steps: int) -> Iterator[Show]:
    """Yields a function that shows a line of training, with a progress bar on a terminal."""
    with show_progress("training", plain_lines=False) as update:

        def show(step: int, text: str) -> None:
            logger.info("%s", text)
            update(step, n_steps, f"step {step}")

        update(first_step, n_steps)
        yield show


def _choose_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _warn_of_slow_precision(run: Run, device: torch.device) -> None:
    if run.precision.kind == "bf16" and device.type == "cpu" and not cpu_multiplies_bf16_natively():
        logger.warning(
            "this processor has no bf16 products: precision.kind=fp32 is several times as fast here"
        )


def _check_vocabularies(run: Run, tokenizer: Tokenizer | None) -> None:
    """The tokenizer must fit the model, and be the one that made every token file."""
    if tokenizer is not None and tokenizer.vocabulary_size > run.model.vocabulary_size:
        raise ConfigError(
            f"tokenizer.path={run.tokenizer.path!r} has {tokenizer.vocabulary_size} tokens, "
            f"model.vocabulary_size={run.model.vocabulary_size} is smaller",
            f"model.vocabulary_size={tokenizer.vocabulary_size}",
        )
    for prefix in data_prefixes(run):
        if not Path(f"{prefix}.json").exists():  # made by Megatron-LM: nothing is known of it
            continue
        sidecar = load_sidecar(prefix)
        sidecar.check_sizes(prefix)
        if tokenizer is not None:
            sidecar.check_against(tokenizer, prefix)
        if sidecar.tokenizer.vocabulary_size > run.model.vocabulary_size:
            raise ConfigError(
                f"{prefix} was made with a vocabulary of {sidecar.tokenizer.vocabulary_size} "
                f"tokens, model.vocabulary_size={run.model.vocabulary_size} is smaller",
                f"model.vocabulary_size={sidecar.tokenizer.vocabulary_size}",
            )


def _write_facts(folder: Path, plan: Plan) -> None:
    for name, facts in (("plan", plan.as_json()), ("versions", read_versions())):
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _describe(parts: Parts, state: State) -> str:
    run, plan = parts.run, parts.plan
    start = f"resumes at step {state.step}" if state.step else "starts"
    return (
        f"{run.name} {start}: {plan.n_parameters:,} parameters, {plan.n_steps} steps, "
        f"{format_large(plan.n_tokens)} tokens, {run.precision.kind} on {parts.device}"
    )


def main() -> None:
    """Runs one worker from the command line, as a launcher does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", choices=get_args(Resume), default="auto")
    arguments = parser.parse_args()
    build_logger()
    try:
        run_worker(arguments.folder, arguments.resume)
    except UserError as error:
        logger.error("error: %s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
