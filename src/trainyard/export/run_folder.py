"""Builds a run folder from imported weights, for further training.

runs/gpt2/
  run.toml                          the model's shape; the user adds data and schedule
  tokenizer/tokenizer.json          if there is one
  checkpoints/step-00000000/        the weights; moments start from zero
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import require_space
from trainyard.config.load import render_run
from trainyard.config.run import Model, Run, TokenizerChoice
from trainyard.data.vocabulary import Vocabulary, load_vocabulary
from trainyard.errors import CheckpointError, DataError, MachineError
from trainyard.export.stream import Make, write_weights
from trainyard.training.run_folder import TOKENIZER_FOLDER, write_tokenizer_folder

_LONGEST_NAME = 255 - len("..partial")


def require_new(output: Path) -> None:
    """Checks that `output` can be created.

    Raises:
        CheckpointError: it exists, or its name is too long.
    """
    if len(os.fsencode(output.name)) > _LONGEST_NAME:
        raise CheckpointError(
            f"the name {output.name[:20]}... is too long", f"at most {_LONGEST_NAME} bytes"
        )
    if output.exists():
        raise CheckpointError(f"{output} already exists", "name another --output, or remove it")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Creates a folder that takes the name `output` when it is complete.

    Raises:
        MachineError: it cannot be written.
    """
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(output)
    except OSError as error:
        raise MachineError(f"cannot write {output}: {error}", "free space on that disk") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_fitting(source: str | Path, model: Model) -> Vocabulary:
    """Loads a tokenizer and checks that it fits the model.

    Raises:
        DataError: as `load_vocabulary`, or it has more tokens than the model's vocabulary.
    """
    vocabulary = load_vocabulary(source)
    if len(vocabulary.tokens) > model.vocabulary_size:
        raise DataError(
            f"the tokenizer {source} has {len(vocabulary.tokens)} tokens, the model's "
            f"vocabulary {model.vocabulary_size}",
            "name the tokenizer that the model was trained with",
        )
    return vocabulary


def build_run(output: Path, model: Model, description: str, *, has_tokenizer: bool) -> Run:
    """Builds the run: its model, and defaults elsewhere."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", output.name).lstrip("._-")[:100] or "imported"
    tokenizer = TokenizerChoice(path=str(output / TOKENIZER_FOLDER) if has_tokenizer else "")
    return Run(name=name, description=description, model=model, tokenizer=tokenizer)


def write_run_folder(
    output: Path,
    run: Run,
    vocabulary: Vocabulary | None,
    outlines: Mapping[str, Tensor],
    make: Make,
) -> Path:
    """Writes a run folder atomically; returns its checkpoint.

    Args:
        output: the folder to create.
        run: from `build_run`.
        vocabulary: of its tokenizer.
        outlines: of the parameters, named as in the model.
        make: returns their values.

    Raises:
        MachineError: `output` cannot be written.
    """
    facts = Facts(step=0, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json"))
    with new_folder(output) as partial:
        require_space(partial, sum(tensor.nbytes for tensor in outlines.values()))
        checkpoint = write_weights(
            partial / "checkpoints",
            facts,
            {f"model.{name}": tensor for name, tensor in outlines.items()},
            lambda name: make(name.removeprefix("model.")),
            vocabulary,
        )
        (partial / "run.toml").write_text(render_run(run), encoding="utf-8")
        if vocabulary:
            write_tokenizer_folder(partial, vocabulary)
    return output / checkpoint.relative_to(partial)
