"""Splits a corpus into pieces of work: a pure function of its files and its data file.

    plan = plan_corpus(corpus, tokenizer)
    plan.outputs[0].prefix       # "data/web_text_document", or "data/web_00_text_document"
    plan.outputs[0].units        # range(0, 12): which units make it, in order
    plan.units[3]                # the segments of files that unit 3 reads
    plan.stages                  # the names of all pieces: units, then comparisons, then joins
    plan.recipe                  # a checksum of everything that decides the token files' bytes

Every process of a corpus computes the same plan.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from trainyard import __version__
from trainyard.config.corpus import Corpus, output_prefixes
from trainyard.corpus.preparation.duplicates import compared_columns
from trainyard.corpus.sources.files import (
    Segment,
    choose_unit_bytes,
    scan_inputs,
    split_into_units,
)
from trainyard.data.sidecar import SourceRecord, TokenizerRecord, load_sidecar
from trainyard.errors import DataError, printable


@dataclass(frozen=True)
class Output:
    """One pair of token files and what goes into it."""

    prefix: str
    units: range
    files: range


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes of the token files."""

    version: str
    options: dict[str, Any]
    unit_bytes: int
    tokenizer: str
    """The fingerprint; neither its name nor its place decides a byte."""
    sources: list[SourceRecord]

    def check_equal(self, other: Identity, place: str, hint: str) -> None:
        """Refuses work that was begun with other options, another tokenizer or other inputs.

        Args:
            other: the identity recorded at `place`.
            place: where, and what happened there: "data/web.work was begun".
            hint: what to do about it.

        Raises:
            DataError: names the first difference.
        """
        for difference in self._differences(other, place):
            raise DataError(difference, hint)

    def _list_changes(self, other: Identity, place: str) -> Iterator[str]:
        sources = {source.path: source for source in self.sources}
        for then in other.sources:
            path, now = printable(then.path), sources.pop(then.path, None)
            if now is None:
                yield f"{place} with {path}, which is not an input now"
            elif now != then:
                sizes = f"{now.size_bytes} bytes now, {then.size_bytes} then"
                yield f"{path} changed since {place}: {sizes}, or another time of change"
        for path in sources:
            yield f"{place} without {printable(path)}"

    def _differences(self, other: Identity, place: str) -> Iterator[str]:
        yield from self._list_changes(other, place)
        for name, value in self.options.items():
            if other.options.get(name) != value:
                yield f"{place} with {name}={other.options.get(name)!r}, not {name}={value!r}"
        if other.tokenizer != self.tokenizer:
            fingerprints = f"{other.tokenizer[:16]}, not {self.tokenizer[:16]}"
            yield f"{place} with another tokenizer, of the fingerprint {fingerprints}"
        for name in ("unit_bytes", "version"):
            if (value := getattr(other, name)) != getattr(self, name):
                yield f"{place} with {name} {value}, not {getattr(self, name)}"
        if other != self:
            yield f"{place} with the inputs in another order"

    def differs_in_contents(self, other: Identity) -> bool:
        """Returns whether the same work is on the same files, some of which changed."""
        if [source.path for source in self.sources] != [source.path for source in other.sources]:
            return False
        return self != other and msgspec.structs.replace(other, sources=self.sources) == self


