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
     "format": 4,
     "step": 1000, "consumed_sequences": 256000, "consumed_tokens": 524288000,
     "run": {...}, "plan": {...}, "versions": {...}, "data_fingerprint": "...", "training": {...},
     "grids": [{"names": ["model.final_norm.weight", ...], "dtype": "float32", "shape": [768],
                "starts": [[0, 384]], "files": [0, 1]}, ...],
     "files": {"model-00000-of-00002.safetensors": [1073740800, "sha256 of its header"], ...},
     "tokenizer": {"n_bytes": 1755863, "sha256": "...", "fingerprint": "..."}}

Tensor names are global: `model.blocks.17.attention.qkv.weight`, `optimizer.<parameter>.exp_avg`.
A tensor is stored in chunks, as sharded when saved; each has the tensor's name inside its file. The
chunks of a tensor form a grid, and the manifest has one entry for all tensors with the same grid
and files, so it grows with ranks and not with chunks:

    offset   0        512      800        rows over data ranks, columns over tensor ranks
        0    +--------+--------+
      100    | file 0 | file 1 |          "shape": [200, 800], "starts": [[0, 100], [0, 512]],
      200    | file 2 | file 3 |          "files": [0, 1, 2, 3]: numbers in "files" below
             +--------+--------+

The checksum of a chunk, XXH3-128, is in the header of its file (`shard.py`), and the header's
SHA-256 in the manifest: together they cover every byte of a file. A reader opens only the files of
chunks that it needs, and hashes only these. Only one rank writes what several hold, so no byte is
stored twice.

Formats 1 to 3, still readable, list each chunk in the manifest, with its checksum (in formats 1 and
2 SHA-256, named "sha256"); format 1 has no tokenizer. `RENAMED` in `config/load.py` translates
fields of their runs.

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
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, Self

import numpy as np
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
from trainyard.errors import CheckpointError, NewerFormatError
from trainyard.units import format_bytes

FORMAT: Final = 4
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
MANIFEST_LIMIT_BYTES = 2**34  # format 3: 80 million chunks of 205 bytes
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


class Chunk(NamedTuple):
    """A part of a tensor, and the file that holds it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    """Its number in `Manifest.files`."""


class StoredFile(NamedTuple):
    """A file's size, and the checksum of its header."""

    n_bytes: Count
    header_sha256: Sha256


