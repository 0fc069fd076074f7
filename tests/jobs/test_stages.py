"""`launch --stages` without a scheduler: one stage after the other, until one fails."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.cluster.slimpajama import WORDS
from tests.command import trainyard
from tests.corpus.fetching.test_fetch import serving

from trainyard.jobs.status import read_submission

RUN = """\
extends = "tiny"
name = "run"

[model]
n_layers = 2
d_model = 32
n_heads = 2
d_ff = 64
sequence_length = 64
vocabulary_size = 50257

[tokenizer]
path = "gpt2"

[data]
split = "80,10,10"

[data.blend]
prefixes = ["made/here/corpus_text_document"]

[train]
micro_batch_size = 1
global_batch_size = 2
length = "2 steps"

[evaluate]
batches = 1
"""
CORPUS = 'inputs = ["corpora/openwebtext/*.jsonl"]\noutput = "made/here/corpus"\n'
CORPUS += 'tokenizer = "gpt2"\n'
# Its own server instead of the one that --fetch knows.
PYTHON = """\
#!/bin/bash
case " $* " in *" --fetch "*) set -- "$@" --mirror {mirror};; esac
echo "${{@:3}}" >> calls
exec {python} "$@"
"""
CLUSTER = """\
gpu = "cpu"
devices_per_node = 1

[launch]
scheduler = "{scheduler}"
python = "{python}"
scratch = "{scratch}"
{more}
[launch.prepare]
environment = {{ STAGE = "yes" }}
workers = 1
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    choice = random.Random(1)
    lines = [json.dumps({"text": " ".join(choice.choices(WORDS, k=300))}) for _ in range(60)]
    (tmp_path / "corpora/openwebtext").mkdir(parents=True)
    (tmp_path / "corpora/openwebtext/a.jsonl").write_text("\n".join(lines))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/corpus.toml").write_text(CORPUS)
    write_cluster(tmp_path, "local")
    return tmp_path


def write_cluster(project: Path, scheduler: str, more: str = "", mirror: str = "") -> None:
    python = project / "python"
    python.write_text(PYTHON.format(python=sys.executable, mirror=mirror))
    python.chmod(0o755)
    text = CLUSTER.format(scheduler=scheduler, python=python, scratch=project / "s", more=more)
    (project / "c.toml").write_text(text)


def launch(project: Path, *stages: str) -> CompletedProcess[str]:
    return trainyard(
        "launch", "run.toml", "--cluster", "c.toml", *stages, folder=project, OMP_NUM_THREADS="1"
    )


def verbs(project: Path) -> list[str]:
    """What was called, in order, without the check of the software."""
    calls = (project / "calls").read_text().splitlines()
    words = [line.split() for line in calls if line.startswith("trainyard.cli ")]
    return [" ".join(each[1:3]) for each in words]


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheduler", ["local", "mpi"])
def test_all_stages(project: Path, scheduler: str, request: pytest.FixtureRequest) -> None:
    more = ""
    if scheduler == "mpi":
        request.getfixturevalue("mpiexec")
        more = 'hosts = ["localhost"]\noptions = ["-launcher fork"]\n'
    with serving() as server:
        server.publish({"plain_text/train-00000.parquet": b"not read"})
        write_cluster(project, scheduler, more, server.address)
        done = launch(project, "--stages", "all")
    assert done.returncode == 0, done.stderr
    assert verbs(project) == [
        "prepare --fetch",
        "prepare data/corpus.toml",
        "train runs/run/run.toml",
    ]
    assert (project / "corpora/openwebtext/plain_text/train-00000.parquet").exists()
    outcome = json.loads((project / "runs/run/outcome.json").read_text())
    assert outcome["exit_code"] == 0
    record = read_submission(project / "runs/run")
    assert record is not None
    assert record.scheduler == scheduler


@pytest.mark.exhaustive
def test_the_first_failure_ends_it(project: Path) -> None:
    (project / "corpora/openwebtext/a.jsonl").write_text('{"text": 1}\n')
    done = launch(project, "--stages", "prepare,train")
    assert done.returncode == 2
    assert "a.jsonl" in done.stderr, "the stage's own message"
    assert done.stderr.endswith(
        "error: prepare-corpus ended with exit code 2: later stages are not started\n"
        "hint: see its message above; after a fix, launch again: finished work is skipped\n"
    )
    assert verbs(project) == ["prepare data/corpus.toml"]


def test_a_stage_has_a_python_of_its_own(project: Path) -> None:
    text = (project / "c.toml").read_text()
    (project / "c.toml").write_text(text + 'python = "/opt/nothing/python"\n')
    done = launch(project, "--stages", "prepare,train")
    assert done.returncode == 2
    assert "/opt/nothing/python: No such file or directory" in done.stderr
    assert "prepare-corpus ended with exit code 93: later stages are not started" in done.stderr
    assert "environment=(STAGE=yes)" in (project / "runs/run/jobs/prepare-corpus.sh").read_text()
    assert "STAGE" not in (project / "runs/run/job.sh").read_text()