@dataclass(frozen=True)
class PreparationPlan:
    """The pieces of work of a corpus, in order."""

    corpus: Corpus
    tokenizer: TokenizerRecord
    identity: Identity
    units: list[list[Segment]]
    outputs: list[Output]

    @cached_property
    def text(self) -> bytes:
        """The identity as the work folder keeps it."""
        return msgspec.json.encode(self.identity)

    @cached_property
    def recipe(self) -> str:
        """A checksum of the identity, to be compared by."""
        return hashlib.sha256(self.text).hexdigest()

    @cached_property
    def unit_bytes(self) -> list[int]:
        """Bytes of input of each unit."""
        return [sum(part.end - part.start for part in unit) for unit in self.units]

    @cached_property
    def comparisons(self) -> list[tuple[int, list[int]]]:
        """What repeats are found by: the number of a comparing step, and columns of its keys."""
        steps = enumerate(self.corpus.comparing_steps)
        return [(number, columns) for number, step in steps for columns in compared_columns(step)]

    @cached_property
    def stages(self) -> tuple[list[str], list[str], list[str]]:
        """Names the pieces of work: units, comparisons, joins; each stage needs the one before.

        A unit is named after the bytes that it reads, so its result is valid for any plan that has
        the name; the other pieces depend on the whole recipe.
        """
        end = self.recipe[:8]
        return (
            [f"unit-{self._unit_inputs(number)[:16]}" for number in range(len(self.units))],
            [f"compare-{number:03d}-{end}" for number in range(len(self.comparisons))],
            [f"join-{number:05d}-{end}" for number in range(len(self.outputs))],
        )

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each piece in its stage."""
        return {piece: number for stage in self.stages for number, piece in enumerate(stage)}

    def label(self, piece: str) -> str:
        """Names a piece for people: by its number."""
        return f"{piece.partition('-')[0]}-{self.numbers[piece]:06d}"

    @cached_property
    def _sources(self) -> dict[str, SourceRecord]:
        return {source.path: source for source in self.identity.sources}

    def unit_sources(self, number: int) -> list[SourceRecord]:
        """Lists the files that a unit reads."""
        paths = dict.fromkeys(part.path.as_posix() for part in self.units[number])
        return [self._sources[path] for path in paths]

    def output_sources(self, output: Output) -> list[SourceRecord]:
        """Lists the files that an output is made from."""
        return self.identity.sources[output.files.start : output.files.stop]

    def _unit_inputs(self, number: int) -> str:
        """A checksum of what a unit reads: parts of files, with their sizes and times of change."""
        spans = [(part.start, part.end) for part in self.units[number]]
        return hashlib.sha256(msgspec.json.encode((spans, self.unit_sources(number)))).hexdigest()

    def is_prepared(self) -> bool:
        """Returns whether every output exists and was made from this plan."""
        return all(map(self.is_made, self.outputs))

    def is_made(self, output: Output) -> bool:
        """Returns whether an output exists and was made from this plan."""
        try:
            sidecar = load_sidecar(output.prefix)
            sidecar.check_sizes(output.prefix)
        except DataError:
            return False
        return sidecar.recipe == self.recipe


def list_sources(corpus: Corpus) -> tuple[list[SourceRecord], Counter[str]]:
    """Lists the inputs with their sizes and times of change, and counts what is skipped.

    Raises:
        DataError: an input is missing, unknown, or given twice.
    """
    files, skipped = scan_inputs(corpus.inputs)
    sources = []
    linked: dict[tuple[int, int], Path] = {}
    for path in files:
        status = path.stat()
        if status.st_nlink > 1:
            first = linked.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                problem = f"{printable(path)} and {printable(first)} are hard links of one file"
                raise DataError(problem, "name one of them: else each document is tokenized twice")
        sources.append(SourceRecord(path.as_posix(), status.st_size, status.st_mtime_ns))
    return sources, skipped


def plan_corpus(
    corpus: Corpus,
    tokenizer: TokenizerRecord,
    unit_bytes: int | None = None,
    sources: list[SourceRecord] | None = None,
) -> PreparationPlan:
    """Cuts a corpus into units of about `unit_bytes` of input, and units into outputs.

    Args:
        corpus: what is prepared.
        tokenizer: that encodes it.
        unit_bytes: of input in a unit; None: chosen from the size of the inputs.
        sources: its inputs, if they have been listed.

    Raises:
        DataError: an input is missing, unknown, or given twice.
    """
    sources = sources or list_sources(corpus)[0]
    files = [(Path(source.path), source.size_bytes) for source in sources]
    unit_bytes = unit_bytes or choose_unit_bytes(sum(size for _, size in files))
    per_output = corpus.files_per_output or len(files)
    prefixes = output_prefixes(corpus, -(-len(files) // per_output))
    units: list[list[Segment]] = []
    outputs = []
    for number, first in enumerate(range(0, len(files), per_output)):
        members = files[first : first + per_output]
        made = split_into_units(members, unit_bytes)
        span = range(len(units), len(units) + len(made))
        outputs.append(Output(prefixes[number], span, range(first, first + len(members))))
        units += made
    # The paths of output and tokenizer affect no byte.
    excluded = {"inputs", "output", "tokenizer"} | ({"split_on"} if not corpus.split_on else set())
    options = corpus.model_dump(mode="json", exclude=excluded)
    identity = Identity(
        version=_version(corpus),
        options=options,
        unit_bytes=unit_bytes,
        tokenizer=tokenizer.fingerprint,
        sources=sources,
    )
    return PreparationPlan(corpus, tokenizer, identity, units, outputs)


def _version(corpus: Corpus) -> str:
    """Names what, beside the options, decides what the steps do to a text."""
    versions = [f"trainyard {__version__}"]
    if corpus.steps:
        versions.append(f"Unicode {unicodedata.unidata_version}")
    if any(step.kind == "near_deduplicate" for step in corpus.steps):
        versions.append(f"rensa {version('rensa')}")
    return ", ".join(versions)
