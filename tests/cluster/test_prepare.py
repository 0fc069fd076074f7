"""One corpus, prepared by one process, by several, by a job array and by MPI: the same bytes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
