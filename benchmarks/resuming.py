"""Seconds from the start of a process to its first step after a checkpoint, itemised (Linux).

    python benchmarks/resuming.py --rounds 3 --output record.json

A run of GPT-3 125M (1.5 GB of checkpoint) trains four steps of four short sequences; then it is
started again from the second, again and again. The worker's heartbeat, which its parent reads too,
tells when the program and torch are imported, the run is read and built, the checkpoint is loaded
and verified, and the first step is done.
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
from pathlib import Path

import numpy as np
from measuring import describe_machine, publish

from trainyard.config.load import load_run, render_run
from trainyard.data.indexed import IndexedWriter
from trainyard.launch.environment import Process, rank_environment
from trainyard.launch.heartbeat import HeartbeatReader

WATCHED = [sys.executable, "-P", "-m", "trainyard.launch.watched", "trainyard.training.worker"]
# By the count of the heartbeat: what has been done when it first has that value.
ITEMS = {
    1: "interpreter started",
    2: "program and torch imported",
    3: "run read, data opened, model built",
    4: "checkpoint loaded and verified",
    6: "first step: data, forward, backward",
}
FIRST_STEP_DONE = 7
VOCABULARY_SIZE = 50257


def measure(command: list[str]) -> dict[str, float]:
    """Runs a worker; gives the seconds of each item."""
    reader = HeartbeatReader()
    process = Process(heartbeat=reader.descriptor)
    started = time.perf_counter()
    seen: dict[int, float] = {}
    with subprocess.Popen(
        command,
        env={**os.environ, **rank_environment(process, os.cpu_count() or 1)},
        pass_fds=[reader.descriptor],
        stderr=subprocess.DEVNULL,
    ) as running:
        while running.poll() is None:
            seen.setdefault(reader.read().count, time.perf_counter())
            time.sleep(0.0005)
    assert running.returncode == 0, running.returncode
    found, before = {}, started
    for count in (*ITEMS, FIRST_STEP_DONE):
        now = min(at for number, at in seen.items() if number >= count)
        found[ITEMS.get(count, "first step: update")] = now - before
        before = now
    return {**found, "all": before - started}


def main() -> None:
    """Prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="gpt3-125m")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainyard-resuming-", dir=".") as folder:
        tokens = Path(folder) / "random_text_document"
        random = np.random.default_rng(0)
        with IndexedWriter(tokens, np.dtype(np.uint16)) as writer:
            for _ in range(64):
                writer.add_document(random.integers(0, VOCABULARY_SIZE, 512).astype(np.uint16))
        run = load_run(
            arguments.preset,
            [
                f"model.vocabulary_size={VOCABULARY_SIZE}",
                *("model.sequence_length=256", "train.global_batch_size=4"),
                *("train.micro_batch_size=4", "train.length='4 steps'", "precision.kind=fp32"),
                *("schedule.decay='4 steps'", "schedule.warmup='1 steps'", "evaluate.batches=0"),
                *(f"data.blend.prefixes=['{tokens}']", "data.split='100,0,0'"),
                *("checkpoint.interval=2", "log.tensorboard=false", "train.batch_ramp=none"),
                f"data.cache_folder='{folder}/cache'",
            ],
        ).run
        run_folder = Path(folder) / "run"
        run_folder.mkdir()
        (run_folder / "run.toml").write_text(render_run(run), encoding="utf-8")
        command = [*WATCHED, str(run_folder)]
        measure(command)
        checkpoints = run_folder / "checkpoints"
        rounds = []
        for _ in range(arguments.rounds):
            shutil.rmtree(checkpoints / "step-00000004")
            rounds.append(measure(command))
        size = sum(path.stat().st_size for path in (checkpoints / "step-00000002").iterdir())
    record = describe_machine(("torch",))
    record |= {
        "load_average": os.getloadavg(),
        "preset": arguments.preset,
        "checkpoint_bytes": size,
        "median_seconds": {
            name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]
        },
        "rounds": rounds,
    }
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
