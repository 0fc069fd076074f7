"""Writes weights in other layouts, one tensor at a time: run folders, and files of safetensors.

runs/gpt2/
  run.toml                          the model's shape; the user adds data and schedule
  tokenizer/tokenizer.json          if there is one
  checkpoints/step-00000000/        the weights; moments start from zero

Only the largest tensor and the copies of its conversion need memory. An outline describes a future
tensor: its dtype and shape on the device "meta".

    outlines  {"model.embedding.weight": meta (50304, 768), ...}
    make      "model.embedding.weight" -> its values, read and converted on demand
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from trainyard.architecture import padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint.format import Facts, StoredFile, step_folder_name
from trainyard.checkpoint.save import RankManifest, list_parts, require_space, write_manifest
from trainyard.checkpoint.shard import split_in_shards, write_shard
from trainyard.config.load import render_run
from trainyard.config.run import Model, Run, TokenizerChoice
from trainyard.data.vocabulary import Vocabulary, load_vocabulary
from trainyard.errors import CheckpointError, DataError, MachineError
from trainyard.training.run_folder import TOKENIZER_FOLDER, write_tokenizer_folder

Make = Callable[[str], Tensor]


def outline(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Describes tensors of one type without their values."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def require_new(output: Path) -> None:
    """Checks that `output` can be created.

    Raises:
        CheckpointError: it exists.
    """
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


def write_run_folder(
    output: Path, model: Model, description: str, vocabulary: Vocabulary | None, make: Make
) -> Path:
    """Writes a run folder atomically; returns its checkpoint.

    Args:
        output: the folder to create.
        model: of the run, which has defaults elsewhere.
        description: of the run.
        vocabulary: of its tokenizer.
        make: returns the values of a parameter, named as in the model.

    Raises:
        MachineError: `output` cannot be written.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", output.name).lstrip("._-")[:100] or "imported"
    tokenizer = TokenizerChoice(path=str(output / TOKENIZER_FOLDER) if vocabulary else "")
    run = Run(name=name, description=description, model=model, tokenizer=tokenizer)
    shapes = parameter_shapes(model, padded_vocabulary_size(model))
    outlines = outline({f"model.{name}": shape for name, shape in shapes.items()}, torch.float32)
    facts = Facts(step=0, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json"))
    shards = split_in_shards(outlines)
    folder = Path("checkpoints") / step_folder_name(facts.step)
    with new_folder(output) as partial:
        require_space(partial, sum(tensor.nbytes for tensor in outlines.values()))
        (partial / folder).mkdir(parents=True)
        written = RankManifest(list_parts(shards), {})
        for index, shard in enumerate(shards):
            file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            written.files[file] = write_tensors(
                partial / folder / file, shard, lambda name: make(name.removeprefix("model."))
            )
        write_manifest(partial / folder, facts, [written], vocabulary)
        (partial / "run.toml").write_text(render_run(run), encoding="utf-8")
        if vocabulary:
            write_tokenizer_folder(partial, vocabulary)
    return output / folder


def write_tensors(path: Path, outlines: Mapping[str, Tensor], make: Make) -> StoredFile:
    """Writes and flushes one safetensors file, with one tensor after another in memory.

    Args:
        path: the file.
        outlines: by name.
        make: returns the values, of any dtype, in the outline's shape.

    Raises:
        CheckpointError: a value is not finite in the outline's dtype.
    """

    def make_finite(name: str) -> Tensor:
        like = outlines[name]
        tensor = make(name).to(like.dtype)
        assert tensor.shape == like.shape, (name, tensor.shape, like.shape)
        if not all(map(torch.isfinite, tensor.aminmax())):
            dtype = str(like.dtype).removeprefix("torch.")
            hint = "take an earlier checkpoint"
            hint += ", or --dtype bfloat16" if dtype == "float16" else ""
            raise CheckpointError(
                f"tensor {name!r} has values that are not finite in {dtype}", hint
            )
        return tensor

    return write_shard(path, outlines, make_finite)
