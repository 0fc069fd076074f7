"""`trainyard train` without what it checks first: holds the lock, and supervises small workers.

python supervisor.py RUN_FOLDER N_RANKS WHAT_THE_WORKERS_DO
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from trainyard.errors import UserError
from trainyard.launch.environment import read_process
from trainyard.launch.lock import hold
from trainyard.launch.supervise import SupervisedJob, supervise
from trainyard.log import build_logger

PROGRAM = str(Path(__file__).parent / "pulsing_rank.py")


def main() -> None:
    folder, n_ranks, wanted = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    build_logger()
    process = read_process()
    command = [sys.executable, PROGRAM, str(folder), wanted]
    try:
        with ExitStack() as closing:
            locks = closing.enter_context(hold(folder, 0.5)) if process.rank == 0 else []
            sys.exit(
                supervise(SupervisedJob(process, n_ranks, folder, lambda _attempt: command, locks))
            )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
