"""Each guide's README, typed line by line: from a bare account to an exported model.

    python -m tests.cluster.guides > docs/guides-typed.md

The lines are those of `recipes/GUIDE/README.md`, under "From an account to the first step" and
"Afterwards". Two nodes of `machines.py` train, with one CPU rank each. Slurm, ssh and MPICH are
real; PBS is a stand-in, and the corpora come from a server on the login node.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.command import trainyard as call

from trainyard.config.load import load_run
from trainyard.jobs.status import read_submission

from .launching import SOURCES, write_commands
from .machines import LOGIN, Machines
from .mirror import texts
from .slurm import ENDED, Slurm
from .small_recipes import SMALL as SMALL_MODEL
from .small_recipes import shorten_slimpajama, write_python
from .stand_in_pbs import Pbs
from .telling import Told

ROOT = Path(__file__).parents[2]
MIRROR = "http://10.77.0.1:8080"
N_STEPS = 60
FIRST = "## From an account to the first step"
AFTER = "Afterwards:"
SMALL = [*SMALL_MODEL, "checkpoint.interval=10", "evaluate.interval=30"]
LENGTH = f"train.length={N_STEPS} steps"
LONGER = f"train.length={N_STEPS + 30} steps"
# How a line of a README is typed on machines of this size.
TYPED = {
    r"--cluster \S+": "--cluster here.toml",
    r"--nodes \d+": "--nodes 2",
    r"--ranks \d+": "--ranks 2",
    r"--workers \d+": "--workers 2",
    r"--hosts \S+": "--hosts n1,n2,n3",
    r" --image \S+": "",
    r"(prepare --fetch .*)": r"\1 --mirror $MIRROR",
    r"(trainyard (?:launch|train) \S+\.toml)(?! train.length)": r"\1 $SMALL",
    r'(trainyard launch \S+\.toml) train.length="[^"]*"': r"\1 $SMALL_LONGER",
}
SLURM = 'partition = "main"\noptions = ["--exclusive"]\n'
SLURM_STAGES = 'partition = "main"\noptions = ["--cpus-per-task=2"]\n'
HERE = """\
extends = "{cluster}"
gpu = "cpu"
devices_per_node = 1

[launch]
python = "{python}"
scratch = "/run"
cpu_lists = []
device_variable = ""
{launch}
[launch.container]
runtime = "none"

[launch.environment]
GLOO_SOCKET_IFNAME = "eth0"
OMP_NUM_THREADS = "1"
PYTHONPATH = "{sources}"

[launch.prepare]
{prepare}tasks = 2
workers = 1
"""


@dataclass(frozen=True)
class Guide:
    """How a README's lines are typed here."""

    name: str
    title: str
    cluster: str = ""
    """The README's; `here.toml` extends it. Empty: `train` on one machine."""
    launch: str = ""
    """Lines of the [launch] table of `here.toml`."""
    prepare: str = ""
    """Lines of its [launch.prepare] table."""
    typed: dict[str, str] = field(default_factory=dict)
    """Replacements of its own, by regular expression."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Lines that are not typed, by regular expression, and the reasons."""
    headings: tuple[str, ...] = (FIRST,)
    """Beginnings of the lines above the blocks of code up to training, in order."""

    def lines(self, heading: str) -> list[str]:
        """The lines of code that follow a heading of the README, continued ones joined."""
        text = (ROOT / "recipes" / self.name / "README.md").read_text(encoding="utf-8")
        _, found, rest = text.partition(f"\n{heading}")
        block = re.search(r"(?:^    .+\n)+", rest.replace("\\\n", ""), re.MULTILINE)
        assert found, f"{self.name}: no {heading!r}"
        assert block is not None
        return [line.strip() for line in block[0].splitlines()]


