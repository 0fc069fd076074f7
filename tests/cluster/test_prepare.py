"""One corpus, prepared by one process, by several, by a job array and by MPI: the same bytes."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainyard.data.indexed import IndexedDataset
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import train_tokenizer

from .slimpajama import WORDS, write_slimpajama
from .slurm import Slurm

pytestmark = pytest.mark.exhaustive

PROGRAM = [sys.executable, "-c", "from trainyard.cli.main import main; main()", "prepare"]
DATA_FILE = """
inputs = ["{root}/slim/train"]
output = "{output}"
tokenizer = "{root}/tokenizer"
count_by = "meta.redpajama_set_name"
files_per_output = 50

[[steps]]
kind = "keep"
field = "meta.redpajama_set_name"
values = ["RedPajamaCommonCrawl", "RedPajamaC4", "RedPajamaArXiv", "RedPajamaWikipedia"]

[[steps]]
kind = "length"
min_characters = 100

[[steps]]
kind = "deduplicate"
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of 400 shards, a tokenizer, and what one process makes of them, in `one`."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    write_slimpajama(folder / "slim")
    train_tokenizer([" ".join(WORDS)] * 3, 300, folder / "tokenizer")
    run([str(write_data_file(folder, "one"))])
    return folder


def write_data_file(root: Path, name: str) -> Path:
    (root / name).mkdir()
    path = root / f"{name}.toml"
    path.write_text(DATA_FILE.format(root=root, output=root / name / "slim"))
    return path


def run(arguments: list[str]) -> str:
    result = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_one_process_makes(root: Path) -> None:
    files = sorted((root / "slim/train").rglob("*.zst"))
    assert len(files) == 400
    sidecars = [load_sidecar(root / f"one/slim_{n:02d}_text_document") for n in range(8)]
    assert [len(sidecar.sources) for sidecar in sidecars] == [50] * 8
    assert len(read_all(root / "one")) == 8 * 3
    kept = {"RedPajamaCommonCrawl", "RedPajamaC4", "RedPajamaArXiv", "RedPajamaWikipedia"}
    seen: set[str] = set()
    # What must come out, in ten lines of plain Python.
    import zstandard

    for number, sidecar in enumerate(sidecars):
        counts: dict[str, int] = {}
        for path in files[50 * number : 50 * number + 50]:
            for line in zstandard.decompress(path.read_bytes(), 10**8).decode().splitlines():
                document = json.loads(line)
                text, name = document["text"], document["meta"]["redpajama_set_name"]
                if name in kept and len(text) >= 100 and text not in seen:
                    seen.add(text)
                    counts[name] = counts.get(name, 0) + 1
        assert {name: group.documents for name, group in sidecar.groups.items()} == counts
        assert sidecar.documents == sum(counts.values())
        dataset = IndexedDataset(root / f"one/slim_{number:02d}_text_document")
        assert len(dataset) == sidecar.documents
        assert sum(group.tokens for group in sidecar.groups.values()) == dataset.n_tokens


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_on_one_machine(root: Path, workers: int) -> None:
    name = f"workers{workers}"
    run([str(write_data_file(root, name)), "--workers", str(workers)])
    assert read_all(root / name) == read_all(root / "one")


def test_an_array_of_jobs(root: Path, slurm: Slurm) -> None:
    data_file = write_data_file(root, "array")
    command = shlex.join([*PROGRAM, str(data_file)])
    job = slurm.submit(f"#!/bin/sh\nexec {command}\n", "--array=0-4")
    ended = slurm.wait(job, timeout_seconds=120)
    assert ended == {i: ("COMPLETED", 0) for i in range(5)}, slurm.output(job, 0)
    # Every task has seen the finished corpus, whoever finished it.
    outputs = [slurm.output(job, i) for i in range(5)]
    assert all("slim_07_text_document.bin: " in text for text in outputs)
    assert read_all(root / "array") == read_all(root / "one")


def test_a_task_of_an_array_is_killed_and_the_job_run_again(root: Path, slurm: Slurm) -> None:
    data_file = write_data_file(root, "killed")
    command = shlex.join([*PROGRAM, str(data_file)])
    script = f"#!/bin/sh\nexec {command}\n"
    job = slurm.submit(script, "--array=0-1")
    done = root / "killed/slim.work/done"
    slurm.wait_until("some units are done", lambda: done.exists() and any(done.iterdir()))
    slurm.run(["scancel", "--signal=KILL", str(job)])
    slurm.wait(job)
    job = slurm.submit(script, "--array=0-1")
    ended = slurm.wait(job, timeout_seconds=120)
    assert ended == {i: ("COMPLETED", 0) for i in range(2)}, slurm.output(job, 0)
    assert read_all(root / "killed") == read_all(root / "one")


def test_ranks_of_mpi(root: Path, mpiexec: list[str]) -> None:
    data_file = write_data_file(root, "mpi")
    result = subprocess.run(
        [*mpiexec, "3", *PROGRAM, str(data_file)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert read_all(root / "mpi") == read_all(root / "one")


def test_status_from_elsewhere(root: Path) -> None:
    data_file = write_data_file(root, "status")
    assert (
        run([str(data_file), "--status"]) == "no work is in flight: it is finished, or not begun\n"
    )
    with subprocess.Popen(
        [*PROGRAM, str(data_file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as running:
        claimed = root / "status" / "slim.work" / "claimed"
        while running.poll() is None and not (claimed.is_dir() and any(claimed.iterdir())):
            time.sleep(0.001)
        running.send_signal(signal.SIGSTOP)  # or it may be done before it is asked for
        try:
            said = run([str(data_file), "--status"])
        finally:
            running.send_signal(signal.SIGCONT)
        assert "of 8 units" in said
        assert "documents" in said and "heard of" in said
        running.communicate()
    assert running.returncode == 0
