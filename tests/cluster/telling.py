"""A run on machines of `machines.py`, told line by line: commands, output, the log of its job."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import WATCHDOG_SECONDS

from .machines import Machines

NOISE = re.compile("^      File|hread|hostname of the client socket")
N_BETWEEN = 15
N_SHOWN = 12


@dataclass
class Told:
    """A project on these machines, one run of it, and where its lines go."""

    project: Path
    machines: Machines
    show: Callable[[str], None]
    name: str
    """Of the run."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of what is typed."""
    log_length: int = field(default=0)

    @property
    def folder(self) -> Path:
        return self.project / "runs" / self.name

    def type(self, line: str, shown: str = "") -> str:
        """Types a line of bash on the login machine; it must succeed.

        Args:
            shown: the line as it is shown, where that is another.
        """
        self.show(f"$ {shown or line}")
        done = self.machines.run(
            ["bash", "-c", line], folder=self.project, environment=self.environment
        )
        answers = list(filter(is_told, (done.stdout + done.stderr).splitlines()))
        for answer in answers[:N_SHOWN]:
            self.show(f"    {answer}")
        if len(answers) > N_SHOWN:
            self.show(f"    .. {len(answers) - N_SHOWN} more lines")
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def step(self) -> int:
        """The last step that the run has logged."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines()[-3:] if path.exists() else []
        return max((json.loads(e)["step"] for e in lines if e.endswith("}")), default=0)

    def count(self, event: str) -> int:
        """How often its script has noted a `start`, an `end`, or that nodes were `lost`."""
        path = self.folder / "starts.log"
        return path.read_text().count(f" {event} ") if path.exists() else 0

    def is_done(self) -> bool:
        return (self.folder / "outcome.json").exists()

    def follow(self, what: str, holds: Callable[[], bool]) -> None:
        """Shows the job's log until something has come true."""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while not holds():
            self.show_log()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so: {what}\n{self.machines.log_ends()}")
            time.sleep(0.3)
        self.show_log()

    def logs(self) -> list[Path]:
        """The logs of its jobs, in order."""
        return sorted(self.folder.glob("job-*.log"))

    def show_log(self) -> None:
        logs = self.logs()
        text = "".join(path.read_text(errors="replace") for path in logs)
        end = text.rfind("\n") + 1
        for line in text[self.log_length : end].splitlines():
            if is_told(line):
                self.show(f"  | {line}")
        self.log_length = end

    def train_on(self) -> None:
        """Follows it until it has come on by some steps."""
        before = self.step()
        self.follow("it trains", lambda: self.step() >= before + N_BETWEEN)


def is_told(line: str) -> bool:
    """Every twentieth step, and what else is worth a line."""
    step = re.match(r"step +([\d,]+)(?: of |/)", line)
    return (step is None or int(step[1].replace(",", "")) % 20 == 0) and not NOISE.search(line)