class Grid(_Part):
    """Tensors of one type and shape, in the same chunks and files."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    dtype: str
    shape: tuple[Count, ...]
    starts: tuple[tuple[Count, ...], ...]
    """Where the chunks begin in each dimension."""
    files: tuple[Count, ...]
    """The file of each chunk, by its number in `Manifest.files`; the last dimension is fastest."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        is_cut = len(self.starts) == len(self.shape) and all(
            list(starts) == sorted({0, *starts}) and starts[-1] < max(length, 1)
            for starts, length in zip(self.starts, self.shape, strict=True)
        )
        n_chunks = math.prod(map(len, self.starts))
        if not is_cut or not len(self.files) == len(set(self.files)) == n_chunks:
            what = f"tensor {self.names[0]!r} of shape {list(self.shape)}"
            raise ValueError(f"{what}: {len(self.files)} chunks overlap, or leave a hole")
        return self

    def chunks(self) -> Iterator[Chunk]:
        """Yields the chunks by their offsets, in order."""
        cuts = zip(self.starts, self.shape, strict=True)
        lengths = (np.diff(starts, append=length).tolist() for starts, length in cuts)
        return map(Chunk, itertools.product(*self.starts), itertools.product(*lengths), self.files)


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

    format: Literal[1, 2, 3, 4] = FORMAT
    grids: tuple[Grid, ...]
    files: dict[PlainName, StoredFile]
    """The files that hold tensors."""
    tokenizer: StoredTokenizer | None = None
    checksums: dict[str, dict[str, Checksum]] = Field(default={}, exclude=True)
    """Checksums of chunks by file and tensor, in formats 1 to 3; later ones are in the files."""

    @cached_property
    def tensors(self) -> dict[str, Grid]:
        """The grid of each tensor by name."""
        return {name: grid for grid in self.grids for name in grid.names}

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file except the manifest."""
        sizes = {name: file.n_bytes for name, file in self.files.items()}
        return sizes | ({TOKENIZER: self.tokenizer.n_bytes} if self.tokenizer else {})

    @model_validator(mode="after")
    def _tensors_fit_their_files(self) -> Self:
        if any(max(grid.files) >= len(self.files) for grid in self.grids):
            raise ValueError("a tensor is in a file that is not listed")
        values = sum(DTYPE_BYTES[g.dtype] * len(g.names) * math.prod(g.shape) for g in self.grids)
        n_bytes = sum(file.n_bytes for file in self.files.values())
        if values > n_bytes:
            raise ValueError(f"tensors of {values} bytes do not fit in files of {n_bytes} bytes")
        return self


class _OlderChunk(_Part):
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: PlainName
    checksum: Checksum = Field(validation_alias=AliasChoices("checksum", "sha256"))


class _OlderTensor(_Part):
    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[_OlderChunk, ...]


class _OlderManifest(Manifest):
    """A manifest of formats 1 to 3, which lists the chunks of each tensor."""

    grids: tuple[Grid, ...] = ()
    older: dict[str, _OlderTensor] = Field(alias="tensors")

    def convert(self) -> Manifest:
        """Returns it as one of today.

        Raises:
            ValueError: it contradicts itself.
        """
        numbers = {name: number for number, name in enumerate(self.files)}
        kept = {name: value for name, value in self if name != "older"}
        grids: list[Grid] = []
        checksums: dict[str, dict[str, str]] = {}
        for name, tensor in self.older.items():
            chunks = []
            for each in tensor.chunks:
                chunks.append(Chunk(each.offset, each.shape, numbers.get(each.file, len(numbers))))
                checksums.setdefault(each.file, {})[name] = each.checksum
            grids.append(make_grid((name,), tensor.dtype, tensor.shape, chunks))
        return Manifest(**kept | {"grids": tuple(grids), "checksums": checksums})


class _OnlyFormat(BaseModel):
    format: int


def make_grid(
    names: tuple[str, ...], dtype: str, shape: tuple[int, ...], chunks: Sequence[Chunk]
) -> Grid:
    """Describes tensors that are stored in these chunks, in any order.

    Raises:
        ValueError: the chunks do not fill the shape exactly, or are no grid.
    """
    in_order = sorted(chunks)
    starts = [tuple(sorted({*each})) for each in zip(*(c.offset for c in chunks), strict=False)]
    files = tuple(chunk.file for chunk in in_order)
    grid = Grid(names=names, dtype=dtype, shape=shape, starts=tuple(starts), files=files)
    for found, wanted in zip(in_order, grid.chunks(), strict=True):
        if found != wanted:
            place = (
                f"{list(wanted.offset)} is a chunk of {list(found.shape)}, not {list(wanted.shape)}"
            )
            raise ValueError(f"tensor {names[0]!r} of shape {list(shape)}: at {place}")
    return grid


def render_manifest(manifest: Manifest) -> bytes:
    """Serialises a manifest as JSON that starts with the checksum of the rest."""
    body = b"\n" + manifest.model_dump_json().encode()[1:]
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
            what = f"{path / name} has {found} bytes instead of {n_bytes}"
            raise CheckpointError(what, OLDER_IS_KEPT)
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
        limit = format_bytes(MANIFEST_LIMIT_BYTES)
        what = f"{path} has {format_bytes(size)}; no manifest is above {limit}"
        raise CheckpointError(what, OLDER_IS_KEPT)
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
            raise NewerFormatError(
                f"{path} has format {written}; this version of Trainyard reads formats 1 to "
                f"{FORMAT}",
                "upgrade Trainyard to read this checkpoint",
            )
        if written == FORMAT:
            return Manifest.model_validate_json(b"{" + body)
        return _OlderManifest.model_validate_json(b"{" + body).convert()
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{path} is malformed: {why}", OLDER_IS_KEPT) from None


def _short(problem: object) -> str:
    text = repr(problem["input"])  # type: ignore[index]
    return text if len(text) <= 60 else f"{text[:57]}..."
