"""Data stages of the recipes on small data of the same shape, by the READMEs' own commands.

Then a run file of the guide trains, a small model with all else as it is, on what they made.
"""

from __future__ import annotations

import json
import lzma
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tests.command import trainyard
from tests.e2e.test_recipes_planned import commands

from trainyard.api.launching import read_prefixes
from trainyard.config.load import load_run
from trainyard.data.indexed import IndexedDataset
from trainyard.data.sidecar import load_sidecar

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
SMALL = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.d_ff=64"]
SMALL += ["model.sequence_length=64", "parallel.tensor=1", "parallel.pipeline=1"]
SMALL += ["parallel.sequence=false", "train.global_batch_size=2", "train.micro_batch_size=1"]
SMALL += ["train.length='3 steps'", "evaluate.batches=1"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder to work in, with the recipes."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    return tmp_path


def texts(shared_data: Path, n: int) -> Iterator[str]:
    """So many pieces of novels."""
    with (shared_data / "corpora/novels.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            paragraphs = json.loads(line)["text"].split("\n\n")
            for text in ("\n\n".join(paragraphs[i : i + 4]) for i in range(0, 400, 4)):
                if text.strip() and n > 0:
                    n -= 1
                    yield text


def write_slimpajama(folder: Path, shared_data: Path) -> None:
    """72 shards in 10 folders, with the seven sources."""
    sources = ["CommonCrawl", "C4", "Github", "Wikipedia", "ArXiv", "StackExchange", "Book"]
    found = texts(shared_data, 72 * 7)
    for shard in range(72):
        path = folder / f"train/chunk{shard % 10 + 1}/example_train_{shard}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"text": text, "meta": {"redpajama_set_name": f"RedPajama{source}"}})
            for source, text in zip(sources, found, strict=False)
        ]
        path.write_bytes(zstandard.compress("\n".join(lines).encode()))


def prepare(project: Path, guide: str) -> None:
    """Runs the lines of a README that prepare data, in one process."""
    text = (project / "recipes" / guide / "README.md").read_text(encoding="utf-8")
    lines = [words[1:] for words in commands(text) if words[1] == "prepare"]
    lines = [
        words for words in lines if "--fetch" not in words and "/alternatives/" not in words[1]
    ]
    assert lines
    for words in lines:
        if "--workers" in words:
            words[words.index("--workers") + 1] = "1"
        done = trainyard(*words, folder=project)
        assert done.returncode == 0, f"{words}: {done.stderr}"


def train(project: Path, recipe: str, *more: str) -> Path:
    """Trains a recipe's small likeness; gives its run folder."""
    done = trainyard("train", f"recipes/{recipe}.toml", *SMALL, *more, folder=project)
    assert done.returncode == 0, done.stderr
    name = load_run(str(project / f"recipes/{recipe}.toml")).run.name
    run = load_run(str(project / "runs" / name / "run.toml")).run
    for prefix in read_prefixes(run):
        assert (project / f"{prefix}.idx").exists(), f"{prefix} is read and not made"
    return project / "runs" / name


def lines_of(run: Path, kind: str) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_slimpajama_makes_the_files_of_three_splits(project: Path, shared_data: Path) -> None:
    write_slimpajama(project / "corpora/slimpajama", shared_data)
    # As many files out of 72 shards as out of 59,166.
    data_file = project / "recipes/azure/data/slimpajama.toml"
    smaller = data_file.read_text().replace("files_per_output = 822", "files_per_output = 1")
    data_file.write_text(smaller)
    prepare(project, "azure")
    assert len(list((project / "data/slimpajama").glob("*.bin"))) == 72
    sidecar = load_sidecar(str(project / "data/slimpajama/train_chunk_33_text_document"))
    (keep,) = (step for step in sidecar.steps if step.kind == "keep")
    assert sum(keep.dropped.values()) == 1, "the book"
    assert sidecar.documents == 6
    run = train(project, "azure/64m", "log.interval=1")
    assert len(lines_of(run, "train")) == 3
    assert lines_of(run, "evaluate"), "of the 15 files for validation"
    # Those for the test are read by themselves.
    done = trainyard("evaluate", str(run), "--json", folder=project)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_tokens"] > 0


def test_a_sample_of_slimpajama_takes_its_place(project: Path, shared_data: Path) -> None:
    folder = project / "corpora/slimpajama-6b/data"
    folder.mkdir(parents=True)
    for number in range(48):
        path = folder / f"train-{number:05d}-of-00048-0123456789abcdef.parquet"
        sources = ["RedPajamaC4"] * 6 + ["RedPajamaBook"]
        rows = {
            "text": list(texts(shared_data, 7)),
            "meta": [{"redpajama_set_name": source} for source in sources],
            "__index_level_0__": list(range(7)),
        }
        pyarrow.parquet.write_table(pyarrow.table(rows), path)
    data_file = "recipes/azure/data/alternatives/slimpajama-6b.toml"
    done = trainyard("prepare", data_file, folder=project)
    assert done.returncode == 0, done.stderr
    sidecar = load_sidecar(str(project / "data/slimpajama/train_chunk_33_text_document"))
    assert sidecar.documents == 6
    run = train(project, "azure/64m", "log.interval=1")
    data = load_run(str(run / "run.toml")).run.data
    lists = (data.train.prefixes, data.test.prefixes, data.valid.prefixes)
    assert [len(prefixes) for prefixes in lists] == [18, 15, 15]
    assert lines_of(run, "evaluate")


def test_the_blend_of_wikipedia_and_openwebtext(project: Path, shared_data: Path) -> None:
    for folder in ("wikipedia-20220301/data/20220301.en", "openwebtext/plain_text"):
        for part in range(2):
            path = project / f"corpora/{folder}/train-0000{part}-of-00002.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = {"id": [*"a" * 40], "text": list(texts(shared_data, 40))}
            pyarrow.parquet.write_table(pyarrow.table(rows), path)
    prepare(project, "benchmark64")
    lengths = [
        len(IndexedDataset(project / f"data/{name}_text_document").stream)
        for name in ("wikipedia_20220301_en", "openwebtext_Skylion007")
    ]
    assert min(lengths) > 1000
    run = train(project, "benchmark64/tgs", "train.length='10 steps'")
    # What the README takes the speed of steps 5 to 10 from.
    text = (project / "recipes/benchmark64/README.md").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"^ +grep '(.*)' runs/benchmark64-tgs/metrics.jsonl$", text, re.M)
    found = [line for line in (run / "metrics.jsonl").read_text().splitlines() if pattern in line]
    last = [json.loads(line) for line in found][-6:]
    assert [line["step"] for line in last] == [5, 6, 7, 8, 9, 10]
    assert np.isfinite([line["tokens_per_second_per_device"] for line in last]).all()
    # The guide of MS-AMP reads a dump.
    (project / "corpora/wikipedia").mkdir()
    shutil.copy(shared_data / "corpora" / DUMP, project / "corpora/wikipedia")
    for path in (project / "data").glob("wikipedia*"):
        path.unlink()
    prepare(project, "msamp")
    # A processor has no products in fp8, and a model of two blocks none between first and last.
    emulated = ["precision.fp8.emulate=true", "precision.fp8.precise_blocks=0"]
    run = train(project, "msamp/345m-fp8-lowbit", "log.interval=1", *emulated)
    assert len(lines_of(run, "train")) == 3


def test_oscar_from_its_archive(project: Path, shared_data: Path) -> None:
    archive = project / "corpora/oscar-1gb/stas/oscar-1GB.jsonl.xz"
    archive.parent.mkdir(parents=True)
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts(shared_data, 60))]
    archive.write_bytes(lzma.compress("\n".join(lines).encode()))
    prepare(project, "lumi")
    run = train(project, "lumi/125m", "data.split='80,10,10'")
    assert len(lines_of(run, "train")) == 3
