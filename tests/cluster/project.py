"""A project on machines of `machines.py`: raw text, and files for its way to a trained run."""

from __future__ import annotations

from pathlib import Path

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer

from .launching import write_cluster
from .slimpajama import WORDS, write_slimpajama

N_STEPS = 600
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


def write_project(folder: Path) -> None:
    """Writes raw text, a tokenizer, a data file, a run file and a cluster file."""
    write_slimpajama(folder / "slim", n_files=40)
    train_tokenizer([" ".join(WORDS)] * 3, 300, folder / "tokenizer")
    (folder / "run.toml").write_text(RUN)
    (folder / "data").mkdir()
    (folder / "data" / "slim.toml").write_text(CORPUS)
    write_cluster(folder / "basement.toml", "slurm", prepare={"tasks": 3, "workers": 1})
