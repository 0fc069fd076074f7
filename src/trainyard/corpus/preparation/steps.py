"""The per-document steps of a corpus: keep, normalize, length, quality.

    counts = [StepCount(kind=step.kind) for step in corpus.document_steps]
    for batch in read_documents(segment, "text", corpus.metadata_fields):
        texts, fields = apply_steps(corpus.document_steps, batch.texts, batch.fields, counts)
    counts[1].dropped    # {"too few words": 12, "too few letters": 3}

A document is dropped for the first reason that applies. The reasons are few and fixed, so that the
counts of a corpus stay small.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import compress

import numpy as np

from trainyard.config.corpus import DocumentStep, Keep, LengthLimits, Normalize, Quality
from trainyard.corpus.preparation.characters import LETTER, SPACE, code_points, kinds_of
from trainyard.data.sidecar import StepCount

KEPT = ""
"""The reason of a document that is not dropped."""

_BULLETS = ("•", "‣", "▪", "●", "◦", "○", "■", "□", "►", "\N{EN DASH}", "-", "*")
# What normalizing takes out of a text; all else that is no control character stays.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")


def apply_steps(
    steps: Sequence[DocumentStep],
    texts: list[str],
    fields: dict[str, list[str]],
    counts: Sequence[StepCount],
) -> tuple[list[str], dict[str, list[str]]]:
    """Applies steps to documents, in order, and returns the remaining ones.

    Args:
        steps: what to do.
        texts: the documents.
        fields: a column of metadata for each field, one value for each text.
        counts: what each step did is added here; one for each step.
    """
    sizes = [count_bytes(text) for text in texts]
    for step, count in zip(steps, counts, strict=True):
        count.documents_in += len(texts)
        count.bytes_in += sum(sizes)
        if isinstance(step, Normalize):
            texts = [normalize(text, step) for text in texts]
            sizes = [count_bytes(text) for text in texts]
        else:
            reasons = _judge(step, texts, fields)
            if any(reasons):
                kept, before = [reason == KEPT for reason in reasons], texts
                texts, sizes = list(compress(texts, kept)), list(compress(sizes, kept))
                fields = {name: list(compress(column, kept)) for name, column in fields.items()}
                for reason, text in zip(reasons, before, strict=True):
                    if reason:
                        count.drop(reason, text)
        count.documents_out += len(texts)
        count.bytes_out += sum(sizes)
    return texts, fields


def count_bytes(text: str) -> int:
    """Counts the bytes of UTF-8 of a text."""
    return len(text) if text.isascii() else len(text.encode())


def normalize(text: str, step: Normalize) -> str:
    """Brings a text into one form.

    Everything Unicode calls a line end (CR LF, CR, VT, FF, NEL, U+2028, U+2029) becomes a line
    feed. The other control characters, except the tab, and the byte order mark U+FEFF go. Other
    characters without width stay: they divide words in Khmer, shape letters in Persian and Hindi,
    and join emoji.
    """
    if _ODD.search(text):
        text = _ODD.sub("", _LINE_ENDS.sub("\n", text))
    return unicodedata.normalize(step.form, text)


def quality_fault(text: str, step: Quality) -> str:
    """Names the first rule of quality a text breaks; KEPT if it breaks none.

    Words are divided by white space; lines with nothing but white space are no lines. Number signs
    and ellipses are each held against the limit.
    """
    # Source: Rae et al., arXiv:2112.11446, appendix A1.1. Their rule that four words in five have a
    # letter is here a share of characters, because it needs no words.
    kinds = kinds_of(code_points(text))
    space = (kinds & SPACE) != 0
    n_characters = len(text) - int(np.count_nonzero(space))
    n_words = int(np.count_nonzero(space[:-1] & ~space[1:])) + int(len(text) > 0 and not space[0])
    if n_words < step.min_words:
        return "too few words"
    mean_length = n_characters / max(n_words, 1)
    if mean_length < step.min_mean_word_length:
        return "words too short"
    if mean_length > step.max_mean_word_length:
        return "words too long"
    n_letters = int(np.count_nonzero(kinds & LETTER))
    if n_letters < step.min_letter_share * n_characters:
        return "too few letters"
    n_symbols = max(text.count("#"), text.count("...") + text.count("…"))
    if n_symbols > step.max_symbol_to_word_ratio * n_words:
        return "too many symbols"
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    if sum(line.startswith(_BULLETS) for line in lines) > step.max_bullet_line_share * len(lines):
        return "too many bullets"
    if len(lines) - len(set(lines)) > step.max_repeated_line_share * len(lines):
        return "too many repeated lines"
    return KEPT


def _judge(
    step: Keep | LengthLimits | Quality, texts: list[str], fields: dict[str, list[str]]
) -> list[str]:
    """Returns the reason to drop each document, or KEPT."""
    if isinstance(step, Keep):
        verdicts = dict.fromkeys(step.values, KEPT)
        reason = f"not kept: {step.field}"
        return [verdicts.get(value, reason) for value in fields[step.field]]
    if isinstance(step, LengthLimits):
        return [_length_fault(text, step) for text in texts]
    return [quality_fault(text, step) for text in texts]


def _length_fault(text: str, step: LengthLimits) -> str:
    n_characters = len(text.strip())
    if n_characters < step.min_characters:
        return "too short"
    if step.max_characters and n_characters > step.max_characters:
        return "too long"
    return KEPT
