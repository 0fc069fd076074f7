"""Seconds from the command `trainyard train` to the end of its first step, itemised (Linux).

    python benchmarks/starting.py --rounds 5 --output record.json

The text, absent: source of Python's standard library, is prepared once, outside of what is timed.
Then a preset is started for two steps, again and again, with one rank and with two in
turn. Nothing is added to the command: the heartbeats of its workers and the run folder show how far
it is. Imports alone, and commands that need no torch, are measured beside it, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from measuring import describe_machine, render, write_source_corpus

from trainyard.launch.environment import Process, rank_environment
from trainyard.launch.heartbeat import HeartbeatReader

COMMAND = [sys.executable, "-P", "-c", "from trainyard.cli.main import main; main()"]
SETTINGS = [
    "train.length='2 steps'",
    "schedule.warmup='1 steps'",
    "schedule.decay='2 steps'",
    "evaluate.batches=0",
    "log.interval=1",
    "data.blend.prefixes=['text_text_document']",
    "tokenizer.path='text_tokenizer'",
    "model.vocabulary_size=8192",
    "train.global_batch_size=16",
    "data.cache_folder='cache'",
]
RUN_FOLDER = Path("runs/started")
PARENT_ITEMS = {
    "folder": "command: interpreter, its imports, run read and planned",
    "run.toml": "command: data and older checkpoints looked at, run folder written",
}
# By the count of a worker's heartbeat: what has been done when it first has that value. A rank that
# is alone is the process of the command, and says nothing before its imports are done.
WORKER_ITEMS = {
    1: "worker: process started",
    2: "worker: imports",
    3: "worker: ranks meet, data order, model and optimizer built",
    4: "worker: checkpoint looked for, metrics opened",
    5: "first step: data",
    6: "first step: forward and backward",
    7: "first step: update",
}
IMPORTS = {
    "interpreter alone": "pass",
    "and the command line": "import trainyard.cli.main",
    "and torch": "import trainyard.cli.main, torch",
    "and what torch's optimizers import": "import trainyard.cli.main, torch._dynamo",
    "and all of a worker": "import trainyard.cli.main, torch._dynamo, trainyard.training.worker",
}

COMMANDS = ("--help", "show tiny", "plan gpt3-13b --gpu h100-80g --gpus 64")


class Watch:
    """Notes when something is first seen to have happened."""

    def __init__(
        self, command: subprocess.Popen[bytes], own_heartbeat: HeartbeatReader | None
    ) -> None:
        self.seen: dict[str | int, float] = {}
        self._pid = command.pid
        self._heartbeat = own_heartbeat
        self._variable = next(iter(_heartbeat_variable(99)))
        # A rank that is alone begins with the second item.
        self._skipped = 0 if own_heartbeat is None else 1

    def look(self) -> None:
        """Looks once."""
        now = time.perf_counter()
        if RUN_FOLDER.exists():
            self.seen.setdefault("folder", now)
        if (RUN_FOLDER / "run.toml").exists():
            self.seen.setdefault("run.toml", now)
        if self._heartbeat is None:
            self._heartbeat = self._find_heartbeat()
        if self._heartbeat is not None:
            count = self._heartbeat.read().count
            if count:
                self.seen.setdefault(count + self._skipped, now)

    def _find_heartbeat(self) -> HeartbeatReader | None:
        """Finds the memory that a worker shares with its parent."""
        if "run.toml" not in self.seen:
            return None
        with suppress(OSError):
            children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
            for child in children:
                for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    if name.decode() == self._variable:
                        path = f"/proc/{child}/fd/{value.decode()}"
                        return HeartbeatReader(os.open(path, os.O_RDONLY))
        return None


def measure(preset: str, n_ranks: int) -> dict[str, float]:
    """Starts training once; gives the seconds of each item."""
    shutil.rmtree("runs", ignore_errors=True)
    own = HeartbeatReader() if n_ranks == 1 else None
    environment, descriptors = dict(os.environ), []
    if own is not None:
        environment |= _heartbeat_variable(own.descriptor)
        descriptors = [own.descriptor]
    sizes = [f"name={RUN_FOLDER.name}", f"train.micro_batch_size={16 // n_ranks}"]
    command = [*COMMAND, "train", preset, *SETTINGS, *sizes, "--ranks", str(n_ranks)]
    started = time.perf_counter()
    with (
        Path("log").open("wb") as log,
        subprocess.Popen(
            command, env=environment, pass_fds=descriptors, stdout=log, stderr=log
        ) as running,
    ):
        watch = Watch(running, own)
        while running.poll() is None:
            watch.look()
            time.sleep(0.0005)
    if running.returncode:
        sys.exit(Path("log").read_text(errors="replace"))
    found, before = {}, started
    items: list[tuple[str | int, str]] = [*PARENT_ITEMS.items(), *WORKER_ITEMS.items()]
    for key, name in items:
        if isinstance(key, str):
            now = watch.seen[key]
        else:
            later = [at for at_key, at in watch.seen.items() if at_key in range(key, 99)]
            now = max(before, min(later))
        found[name] = now - before
        before = now
    return {**found, "all, to the end of the first step": before - started}


def measure_processes(commands: dict[str, list[str]]) -> dict[str, float]:
    """Times commands, each in a process of its own."""
    found = {}
    for name, command in commands.items():
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found[name] = time.perf_counter() - started
    return found


def _heartbeat_variable(descriptor: int) -> dict[str, str]:
    """Gives the variable that tells a process of its heartbeat."""
    with_heartbeat = rank_environment(Process(heartbeat=descriptor), 1)
    without = rank_environment(Process(), 1)
    return {
        name: value
        for name, value in with_heartbeat.items()
        if value is not None and without.get(name) != value
    }


def main() -> None:
    """Prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = arguments.text and arguments.text.resolve()
    output = arguments.output.resolve() if arguments.output else None
    record = describe_machine(("torch", "tensorboard", "pydantic"))
    leave = "; import os; os._exit(0)"  # without the time to take all modules apart
    imports = {name: [*COMMAND[:3], program + leave] for name, program in IMPORTS.items()}
    commands = {f"trainyard {words}": [*COMMAND, *words.split()] for words in COMMANDS}
    rounds: dict[str, list[dict[str, float]]] = {
        name: [] for name in ("1 rank", "2 ranks", "imports", "commands")
    }
    with tempfile.TemporaryDirectory(prefix="trainyard-starting-", dir=".") as folder:
        os.chdir(folder)
        if text is None:
            write_source_corpus(text := Path("sources.jsonl"), 4)
        prepare = ["prepare", str(text), "--output", "text", "--train-tokenizer", "8192"]
        subprocess.run([*COMMAND, *prepare], check=True)
        record["load_average"] = os.getloadavg()
        for n_ranks in (1, 2):  # after it, files and the order of the data are in memory and cache
            measure(arguments.preset, n_ranks)
        for _ in range(arguments.rounds):
            rounds["1 rank"].append(measure(arguments.preset, 1))
            rounds["2 ranks"].append(measure(arguments.preset, 2))
            rounds["imports"].append(measure_processes(imports))
            rounds["commands"].append(measure_processes(commands))
        os.chdir("..")
    for name, each in rounds.items():
        record[name] = {
            item: {
                "median": round(statistics.median(one[item] for one in each), 3),
                "least": round(min(one[item] for one in each), 3),
            }
            for item in each[0]
        }
    print(render(record))
    if output:
        output.write_text(render({**record, "rounds": rounds}), encoding="utf-8")


if __name__ == "__main__":
    main()
