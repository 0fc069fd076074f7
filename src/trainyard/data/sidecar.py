"""What `<prefix>.json` says about a pair of token files: who made them, and from what.

    sidecar = load_sidecar("corpus_text_document")
    sidecar.check_against(tokenizer)          # refuses another tokenizer than the one that made it
    sidecar.check_files(prefix, full=True)    # sizes, and with `full` every byte
    sidecar.tokens, sidecar.text_bytes        # for bits per byte, for instance

A source file is named with its size and time of change, not with a checksum: the checksum of the
`.bin` already pins every document that was read, and costs half as much.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from trainyard.data.publish import publish_text
from trainyard.data.tokenizer import SpecialTokens, Tokenizer
from trainyard.errors import DataError


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size and checksum of a file that was written."""

    size_bytes: int
    sha256: str


class SourceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input file: its path as found, its size, its time of change in ns since 1970."""

    path: str
    size_bytes: int
    modified_ns: int


class TokenizerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer that made the ids; only the fingerprint identifies it."""

    name: str
    fingerprint: str
    vocabulary_size: int
    eod_id: int
    special_tokens: SpecialTokens


class Sidecar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record beside token files; counts are whole corpora, tokens include ends of documents."""

    format_version: Literal[1] = 1
    tokenizer: TokenizerRecord
    json_key: str
    append_eod: bool
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    text_bytes: int
    skipped: dict[str, int]
    skipped_places: list[str]
    bin: FileRecord
    idx: FileRecord
    sources: list[SourceRecord]

    def check_against(self, tokenizer: Tokenizer, prefix: str | Path) -> None:
        """Refuses a tokenizer that did not make these ids.

        Raises:
            DataError: the fingerprints differ.
        """
        made_by = self.tokenizer
        if made_by.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{prefix} was made with the tokenizer {made_by.name} "
                f"(fingerprint {made_by.fingerprint[:16]}, {made_by.vocabulary_size} tokens), "
                f"not with {tokenizer.name} (fingerprint {tokenizer.fingerprint[:16]}, "
                f"{tokenizer.vocabulary_size} tokens)",
                "name the tokenizer that made the data, or prepare the data again with this one",
            )

    def check_files(self, prefix: str | Path, *, full: bool = False) -> None:
        """Compares the sizes of the token files with the record; `full` reads every byte.

        Raises:
            DataError: a file is missing, or is not the one that was written.
        """
        for record, path in ((self.bin, Path(f"{prefix}.bin")), (self.idx, Path(f"{prefix}.idx"))):
            if not path.is_file():
                raise DataError(f"{path} is missing", "copy all three files: .bin, .idx and .json")
            hint = "copy the file again, or prepare the data again"
            size_bytes = path.stat().st_size
            if size_bytes != record.size_bytes:
                problem = f"{path} has {size_bytes} bytes, but {record.size_bytes} were written"
                raise DataError(problem, hint)
            if full and record_file(path).sha256 != record.sha256:
                raise DataError(f"{path} differs from what was written (sha256)", hint)


def record_file(path: Path) -> FileRecord:
    """Reads a file once, for its size and checksum."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def save_sidecar(sidecar: Sidecar, prefix: str | Path) -> None:
    """Writes `<prefix>.json`, atomically."""
    text = msgspec.json.format(msgspec.json.encode(sidecar), indent=2).decode()
    publish_text(Path(f"{prefix}.json"), text + "\n")


def load_sidecar(prefix: str | Path) -> Sidecar:
    """Reads `<prefix>.json`.

    Raises:
        DataError: the file is missing, malformed, or of another version.
    """
    path = Path(f"{prefix}.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sidecar)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing, so nothing says which tokenizer made {prefix}.bin",
            "copy it along with the .bin and .idx, or prepare the data with `trainyard prepare`",
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not a record of token files: {error}",
            "copy it again, or prepare the data again with this version of Trainyard",
        ) from error
