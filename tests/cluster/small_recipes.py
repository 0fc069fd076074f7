"""What lets a recipe's own commands run on a machine like this: less of everything."""

from __future__ import annotations

import sys
from pathlib import Path

SMALL = (
    *("model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.d_ff=64"),
    *("model.sequence_length=64", "parallel.tensor=1", "parallel.pipeline=1"),
    *("parallel.sequence=false", "train.global_batch_size=2", "train.micro_batch_size=1"),
    *("evaluate.batches=1", "train.batch_ramp=none", "log.interval=1", "log.tensorboard=false"),
)
PYTHON = """\
#!/bin/bash
case " $* " in *" --fetch "*) set -- "$@" --mirror {mirror};; esac
exec {python} "$@"
"""


def write_python(path: Path, mirror: str) -> None:
    """Writes a Python for jobs that knows a mirror of what is fetched."""
    path.write_text(PYTHON.format(mirror=mirror, python=sys.executable))
    path.chmod(0o755)


def shorten_slimpajama(project: Path) -> None:
    """Lets a recipe make 72 files of as many shards, not of 59,166."""
    path = project / "recipes/azure/data/slimpajama.toml"
    text = path.read_text()
    assert "files_per_output = 822" in text
    path.write_text(text.replace("files_per_output = 822", "files_per_output = 1"))
