"""One training process: opens the run folder, joins the other ranks, builds the context, trains.

    python -m trainyard.training.worker runs/my-run --resume auto

Everything comes from `run.toml` in the folder, so nothing else must match across ranks.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from pathlib import Path
from typing import get_args

import torch

from trainyard.checkpoint.background import check_saving
from trainyard.checkpoint.format import list_checkpoints
from trainyard.config.load import render_run
from trainyard.config.run import Recompute
from trainyard.errors import UserError
from trainyard.launch.environment import hide_secrets, read_process, refuse_missing_devices
from trainyard.launch.heartbeat import Heartbeat
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.log import build_logger
from trainyard.model.attention import CUDNN
from trainyard.model.compiled import Trial, compare_compiled_once
from trainyard.parallel.mesh import build_mesh, choose_device, explain_device_errors
from trainyard.parallel.model import choose_attention, compiles_blocks
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.precision.block_scaled import torch_dtype
from trainyard.precision.float8 import refuse_device
from trainyard.precision.policy import warn_of_slow_precision
from trainyard.training.checkpoints import load_state
from trainyard.training.context import build_context, hash_new_token_files
from trainyard.training.loop import train_to_the_end
from trainyard.training.metrics import LogLines
from trainyard.training.run_folder import (
    OpenRun,
    Resume,
    checkpoint_folder,
    open_run,
    refuse_unsupported,
)
from trainyard.training.stop import StopReason

logger = logging.getLogger("trainyard")


def run_worker(opened: OpenRun, resume: Resume = "auto", log: LogLines = "short") -> StopReason:
    """Trains a run from its newest checkpoint, or from the beginning.

    Args:
        opened: its folder holds run.toml; all output goes there.
        resume: "auto" resumes if there is a checkpoint; "must" requires one, "never" forbids one.
        log: "short" log lines have the essential metrics, "full" ones all.

    Returns:
        why training ended, `DONE` at the end of the plan; the first rank writes it to outcome.json.

    Raises:
        UserError: the run, its data or its checkpoint is unusable; a GuardError: training aborted.
    """
    run, plan, files, process = opened.run, opened.plan, opened.files, read_process()
    heartbeat = Heartbeat(
        process.heartbeat, 60 * run.guard.step_timeout_minutes, 60 * run.guard.slow_timeout_minutes
    )
    heartbeat.enter("start", 0)
    if process.rank > 0:
        logger.setLevel(logging.ERROR)  # rank 0 logs for all
    refuse_unsupported(run)
    refuse_missing_devices(torch.cuda.device_count())
    device = choose_device(process, run)
    refuse_device(run, device)

    def facts() -> dict[str, str]:
        if process.rank == 0:  # here, so that its error reaches all ranks
            _check_first_rank(opened, resume, device)
        newest = next(iter(list_checkpoints(checkpoint_folder(opened.folder))), None)
        return gather_facts(render_run(run), files.data_checksum) | {
            "checkpoint": newest.name if newest else "none",
            "tokenizer": files.vocabulary.fingerprint if files.vocabulary else "none",
        }

    if process.n_ranks == 1:
        _check_first_rank(opened, resume, device)
    with start_ranks(process, device, facts), explain_device_errors(run, plan, device):
        warn_of_slow_precision(run, device)
        mesh = build_mesh(plan.topology, process.rank, device)
        hash_new_token_files(run, mesh, heartbeat, keeps=process.local_rank == 0)
        context = build_context(opened, mesh, heartbeat)
        heartbeat.enter("load", 0)
        return train_to_the_end(context, load_state(context, files), log)


def _check_first_rank(opened: OpenRun, resume: Resume, device: torch.device) -> None:
    """Raises an error if `resume` does not fit, or a checkpoint or compiled block is wrong."""
    run = opened.run
    check_saving(checkpoint_folder(opened.folder), checkpoint_bytes(run, opened.plan.n_parameters))
    opened.files.find_checkpoint(resume)
    if compiles_blocks(run, device):
        dtype = torch_dtype(run.precision.formats.compute)
        takes_cudnn = choose_attention(run, dtype, device) == CUDNN
        kinds: list[Recompute] = [run.parallel.recompute, "none"]
        for recompute in kinds[: 1 + (run.parallel.recompute_share < 1)]:
            trial = Trial(run.model, dtype, recompute, device, takes_cudnn)
            compare_compiled_once(trial, Path(run.data.cache_folder))


def main() -> None:
    """Runs one worker from the command line, as a launcher does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", choices=get_args(Resume), default="auto")
    parser.add_argument("--log", choices=get_args(LogLines), default="short")
    arguments = parser.parse_args()
    build_logger(hide_secrets)
    try:
        opened = open_run(arguments.folder, read_process().n_ranks)
        code = run_worker(opened, arguments.resume, arguments.log).exit_code
    except UserError as error:
        logger.error("error: %s", error)
        code = error.exit_code
    except Exception:
        logger.error("%s", traceback.format_exc())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