INSTALLED = "the environment of this checkout is used; `module` and `conda` are the site's"
GUIDES = [
    Guide("msamp", "MS-AMP: one node, no scheduler", left_out={"^git clone": INSTALLED}),
    Guide(
        "polaris",
        "Polaris: PBS",
        "polaris",
        'mpiexec = "mpich"\noptions = []\nsetup = []\n',
        typed={r"/lus/grand/\S*/(\S+ data/)": r"theirs/\1"},
        left_out={"^git clone": INSTALLED},
    ),
    Guide(
        "azure",
        "Azure: Slurm",
        "azure-ndv5",
        SLURM,
        SLURM_STAGES,
        left_out={"^git clone": INSTALLED, "^docker": "Docker and enroot are not here"},
        headings=(FIRST, "The guide's job, after the check."),
    ),
    Guide(
        "lumi",
        "LUMI: Slurm",
        "lumi",
        SLURM,
        SLURM_STAGES,
        left_out={"^git clone": INSTALLED, "^name=": "LUMI's containers are not here"},
    ),
    Guide(
        "benchmark64",
        "The 64-GPU benchmark: ssh",
        "ssh",
        typed={"benchmark64-full": "benchmark64-tgs"},
        left_out={"^git clone": INSTALLED},
    ),
]


@dataclass
class Account(Told):
    """An account on `login`, in which the lines of a README are typed."""

    guide: Guide = field(kw_only=True)
    slurm: Slurm | None = None
    pbs: Pbs | None = None
    running: subprocess.Popen[bytes] | None = None
    """The command in the foreground, or the job of PBS."""

    def logs(self) -> list[Path]:
        """What is on the terminal, or the logs of jobs."""
        return [self.project / "terminal.log"] if self.is_in_foreground else super().logs()

    @property
    def is_in_foreground(self) -> bool:
        return self.guide.cluster in ("", "ssh")

    def type_readme(self, line: str, during: Callable[[], None] = lambda: None) -> None:
        """Types a line of the README, or says why not; follows what it starts to the end.

        Args:
            during: happens once the run trains.
        """
        for beginning, reason in self.guide.left_out.items():
            if re.search(beginning, line):
                self.show(f"# {line}")
                self.show(f"# not typed here: {reason}")
                return
        shown = line
        if " plan " not in line:  # a plan needs no devices
            for pattern, replacement in (self.guide.typed | TYPED).items():
                shown = re.sub(pattern, replacement, shown)
        if shown != line:
            self.show(f"# {line}")
        if not starts_a_run(line):
            self.type(with_values(shown), shown)
            return
        self.start(shown)
        self.train_on()
        during()
        self.follow("it ends", self.has_ended)

    def start(self, shown: str) -> None:
        """Types a line that starts a run, and goes on."""
        (name,) = re.findall(r"recipes/(\S+)\.toml", shown)
        self.name = load_run(str(ROOT / f"recipes/{name}.toml")).run.name
        if self.is_in_foreground:
            self.show(f"$ {shown}")
            with (self.project / "terminal.log").open("ab") as log:
                self.running = subprocess.Popen(
                    self.machines.on(LOGIN, ["bash", "-c", with_values(shown)], self.project),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.machines.environment | self.environment,
                    start_new_session=True,
                )
            return
        self.type(with_values(shown), shown)
        if self.pbs is not None:
            self.running = self.pbs.run_next(self.name, ["n1", "n2"])

    def has_ended(self) -> bool:
        """Whether the run's last command or job has ended."""
        if self.slurm is None:
            assert self.running is not None
            return self.running.poll() is not None
        submission = read_submission(self.folder)
        assert submission is not None
        return all(state in ENDED for state, _ in self.slurm.tasks(int(submission.job)).values())

    def disturb(self) -> None:
        """Ends what trains, as each kind of machine does, and has it continue."""
        n_starts = self.count("start")
        if not self.guide.cluster:
            self.show(">>> Ctrl-C")
            self.machines.run(["pkill", "-INT", "-o", "-f", "trainyard.cli"])
            self.follow("it ends", self.has_ended)
            (again,) = filter(starts_a_run, self.guide.lines(FIRST))
            self.type_readme(again)
            return
        if self.pbs is not None:
            self.show(">>> all processes of n2 are killed")
            self.machines.run(["pkill", "-KILL", "-f", "trainyard"], host="n2")
            self.follow("the job ends", self.has_ended)
            self.show(">>> PBS starts the job that the script has submitted")
            self.running = self.pbs.run_next(self.name, ["n1", "n3"])
        else:
            self.show(">>> the power of n2 fails")
            self.machines.kill("n2")
        self.follow("it starts again", lambda: self.count("start") > n_starts)
        self.train_on()


