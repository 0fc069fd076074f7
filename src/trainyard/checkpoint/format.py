"""A checkpoint on disk: one folder per step, with a manifest and safetensors shards; no pickle.

    runs/demo/checkpoints/
      step-00001000/
        model-00000-of-00002.safetensors         rank 0 of 2
        model-00001-of-00002.safetensors
        optimizer-00000-of-00002.safetensors
        optimizer-00001-of-00002.safetensors
        tokenizer.json                           a copy of the run's, if any
        manifest.json
      .step-00002000.partial/        being written, or left by a killed save

    {"sha256": "9f86d081...",                        of every byte after this line's comma
     "format": 3,
     "step": 1000, "consumed_sequences": 256000, "consumed_tokens": 524288000,
     "run": {...}, "plan": {...}, "versions": {...}, "data_fingerprint": "...", "training": {...},
     "tensors": {"model.final_norm.weight": {"dtype": "float32", "shape": [768], "chunks": [
         {"offset": [0], "shape": [384], "file": "model-00000-of-00002.safetensors",
          "checksum": "..."},
         {"offset": [384], "shape": [384], "file": "model-00001-of-00002.safetensors",
          "checksum": "..."}]}, ...},
     "files": {"model-00000-of-00002.safetensors": {"n_bytes": 1073740800,
                                                    "header_sha256": "..."}, ...},
     "tokenizer": {"n_bytes": 1755863, "sha256": "...", "fingerprint": "..."}}

Checksums of chunks are XXH3-128, all others SHA-256. Formats 1 and 2, still readable, have SHA-256
for chunks too, named "sha256"; format 1 has no tokenizer. `RENAMED` in `config/load.py` translates
fields of their runs.

Tensor names are global: `model.blocks.17.attention.qkv.weight`, `optimizer.<parameter>.exp_avg`.
A tensor is stored in chunks, as sharded when saved; each has the tensor's name inside its file. The
chunks of a tensor form a grid, so their lengths reveal holes and overlaps:

    offset   0        512      800        rows over data ranks, columns over tensor ranks
        0    +--------+--------+
      100    |        |        |          {0, 512} x {0, 100, 200}: every corner has its chunk
      200    +--------+--------+

The checksums of the chunks and of the header cover every byte of a file; a reader hashes only the
chunks it needs. Only one rank writes what several hold, so no byte is stored twice.

Checkpoints are untrusted input: sizes, names and shapes are checked against the files before
anything is allocated or opened by name.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import stat
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from trainyard.config.load import build_run
from trainyard.config.run import Run
from trainyard.errors import CheckpointError
from trainyard.units import format_bytes

FORMAT: Final = 3
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
MANIFEST_LIMIT_BYTES = 2**34  # 80 million chunks of 205 bytes; 8,192 ranks may write 17 million
HEADER_LIMIT_BYTES = 100_000_000
STEP_FOLDER = re.compile(r"step-([0-9]{8,})")
DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Bytes of a value, by torch's name of its type."""
GIVE_A_FOLDER = "give a run folder, or one of the step-... folders in its checkpoints/"
OLDER_IS_KEPT = (
    "restore its files from a copy, or move the folder away to use the checkpoint before it"
)
_SEAL_START, _SEAL_END, _SEAL_BYTES = b'{"sha256": "', b'",', 78

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Checksum = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})$")]
"""XXH3-128 or, in formats 1 and 2, SHA-256; in hex."""
PlainName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
]


