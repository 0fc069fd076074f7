"""A run on a real Slurm, from raw text to the last step, with all that befalls it on the way.

    python -m tests.cluster.story > story.txt

Three machines (machines.py) are the nodes. One command submits the preparation of the corpus, an
array of jobs, and training on two nodes after it. Then a more urgent job takes the nodes away, and
machines die, one of them twice. What is done stands after `$` and `>>>`, with what it said below;
lines of the job's own log after `|`. Seconds are those of this machine: Slurm is set to give up a
silent node after 15 s, and `SlurmdTimeout` of most clusters is 300.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import WATCHDOG_SECONDS

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.jobs.submission import read_submission

from .launching import read_losses, trainyard, write_cluster
from .machines import Machines
from .slimpajama import WORDS, write_slimpajama
from .slurm import Slurm

N_STEPS = 600
N_BETWEEN = 15
NOISE = re.compile("^      File|hread|hostname of the client socket")
LAUNCH = "launch run.toml --cluster basement.toml --nodes 2 --stages all"
RUN = f"""\
extends = "tiny"
name = "story"

[model]
d_model = 32
d_ff = 64
n_heads = 2
sequence_length = 32
vocabulary_size = 300
dropout = 0.1

[tokenizer]
path = "tokenizer"

[data]
split = "80,10,10"
cache_folder = "cache"

[data.blend]
prefixes = ["prepared/slim_00_text_document", "prepared/slim_01_text_document"]

[train]
micro_batch_size = 2
length = "{N_STEPS} steps"

[schedule]
warmup = "2 steps"
decay = "{N_STEPS} steps"

[checkpoint]
interval = 10

[evaluate]
interval = 100
batches = 1

[log]
interval = 1
tensorboard = false
"""
CORPUS = """\
inputs = ["slim/train"]
output = "prepared/slim"
tokenizer = "tokenizer"
files_per_output = 20

[[steps]]
kind = "deduplicate"
"""


@dataclass
class Story:
    """What happens, and what is shown of it."""

    project: Path
    slurm: Slurm
    show: Callable[[str], None]
    log_length: int = field(default=0)

    @property
    def folder(self) -> Path:
        return self.project / "runs" / "story"

    @property
    def job(self) -> str:
        submission = read_submission(self.folder)
        assert submission is not None
        return submission.job

    def type(self, command: str) -> str:
        """Types `trainyard ...` on the login machine."""
        self.show(f"$ trainyard {command}")
        done = trainyard(self.slurm.machines, self.project, *shlex.split(command))
        for line in filter(is_told, (done.stdout + done.stderr).splitlines()):
            self.show(f"    {line}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask_slurm(self, *argv: str) -> str:
        """Types a command of Slurm there."""
        self.show(f"$ {shlex.join(argv)}")
        said = self.slurm.run(list(argv))
        for line in said.splitlines():
            self.show(f"    {line}")
        return said

    def step(self) -> int:
        """The last step that the run has logged."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines()[-3:] if path.exists() else []
        return max((json.loads(e)["step"] for e in lines if e.endswith("}")), default=0)

    def count(self, event: str) -> int:
        """How often its script has noted a `start`, an `end`, or that nodes were `lost`."""
        path = self.folder / "starts.log"
        return path.read_text().count(f" {event} ") if path.exists() else 0

    def follow(self, what: str, holds: Callable[[], bool]) -> None:
        """Shows the job's log until something has come true."""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while not holds():
            self.show_log()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so: {what}\n{self.slurm.machines.log_ends()}")
            time.sleep(0.3)
        self.show_log()

    def show_log(self) -> None:
        logs = sorted(self.folder.glob("job-*.log"))
        text = "".join(path.read_text(errors="replace") for path in logs)
        end = text.rfind("\n") + 1
        for line in text[self.log_length : end].splitlines():
            if is_told(line):
                self.show(f"  | {line}")
        self.log_length = end

    def lose(self, node: str) -> None:
        """A machine dies under the job, which then starts elsewhere; it comes back later."""
        before = self.count("lost")
        self.show(f">>> the power of {node} fails")
        self.slurm.machines.kill(node)
        self.follow("the job runs again", lambda: self.count("lost") > before)
        self.show(f">>> {node} is repaired")
        self.slurm.boot(node)
        self.train_on()

    def train_on(self) -> None:
        """Follows it until it has come on by some steps."""
        before = self.step()
        self.follow("it trains", lambda: self.step() >= before + N_BETWEEN)


def is_told(line: str) -> bool:
    """Every twentieth step, and what else is worth a line."""
    step = re.match(r"step +(\d+) of ", line)
    return (step is None or int(step[1]) % 20 == 0) and not NOISE.search(line)


def write_project(folder: Path) -> None:
    """Writes raw text, a tokenizer, a data file, a run file and a cluster file."""
    write_slimpajama(folder / "slim", n_files=40)
    train_tokenizer([" ".join(WORDS)] * 3, 300, folder / "tokenizer")
    (folder / "run.toml").write_text(RUN)
    (folder / "data").mkdir()
    (folder / "data" / "slim.toml").write_text(CORPUS)
    write_cluster(folder / "basement.toml", "slurm", prepare={"tasks": 3, "workers": 1})


def tell(project: Path, machines: Machines, show: Callable[[str], None]) -> None:
    """Lets it happen.

    Args:
        project: an empty folder, where everything is launched.
        machines: three nodes.
        show: is given the lines.
    """
    write_project(project)
    slurm = Slurm(machines)
    slurm.start()
    story = Story(project, slurm, show)
    story.ask_slurm("sinfo", "--partition=main")
    story.type(LAUNCH)
    story.ask_slurm("squeue", "--format=%.12i %.14j %.10T %.6D %R")
    story.type("status story")
    story.train_on()
    story.type("status story")

    show(">>> somebody with more urgent work needs all nodes")
    story.ask_slurm("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 5")
    story.follow("it has stopped", lambda: story.count("end") > 0)
    story.type("status story")
    story.follow("it is started again", lambda: story.count("start") > 1)
    story.train_on()

    story.lose("n2")
    story.lose("n3")
    story.lose("n2")
    story.type("status story")
    story.follow("it is done", lambda: (story.folder / "outcome.json").exists())
    slurm.wait(int(story.job))
    story.show_log()
    story.type("status story")

    show(">>> the same run, undisturbed, on one machine")
    story.type("train run.toml name=undisturbed --ranks 2")
    left, right = (read_losses(project / "runs" / name) for name in ("story", "undisturbed"))
    n_equal = sum(left[key] == right[key] for key in right)
    show(f">>> {n_equal} of {len(right)} losses are equal to the last bit")


def main() -> None:
    """Prints it."""
    started = time.monotonic()

    def show(line: str) -> None:
        text = line.replace(str(project), "~").replace(sys.executable, "python3")
        sys.stdout.write(f"{time.monotonic() - started:6.1f}  {text[:150]}\n")
        sys.stdout.flush()

    with (
        tempfile.TemporaryDirectory(prefix="project-") as first,
        tempfile.TemporaryDirectory(prefix="machines-") as second,
        Machines(Path(second), 3) as machines,
    ):
        project = Path(first)
        tell(project, machines, show)


if __name__ == "__main__":
    main()
