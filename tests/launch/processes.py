"""Looking at processes from outside, and waiting for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import WATCHDOG_SECONDS

SUPERVISOR = str(Path(__file__).parent / "supervisor.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and not yet collected by whoever has to


def process_ids(folder: Path) -> list[int]:
    texts = [path.read_text() for path in sorted(folder.glob("*.pid"))]
    return [int(text) for text in texts if text]  # else it is being written


def clean_environment(folder: Path) -> dict[str, str]:
    """Without what an outer launcher set; what a killed process leaves is pytest's to remove."""
    prefixes = ("PMI_", "MASTER", "TRAINYARD_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


@dataclass
class Done:
    """A command that has ended."""

    code: int
    said: str


def finish(running: subprocess.Popen[str], folder: Path) -> Done:
    """Waits for a supervisor; nothing may be left of its workers."""
    try:
        said, _ = running.communicate(timeout=WATCHDOG_SECONDS)
    finally:
        running.kill()
    assert not any(map(is_running, process_ids(folder))), said
    return Done(running.returncode, said)


def start(folder: Path, n_ranks: int, wanted: str, *launcher: str) -> subprocess.Popen[str]:
    """Starts a supervisor of small workers; its output and theirs come together."""
    argv = [*launcher, SUPERVISOR] if launcher else [sys.executable, SUPERVISOR]
    return subprocess.Popen(
        [*argv, str(folder), str(n_ranks), wanted],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(folder.parent),
    )


def wanted(*faults: list[Any], **more: Any) -> str:
    """What workers are to do: ten steps, with some faults."""
    return json.dumps({"n_steps": 10, "faults": faults} | more)


def starts(folder: Path) -> list[int]:
    """The step at which each start of rank 0 began."""
    return [int(path.read_text()) for path in sorted((folder / "starts-0").iterdir())]
