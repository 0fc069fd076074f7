"""A run on a real Slurm, from raw text to the last step, with all that befalls it on the way.

    python -m tests.cluster.story > story.txt

Three machines (machines.py) are the nodes. One command submits the preparation of the corpus, an
array of jobs, and training on two nodes after it. Then a more urgent job takes the nodes away, and
machines die, one of them twice. What is done stands after `$` and `>>>`, with what it said below;
lines of the job's own log after `|`. Seconds are those of this machine: Slurm is set to give up a
silent node after 15 s, and `SlurmdTimeout` of most clusters is 300.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.jobs.status import read_submission

from .launching import read_losses, write_cluster, write_commands
from .machines import Machines
from .slimpajama import WORDS, write_slimpajama
from .slurm import Slurm
from .telling import Told

N_STEPS = 600
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
class Story(Told):
    """What happens, and what is shown of it."""

    slurm: Slurm = field(kw_only=True)

    @property
    def job(self) -> str:
        submission = read_submission(self.folder)
        assert submission is not None
        return submission.job

    def ask_slurm(self, *argv: str) -> str:
        """Types a command of Slurm there."""
        self.show(f"$ {shlex.join(argv)}")
        said = self.slurm.run(list(argv))
        for line in said.splitlines():
            self.show(f"    {line}")
        return said

    def lose(self, node: str) -> None:
        """A machine dies under the job, which then starts elsewhere; it comes back later."""
        before = self.count("lost")
        self.show(f">>> the power of {node} fails")
        self.slurm.machines.kill(node)
        self.follow("the job runs again", lambda: self.count("lost") > before)
        self.show(f">>> {node} is repaired")
        self.slurm.boot(node)
        self.train_on()


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
    story = Story(project, machines, show, "story", write_commands(project), slurm=slurm)
    story.ask_slurm("sinfo", "--partition=main")
    story.type(f"trainyard {LAUNCH}")
    story.ask_slurm("squeue", "--format=%.12i %.14j %.10T %.6D %R")
    story.type("trainyard status story")
    story.train_on()
    story.type("trainyard status story")

    show(">>> somebody with more urgent work needs all nodes")
    story.ask_slurm("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 5")
    story.follow("it has stopped", lambda: story.count("end") > 0)
    story.type("trainyard status story")
    story.follow("it is started again", lambda: story.count("start") > 1)
    story.train_on()

    story.lose("n2")
    story.lose("n3")
    story.lose("n2")
    story.type("trainyard status story")
    story.follow("it is done", story.is_done)
    slurm.wait(int(story.job))
    story.show_log()
    story.type("trainyard status story")

    show(">>> the same run, undisturbed, on one machine")
    story.type("trainyard train run.toml name=undisturbed --ranks 2")
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
