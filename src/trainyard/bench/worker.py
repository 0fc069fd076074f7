"""One process of a candidate, from the command line; slow imports wait until timing starts.

    python -P -m trainyard.bench.worker FOLDER --spawned-at 1763755200.5 --attempt 0

runs the folder's job as one rank, and writes its results there (`session.py`).
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from trainyard.bench.start import StartupTimes
from trainyard.errors import UserError
from trainyard.launch.environment import hide_secrets, read_process
from trainyard.launch.heartbeat import end_with_parent
from trainyard.log import build_logger

logger = logging.getLogger("trainyard")


def main() -> None:
    """Runs one process for `rounds`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--spawned-at", type=float, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--leave-refusal", action="store_true")
    arguments = parser.parse_args()
    start = StartupTimes(arguments.spawned_at)
    build_logger(hide_secrets)
    try:
        # Ranks of a round must not see the previous round's keys at the same rendezvous.
        process = replace(read_process(), attempt=arguments.attempt)
        if process.parent_pipe is not None:
            end_with_parent(process.parent_pipe)
        # Training logs all facts about the data.
        logger.setLevel(logging.WARNING if process.rank == 0 else logging.ERROR)
        with start.timing("imports"):
            from trainyard.bench.session import run_job
        run_job(arguments.folder, process, start)
    except UserError as error:
        if arguments.leave_refusal:
            from trainyard.bench.job import leave_refusal

            leave_refusal(error, arguments.folder)
        else:
            logger.error("error: %s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
