"""One local rank of an examination, started by `trainyard doctor --ranks`.

    python -P -m trainyard.doctor.worker FOLDER

executes FOLDER/order.json; rank 0 writes the results of all ranks to FOLDER/found.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from trainyard.doctor.examine import Examination, Order, examine
from trainyard.errors import UserError
from trainyard.launch.environment import hide_secrets, read_process
from trainyard.launch.local import run_ranks
from trainyard.log import build_logger

ORDER, FOUND = "order.json", "found.json"
logger = logging.getLogger("trainyard")


def examine_in_processes(n_ranks: int, order: Order, folder: Path) -> list[Examination]:
    """Examines this machine with `n_ranks` processes.

    Args:
        n_ranks: at least 2.
        order: the settings.
        folder: for the files that they read and write.

    Raises:
        MachineError: one failed; includes its rank and output.
    """
    values = asdict(order) | {"runs": str(order.runs)}
    (folder / ORDER).write_text(json.dumps(values), encoding="utf-8")
    watched = [sys.executable, "-P", "-m", "trainyard.launch.watched"]
    command = [*watched, "trainyard.doctor.worker", str(folder)]
    run_ranks(n_ranks, command, folder / "logs")
    texts = json.loads((folder / FOUND).read_text(encoding="utf-8"))
    return [Examination.parse(text) for text in texts]


def main() -> None:
    """Runs one rank from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    build_logger(hide_secrets)
    values = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    lists = tuple(values.pop("cpu_lists"))
    order = Order(**values | {"runs": Path(values["runs"]), "cpu_lists": lists})
    process = read_process()
    try:
        found = examine(process, order)
    except UserError as error:
        logger.error("error: %s", error)
        sys.exit(error.exit_code)
    if process.rank == 0:
        texts = [each.render() for each in found]
        (folder / FOUND).write_text(json.dumps(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