class _Part(BaseModel, extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants"):
    """A part of a manifest."""


class Chunk(_Part):
    """A part of a tensor, and the file that holds it."""

    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: PlainName
    checksum: Checksum = Field(validation_alias=AliasChoices("checksum", "sha256"))
    """Checksum of the values, as stored in the file."""


class StoredTensor(_Part):
    """A tensor's dtype, global shape and chunks."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        return self


class StoredFile(_Part):
    """A file's size, and the checksum of its header."""

    n_bytes: Count
    header_sha256: Sha256


class StoredTokenizer(_Part):
    """The copy of the run's tokenizer, `tokenizer.json`."""

    n_bytes: Count
    sha256: Sha256
    """Checksum of the file."""
    fingerprint: Sha256
    """Checksum of everything that affects ids: `Vocabulary.fingerprint`."""


class Facts(_Part):
    """The training state at a step, besides the tensors."""

    step: Count
    consumed_sequences: Count
    consumed_tokens: Count
    run: dict[str, JsonValue]
    """`Run.model_dump(mode="json")`."""
    plan: dict[str, JsonValue] = {}
    versions: dict[str, str] = {}
    """Versions of Python, torch and Trainyard; checksum and commit of the code."""
    data_fingerprint: str = ""
    """Checksum of the token files, independent of their paths; empty if none was read."""
    training: dict[str, JsonValue] = {}
    """State of the loop outside tensors: skipped steps, loss scale."""

    def build_run(self) -> Run:
        """Parses the run of this checkpoint.

        Raises:
            CheckpointError: this version cannot parse it.
        """
        try:
            return build_run(self.run)
        except ValidationError as error:
            raise CheckpointError(
                f"the run in the checkpoint of step {self.step} is not valid: "
                f"{first_problem(error)}",
                "it was written by another version of Trainyard, or changed by hand",
            ) from None


class Manifest(Facts):
    """Everything in `manifest.json`."""

    format: Literal[1, 2, 3] = FORMAT
    tensors: dict[str, StoredTensor]
    files: dict[PlainName, StoredFile]
    """The files that hold tensors."""
    tokenizer: StoredTokenizer | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file except the manifest."""
        sizes = {name: file.n_bytes for name, file in self.files.items()}
        return sizes | ({TOKENIZER: self.tokenizer.n_bytes} if self.tokenizer else {})

    @model_validator(mode="after")
    def _tensors_fit_their_files(self) -> Self:
        needed = dict.fromkeys(self.files, 0)
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                file = chunk.file
                if file not in needed:
                    raise ValueError(f"tensor {name!r} is in {file!r}, which is not listed")
                needed[file] += math.prod(chunk.shape) * DTYPE_BYTES[tensor.dtype]
                if needed[file] > self.files[file].n_bytes:
                    raise ValueError(
                        f"tensor {name!r} with shape {list(chunk.shape)} does not fit in {file!r}, "
                        f"which has {self.files[file].n_bytes} bytes"
                    )
            problem = grid_problem(tensor)
            if problem:
                raise ValueError(f"tensor {name!r} of shape {list(tensor.shape)}: {problem}")
        return self


class _OnlyFormat(BaseModel):
    format: int


def grid_problem(tensor: StoredTensor) -> str:
    """Returns why the chunks of a tensor do not fill its shape exactly; empty if they do."""
    n_dimensions = len(tensor.shape)
    if any(len(c.offset) != n_dimensions or len(c.shape) != n_dimensions for c in tensor.chunks):
        return "a chunk has a different number of dimensions"
    if 0 in tensor.shape:
        is_whole = [chunk.shape for chunk in tensor.chunks] == [tensor.shape]
        return "" if is_whole else "an empty tensor must be one chunk of its whole shape"
    if any(0 in chunk.shape for chunk in tensor.chunks):
        return "a chunk is empty"
    starts: list[list[int]] = []
    for dimension, length in enumerate(tensor.shape):
        spans = sorted({(c.offset[dimension], c.shape[dimension]) for c in tensor.chunks})
        end = 0
        for start, span in [*spans, (length, 0)]:
            if start != end:
                what = "no chunk holds" if start > end else "chunks overlap at, or reach beyond,"
                return f"{what} {min(start, end)}:{max(start, end)} of dimension {dimension}"
            end = start + span
        starts.append([start for start, _ in spans])
    found = {chunk.offset for chunk in tensor.chunks}
    if len(found) < len(tensor.chunks):
        return "two chunks overlap: they have the same offset"
    hole = next((corner for corner in itertools.product(*starts) if corner not in found), None)
    return f"no chunk covers offset {list(hole)}" if hole else ""


def render_manifest(manifest: Manifest) -> bytes:
    """Serialises a manifest as JSON that starts with the checksum of the rest."""
    body = manifest.model_dump_json(indent=1).encode()[1:]
    return _SEAL_START + hashlib.sha256(body).hexdigest().encode() + _SEAL_END + body


def manifest_sha256(path: Path) -> str:
    """Reads the checksum of the manifest in the checkpoint folder `path`, and so of its tensors."""
    with (path / MANIFEST).open("rb") as file:
        return file.read(_SEAL_BYTES)[len(_SEAL_START) : -len(_SEAL_END)].decode()


def load_manifest(path: Path) -> Manifest:
    """Reads and checks the manifest of the checkpoint folder `path`, and no other file.

    Raises:
        CheckpointError: no checkpoint, or a manifest that is damaged, malformed or from a newer
            version.
    """
    return _parse_manifest(path / MANIFEST, _read_bytes(path / MANIFEST))


def read_manifest(path: Path) -> Manifest:
    """Reads and checks the manifest of the checkpoint folder `path`, and the sizes of its files.

    Raises:
        CheckpointError: as `load_manifest`, or a file is missing or has another size.
    """
    manifest = load_manifest(path)
    for name, n_bytes in manifest.sizes.items():
        found = regular_file_size(path / name)
        if found is None:
            raise CheckpointError(f"{path / name} is missing", hint_for(path, OLDER_IS_KEPT))
        if found != n_bytes:
            raise CheckpointError(
                f"{path / name} has {found} bytes instead of {n_bytes}", OLDER_IS_KEPT
            )
    return manifest


def hint_for(path: Path, hint: str) -> str:
    """Returns the hint for a problem of a checkpoint folder, or what to do if it is gone."""
    return hint if path.is_dir() else "training has removed it meanwhile: run the command again"


def list_checkpoints(folder: Path) -> list[Path]:
    """Lists the step folders in `folder`, newest first, complete or not.

    A broken link counts: its disk may be unmounted.
    """
    paths = (path for path in folder.glob("step-*") if path.is_dir() or path.is_symlink())
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def first_problem(error: ValidationError) -> str:
    """Describes pydantic's first error in one line: where, what and the value."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    got = "" if problem["type"] in ("value_error", "json_invalid") else f" (got {_short(problem)})"
    return f"{place}: {message}{got}" if place else f"{message}{got}"


def step_of(path: Path) -> int | None:
    """Parses the step from a checkpoint folder's name; None if it is not one."""
    match = STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folder_name(step: int) -> str:
    """Names the folder of a step: step-00001234."""
    return f"step-{step:08d}"


def header_sha256(path: Path) -> str:
    """Computes the SHA-256 of a safetensors file's header, including its length, in hex.

    A length beyond the format's limit, from damage, yields the checksum of no bytes.
    """
    with path.open("rb") as file:
        length = file.read(8)
        n_bytes = int.from_bytes(length, "little")
        header = length + file.read(n_bytes) if n_bytes <= HEADER_LIMIT_BYTES else b""
    return hashlib.sha256(header).hexdigest()


def regular_file_size(path: Path) -> int | None:
    """Returns the size of a regular file in bytes; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_bytes(path: Path) -> bytes:
    if not os.path.isdir(path.parent):  # noqa: PTH112  # False where it cannot be looked at
        raise CheckpointError(f"no checkpoint folder {path.parent}", GIVE_A_FOLDER)
    size = regular_file_size(path)
    if size is None:
        problem = f"{path.parent} is not a checkpoint: it has no {MANIFEST}"
        raise CheckpointError(problem, GIVE_A_FOLDER)
    if size > MANIFEST_LIMIT_BYTES:
        raise CheckpointError(
            f"{path} has {format_bytes(size)}; no manifest is above "
            f"{format_bytes(MANIFEST_LIMIT_BYTES)}",
            OLDER_IS_KEPT,
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", OLDER_IS_KEPT) from None


def _parse_manifest(path: Path, raw: bytes) -> Manifest:
    body = raw[_SEAL_BYTES:]
    found = hashlib.sha256(body).hexdigest()
    if raw[:_SEAL_BYTES] != _SEAL_START + found.encode() + _SEAL_END:
        raise CheckpointError(
            f"{path} is damaged: its first line must be its checksum, {found}, "
            f"but reads {raw[:_SEAL_BYTES]!r}",
            OLDER_IS_KEPT,
        )
    try:
        written = _OnlyFormat.model_validate_json(b"{" + body).format
        if written > FORMAT:
            raise CheckpointError(
                f"{path} has format {written}; this version of Trainyard reads formats 1 to "
                f"{FORMAT}",
                "upgrade Trainyard to read this checkpoint",
            )
        return Manifest.model_validate_json(b"{" + body)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is malformed: {first_problem(error)}", OLDER_IS_KEPT
        ) from None


def _short(problem: object) -> str:
    text = repr(problem["input"])  # type: ignore[index]
    return text if len(text) <= 60 else f"{text[:57]}..."
