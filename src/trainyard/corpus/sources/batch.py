"""Readers' output: consecutive documents, with faults and drops."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """A document that cannot be read.

    `position` is its line (JSON lines), row (Parquet, Arrow) or page (Wikipedia) counted from 1 in
    its segment; 0 means the whole file. `raw` is its text, cut if it is too long.
    `n_documents` are lost.
    """

    kind: str
    position: int
    detail: str
    hint: str
    raw: bytes = b""
    n_documents: int = 1


@dataclass
class Batch:
    """Consecutive documents of a segment.

    `n_bytes` is the share of the file they took, `n_lines` of its lines, rows or pages. `fields`
    holds a column of metadata for every field that was asked for, one value for each text ("" where
    there is none). `dropped` counts the documents that the format itself leaves out, by reason;
    `dropped_sentences` counts sentences of Wikipedia, by the template that could not be rendered.
    """

    texts: list[str]
    n_lines: int
    n_bytes: int
    faults: list[Fault] = field(default_factory=list)
    fields: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_sentences: dict[str, int] = field(default_factory=dict)
