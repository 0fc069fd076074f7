"""Commands of this program in processes of their own, within a budget of time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
TRAINYARD = ["-P", "-c", "from trainyard.cli.main import main; main()"]
LEAST_SECONDS = 20.0  # nothing is started with less left


@dataclass(frozen=True)
class Budget:
    """How long all may take."""

    end: float

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


@dataclass(frozen=True)
class Variant:
    """One thing to time: a model, what differs from its preset, and how it is started."""

    name: str
    model: str
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def run_python(
    arguments: list[str], budget: Budget, environment: dict[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Runs Python; gives exit code (None: out of time), output, and the end of its errors."""
    if budget.left < LEAST_SECONDS:
        return None, "", "not started: no time left"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | (environment or {}),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=budget.left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        output, errors = process.communicate()
        return None, output, "ended: no time left\n" + _end_of(errors)
    return process.returncode, output, _end_of(errors)


def _end_of(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line][-3:]
    return "\n".join([*told, *lines[-6:]])[-2000:]


def bench(variant: Variant, budget: Budget) -> Figures:
    """Times a variant by `trainyard bench`; an error is a result too.

    Args:
        variant: what.
        budget: of time.

    Returns:
        "record", the bench's own, and "seconds"; or "failed", with its last words.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "record.json"
        command = ["bench", variant.model, *variant.overrides, "--ranks", "1"]
        command += [*variant.options, "--output", str(output), "--json"]
        code, _, errors = run_python([*TRAINYARD, *command], budget, variant.environment)
        found: Figures = {
            "variant": variant.name,
            "command": ["trainyard", *command[:-3]],
            "environment": variant.environment,
            "seconds": round(time.monotonic() - start, 1),
        }
        if code == 0 and output.exists():
            found["record"] = json.loads(output.read_text(encoding="utf-8"))
        else:
            how = "out of time" if code is None else f"exit code {code}"
            found["failed"] = how
            found["out_of_memory"] = "not fit into the memory" in errors or "ut of memory" in errors
            found["said"] = errors
    return found