def starts_a_run(line: str) -> bool:
    return bool(re.match("trainyard (launch|train) ", line)) and "--dry-run" not in line


def with_values(shown: str) -> str:
    """A line as bash gets it, with the words that `$SMALL` and the like stand for."""
    values = {
        "$SMALL_LONGER": shlex.join([*SMALL, LONGER]),
        "$SMALL": shlex.join([*SMALL, LENGTH]),
        "$MIRROR": MIRROR,
    }
    for name, value in values.items():
        shown = shown.replace(name, value)
    return shown


def tell(guide: Guide, project: Path, machines: Machines, show: Callable[[str], None]) -> Account:
    """Types all lines of a guide.

    Args:
        project: an empty folder: the account.
        machines: three nodes.
        show: is given the lines.
    """
    environment = write_commands(project)
    shutil.copytree(ROOT / "recipes", project / "recipes")
    write_cluster(guide, project)
    write_data(project)
    account = Account(project, machines, show, "", environment, guide=guide)
    address = urlsplit(MIRROR).netloc
    serve = [sys.executable, "-m", "tests.cluster.mirror", *address.split(":")]
    machines.start_daemon(LOGIN, ["env", f"PYTHONPATH={ROOT}", *serve])
    ask = ["bash", "-c", f": < /dev/tcp/{address.replace(':', '/')}"]
    machines.wait_until("the mirror listens", lambda: machines.run(ask).returncode == 0)
    if guide.launch.startswith("partition"):
        account.slurm = Slurm(machines)
        account.slurm.start()
    elif guide.cluster == "polaris":
        account.pbs = Pbs(machines, project)
    if guide.cluster:
        account.type("grep -v PYTHONPATH here.toml")
    *before, last = [line for heading in guide.headings for line in guide.lines(heading)]
    for line in before:
        account.type_readme(line)
    account.type_readme(last, account.disturb)
    for line in guide.lines(AFTER):
        account.type_readme(line)
    return account


def write_cluster(guide: Guide, project: Path) -> None:
    """Writes `here.toml`: the guide's cluster, with nodes of one CPU."""
    python = project / "bin" / "python"
    write_python(python, MIRROR)
    text = HERE.format(
        cluster=guide.cluster,
        python=python,
        launch=guide.launch,
        prepare=guide.prepare,
        sources=SOURCES,
    )
    (project / "here.toml").write_text(text)


def write_data(project: Path) -> None:
    """Writes what a guide does not fetch, and makes 72 files of 72 shards, not of 59,166."""
    shorten_slimpajama(project)
    (project / "theirs").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(4))
    (project / "mine.jsonl").write_text(lines)
    (project / "my-text.txt").write_text("\n".join(texts(7)[:100]))
    made = call("prepare", "mine.jsonl", "-o", "theirs/mine", "--tokenizer", "gpt2", folder=project)
    assert made.returncode == 0, made.stderr
    for path in (project / "theirs").glob("mine_text_document.*"):
        path.rename(path.with_stem("genslm_subsample_200k_sequence_document"))


HIDDEN = re.compile(
    r"  \| (saved step|few CPUs|figures: |skipped 1 )|    (touch|tail|scancel|qdel) "
)


def main() -> None:
    """Prints the sections of the page."""
    sys.stdout.write(f"`$SMALL` is `{shlex.join([*SMALL, LENGTH])}`.\n")
    for guide in GUIDES:
        sys.stdout.write(f"\n## {guide.title}\n\n```\n")
        with (
            tempfile.TemporaryDirectory(prefix="project-") as first,
            tempfile.TemporaryDirectory(prefix="machines-") as second,
            Machines(Path(second), 3) as machines,
        ):
            project = Path(first)

            def show(line: str, project: Path = project) -> None:
                text = line.replace(str(project), "~").replace(sys.executable, "python3")
                if not HIDDEN.match(text):
                    sys.stdout.write(f"{text[:200]}\n".replace(" \n", "\n"))
                    sys.stdout.flush()

            tell(guide, project, machines, show)
        sys.stdout.write("```\n")


if __name__ == "__main__":
    main()
