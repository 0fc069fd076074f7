"""`trainyard.prepare` and `train`: the work of the commands of these names, from Python."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.api.planning import load_run
from trainyard.errors import UserError
from trainyard.training.start import RUNS

if TYPE_CHECKING:
    from trainyard.api.checkpoints import SavedCheckpoint
    from trainyard.config.run import Run


@dataclass(frozen=True)
class Prepared:
    """Token files, and a run file to train on them."""

    run_file: Path
    prefixes: list[str]
    """Of the token files, without `.bin` or `.idx`."""
    n_documents: int
    n_tokens: int


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "",
    vocabulary_size: int = 0,
    workers: int = 1,
    overwrite: bool = False,
    **settings: Any,
) -> Prepared:
    """Tokenizes text into Megatron-LM token files, and writes a run file, `output`.toml.

    Args:
        inputs: text files, folders and globs.
        output: path prefix of the token files.
        tokenizer: "gpt2" or a tokenizer's folder; empty: train one.
        vocabulary_size: of the tokenizer to train; 0: depends on the size of the text.
        workers: processes, one core each.
        overwrite: replace token files made with other settings.
        settings: other fields of a data file, such as `json_key="body"` (docs/corpora.md).

    Raises:
        TrainyardError: an input or setting is wrong, or `output` exists with other settings.
    """
    from trainyard.config.corpus import check_complete, load_corpus, output_prefixes
    from trainyard.corpus.preparation import prepare as preparation
    from trainyard.corpus.preparation.run_file import write_run_file

    files = [inputs] if isinstance(inputs, str | Path) else inputs
    values = {"inputs": [str(file) for file in files], "output": str(output), **settings}
    corpus = load_corpus(None, {**values, "tokenizer": tokenizer})
    check_complete(corpus)
    or_fewer = not vocabulary_size
    if not tokenizer:
        corpus, vocabulary_size = preparation.choose_tokenizer(corpus, vocabulary_size)
    if vocabulary_size:
        preparation.train_on_inputs(corpus, vocabulary_size, overwrite=overwrite, or_fewer=or_fewer)
    sidecars = preparation.prepare(corpus, workers=workers, overwrite=overwrite)
    return Prepared(
        write_run_file(corpus, sidecars).path,
        output_prefixes(corpus, len(sidecars)),
        sum(sidecar.documents for sidecar in sidecars),
        sum(sidecar.tokens for sidecar in sidecars),
    )


def train(
    run: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    minutes: float | None = None,
    overwrite: bool = False,
) -> SavedCheckpoint:
    """Trains in `runs/NAME` as `trainyard train` does, in processes of their own.

    Resumes a run that has begun. Prints the log; Ctrl-C saves, then raises KeyboardInterrupt.

    Args:
        run: as for `load_run`.
        overrides: such as "train.length=500 steps".
        ranks: processes; absent: one per GPU, or those of the run's layout.
        minutes: shorten the run to what this machine trains in that time.
        overwrite: remove the run's checkpoints and metrics, and start over.

    Returns:
        The last checkpoint.

    Raises:
        TrainyardError: the run is wrong, or stopped before its end.
    """
    from trainyard.api.checkpoints import SavedCheckpoint
    from trainyard.config import load
    from trainyard.config.run import Run

    name = load_run(run, overrides).name
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        if isinstance(run, Run):
            file = Path(folder) / "run.toml"
            file.write_text(load.render_run(run), encoding="utf-8")
            run = file
        options = {
            "run_file": str(run),
            "overrides": list(overrides),
            "ranks": ranks,
            "minutes": minutes,
            "overwrite": overwrite,
        }
        code, told = _run_program("trainyard.api.training", json.dumps(options))
    if code:
        error, _, hint = told.partition("\nhint: ")
        where = f"training of {name} ended with exit code {code}"
        raise UserError(error or where, hint or "train it again to continue")
    return SavedCheckpoint(RUNS / name)


def _run_program(*words: str) -> tuple[int, str]:
    """Runs a module in a child process and prints its output; returns its exit code and error."""
    command = [sys.executable, "-P", "-m", *words]
    output, error = subprocess.PIPE, subprocess.STDOUT
    is_interrupted = False
    lines: list[str] = []
    # A group of its own: Ctrl-C reaches it once, from here, whoever sent it.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, process_group=0
    ) as child:
        assert child.stdout is not None
        while child.returncode is None:
            try:
                for line in child.stdout:
                    text = line.decode(errors="replace")
                    sys.stdout.write(text)
                    lines = [text] if text.startswith("error: ") else [*lines[-20:], text]
                child.wait()
            except KeyboardInterrupt:
                is_interrupted = True
                child.send_signal(signal.SIGINT)
    if is_interrupted:
        raise KeyboardInterrupt
    told = "".join(lines).strip()
    return child.returncode, told.removeprefix("error: ") if told.startswith("error: ") else ""
