"""The way from a dump of Wikipedia to a perplexity, by the commands of docs/corpora.md."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.command import trainyard

from trainyard.data.indexed import IndexedDataset

ROOT = Path(__file__).parents[2]
DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
# As written, training takes minutes; the test trains a smaller model of the same text.
SHORTENED = ["train.length='150 steps'", "schedule.decay='150 steps'", "schedule.warmup='5 steps'"]
SHORTENED += ["train.global_batch_size=8", "train.micro_batch_size=8"]
SHORTENED += ["model.n_layers=2", "model.d_model=128", "model.n_heads=2", "model.d_ff=512"]
SHORTENED += ["optimizer.learning_rate=3e-3", "evaluate.batches=2", "evaluate.sample_interval=0"]


@pytest.mark.exhaustive
def test_commands_from_a_dump_to_a_perplexity(tmp_path: Path, shared_data: Path) -> None:
    (tmp_path / "corpora/wikipedia").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    shutil.copy(shared_data / "corpora" / DUMP, tmp_path / "corpora/wikipedia")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / "docs/corpora.md").read_text(), re.M | re.S)
    commands = [shlex.split(line) for line in blocks[0].splitlines()]
    assert [command[1] for command in commands] == ["prepare", "check", "show", "train", "evaluate"]
    said = {}
    for command in commands:
        extra = {"train": SHORTENED, "evaluate": ["--json"]}.get(command[1], [])
        result = trainyard(*command[1:], *extra, folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        said[command[1]] = result.stdout
    assert "read dropped 99: redirect" in said["prepare"]
    assert re.search(r"dropped \d+ sentences .* rendered: cite book \d+", said["prepare"])
    assert re.search(
        r"wikipedia_text_document\.bin: \d+ documents, \d+,\d+ tokens", said["prepare"]
    )
    assert "'''" not in said["show"] and "[[" not in said["show"]
    result = json.loads(said["evaluate"])
    tokens = IndexedDataset(tmp_path / "data/wikipedia_text_document").stream
    shares = np.bincount(tokens) / len(tokens)
    guessing = math.exp(-sum(share * math.log(share) for share in shares if share))
    assert result["perplexity"] < guessing, "no better than guessing by the frequency of tokens"
