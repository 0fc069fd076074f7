"""The record of token files in `<prefix>.json`: their tokenizer, sources and checksums.

    sidecar = load_sidecar("corpus_text_document")
    sidecar.check_against(name, fingerprint, prefix)  # rejects a different tokenizer
    sidecar.check_sizes(prefix)                       # cheap; `verify.check_data` reads all bytes
    sidecar.tokens, sidecar.text_bytes                # for bits per byte, for instance

A file's checksums cover blocks of about 16 MiB, to locate damage. Source files are listed with size
and mtime, without checksum: those of the `.bin` already pin every document. The record does not
depend on the number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trainyard.data.tokenizer import SpecialTokens
from trainyard.errors import DataError
from trainyard.files import FileRecord, publish_text, read_file

SAMPLES_PER_REASON = 3
SAMPLE_CHARACTERS = 500


def add_counts(total: dict[str, int], added: Mapping[str, int]) -> None:
    """Adds counts by name."""
    for name, count in added.items():
        total[name] = total.get(name, 0) + count


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


class StepCount(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What one step did: documents and bytes of UTF-8 that came in, left, and why they fell."""

    kind: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: dict[str, int] = {}
    """Documents by the reason they were dropped for."""
    dropped_sentences: dict[str, int] = {}
    """Sentences of documents that were kept, by the template that could not be rendered."""
    samples: dict[str, list[str]] | UnsetType = UNSET
    """The start of the first few documents that were dropped for a reason."""

    def drop(self, reason: str, text: str) -> None:
        """Counts a dropped document."""
        add_counts(self.dropped, {reason: 1})
        self._keep(reason, [text[:SAMPLE_CHARACTERS]])

    def _keep(self, reason: str, texts: list[str]) -> None:
        self.samples = {} if self.samples is UNSET else self.samples
        self.samples[reason] = (self.samples.get(reason, []) + texts)[:SAMPLES_PER_REASON]

    def add(self, other: StepCount) -> None:
        """Adds what the same step did elsewhere."""
        self.documents_in += other.documents_in
        self.documents_out += other.documents_out
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        add_counts(self.dropped, other.dropped)
        add_counts(self.dropped_sentences, other.dropped_sentences)
        for reason, texts in ({} if other.samples is UNSET else other.samples).items():
            self._keep(reason, texts)

    def describe_sentences(self) -> str:
        """Returns how many sentences fell, and which templates took the most; "" if none fell."""
        by_number = sorted(self.dropped_sentences.items(), key=lambda item: (-item[1], item[0]))
        if not by_number:
            return ""
        names = ", ".join(f"{name or '(no name)'} {count:,}" for name, count in by_number[:5])
        rest = f" and {len(by_number) - 5:,} more" if len(by_number) > 5 else ""
        total = sum(self.dropped_sentences.values())
        sentences = "1 sentence" if total == 1 else f"{total:,} sentences"
        return f"{sentences} with a template that cannot be rendered: {names}{rest}"


class GroupCount(msgspec.Struct, forbid_unknown_fields=True):
    """Documents, bytes of UTF-8 and tokens in the token files with one value of `count_by`."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def add(self, other: GroupCount) -> None:
        """Adds more documents with the same value."""
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.tokens += other.tokens


class Sidecar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record beside token files; counts are of these files, tokens include document ends."""

    format_version: Literal[2] = 2
    recipe: str
    """Checksum of everything that decides the bytes: inputs, options, steps, tokenizer."""
    tokenizer: TokenizerRecord
    json_key: str
    append_eod: bool
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    text_bytes: int
    steps: list[StepCount]
    """Reading first, then each step of the data file, in order."""
    groups: dict[str, GroupCount]
    """By value of the data file's `count_by`."""
    quarantined: dict[str, int]
    """Documents that could not be read, by kind of fault."""
    quarantined_places: list[str]
    """The first few of each kind."""
    bin: FileRecord
    idx: FileRecord
    sources: list[SourceRecord]
    split_on: str | UnsetType = UNSET
    """The text that documents were split on."""
    special_texts: dict[str, int] | UnsetType = UNSET
    """How often special tokens occur within documents, where they were read as text."""
    not_prose: dict[str, int] | UnsetType = UNSET
    """Documents that look like another format, by its name: HTML, CSV."""
    lost_bytes: int | UnsetType = UNSET
    """Bytes of documents for which the tokenizer has no token."""
    seal: str = ""
    """Checksum of all of the above; set when it is saved."""

    def check_against(self, name: str, fingerprint: str, prefix: str | Path) -> None:
        """Refuses a tokenizer that did not make these ids.

        Raises:
            DataError: the fingerprints differ.
        """
        made_by = self.tokenizer
        if made_by.fingerprint != fingerprint:
            raise DataError(
                f"{prefix} was made with the tokenizer {made_by.name} "
                f"(fingerprint {made_by.fingerprint[:16]}, {made_by.vocabulary_size} tokens), "
                f"not with {name} (fingerprint {fingerprint[:16]})",
                "name the tokenizer that made the data, or prepare the data again with this one",
            )

    def check_sizes(self, prefix: str | Path) -> None:
        """Compares the sizes of the token files with the record.

        Raises:
            DataError: a file is missing, or has another size than was written.
        """
        for record, path in ((self.bin, Path(f"{prefix}.bin")), (self.idx, Path(f"{prefix}.idx"))):
            if not path.is_file():
                raise DataError(f"{path} is missing", "copy all three files: .bin, .idx and .json")
            size_bytes = path.stat().st_size
            if size_bytes != record.size_bytes:
                raise DataError(
                    f"{path} has {size_bytes} bytes, but {record.size_bytes} were written",
                    "copy the file again, or prepare the data again",
                )


def save_sidecar(sidecar: Sidecar, prefix: str | Path) -> None:
    """Writes `<prefix>.json`, sealed and atomically."""
    sealed = msgspec.structs.replace(sidecar, seal=_seal(sidecar))
    text = msgspec.json.format(msgspec.json.encode(sealed), indent=2).decode()
    publish_text(Path(f"{prefix}.json"), text + "\n")


def _seal(sidecar: Sidecar) -> str:
    unsealed = msgspec.structs.replace(sidecar, seal="")
    return hashlib.sha256(msgspec.json.encode(unsealed)).hexdigest()


def load_sidecar(prefix: str | Path) -> Sidecar:
    """Reads `<prefix>.json`.

    Raises:
        DataError: the file is missing, malformed, or of another version.
    """
    path = Path(f"{prefix}.json")
    try:
        sidecar = msgspec.json.decode(read_file(path), type=Sidecar)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing, so the tokenizer of {prefix}.bin is unknown",
            "copy it along with the .bin and .idx, or prepare the data with `trainyard prepare`",
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a record of token files: {error}",
            "copy it again, or prepare the data again with this version of Trainyard",
        ) from error
    if sidecar.seal != _seal(sidecar):
        raise DataError(
            f"{path} was changed after it was written: its checksum does not match",
            "copy it again, or prepare the data again",
        )
    return sidecar
