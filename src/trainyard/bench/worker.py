"""One process of a candidate, from the command line; slow imports wait until timing starts.

    python -P -m trainyard.bench.worker FOLDER JOB --spawned-at 1763755200.5 --attempt 0

runs a job on the folder's run as one rank, and writes its results there (`measure.run_job`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.errors import UserError
from trainyard.launch.environment import hide_secrets, read_process
from trainyard.launch.heartbeat import end_with_parent
from trainyard.log import build_logger

if TYPE_CHECKING:
    from trainyard.bench.measure import Builder

REFUSAL = "refusal.json"
"""The message of a lone process for its parent."""

logger = logging.getLogger("trainyard")


def main(import_builder: Callable[[], Builder] | None = None) -> None:
    """Runs one process of a round.

    Args:
        import_builder: imports what builds the training; None: that of `trainyard train`.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("job", help="a BenchJob, as JSON")
    parser.add_argument("--spawned-at", type=float, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--leave-refusal", action="store_true")
    arguments = parser.parse_args()
    startup_seconds = {"process": max(0.0, time.time() - arguments.spawned_at)}
    build_logger(hide_secrets)
    try:
        # Ranks of a round must not see the previous round's keys at the same rendezvous.
        process = replace(read_process(), attempt=arguments.attempt)
        if process.parent_pipe is not None:
            end_with_parent(process.parent_pipe)
        # Training logs all facts about the data.
        logger.setLevel(logging.WARNING if process.rank == 0 else logging.ERROR)
        start = time.perf_counter()
        from trainyard.bench.measure import build_ours, run_job

        build = import_builder() if import_builder else build_ours
        startup_seconds["imports"] = time.perf_counter() - start
        run_job(arguments.folder, arguments.job, process, startup_seconds, build)
    except UserError as error:
        if arguments.leave_refusal:
            refusal = [hide_secrets(error.problem), hide_secrets(error.hint), error.exit_code]
            (arguments.folder / REFUSAL).write_text(json.dumps(refusal), encoding="utf-8")
        else:
            logger.error("error: %s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
