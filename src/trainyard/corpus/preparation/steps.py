"""The per-document steps of a corpus: keep, normalize, length, quality.

    counts = [StepCount(kind=step.kind) for step in corpus.document_steps]
    for batch in read_documents(segment, "text", corpus.metadata_fields):
        sizes = [count_bytes(text) for text in batch.texts]
        texts, fields, sizes = apply_steps(
            corpus.document_steps, batch.texts, batch.fields, sizes, counts
        )
    counts[1].dropped    # {"too few words": 12, "too few letters": 3}

A document is dropped for the first reason that applies. The reasons are few and fixed, so that the
counts of a corpus stay small. Characters are classified by a lookup in a table with one byte per
Unicode character, which in numpy is about ten times as fast as Python, and covers every script.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.config.corpus import DocumentStep, Keep, LengthLimits, Normalize, Quality
from trainyard.data.sidecar import StepCount

KEPT = ""
"""The reason of a document that is not dropped."""

LETTER = 1
"""A letter of any script, or a mark on one, such as a third of all characters of Hindi."""
WORD = 2
"""A letter, a mark or a digit; words are runs of these."""
SPACE = 4
"""Whitespace by str.isspace."""
ALONE = 8
"""A character of a script without spaces; counts as a word."""

# Nothing above is a letter but rare variation selectors.
_TABLE_SIZE = 0x32400
_WITHOUT_SPACES = (
    (0x0E00, 0x0F00),  # Thai, Lao
    (0x1000, 0x10A0),  # Burmese
    (0x1780, 0x1800),  # Khmer
    (0x3040, 0x3100),  # Hiragana, Katakana
    (0x3400, 0x4DC0),  # Chinese characters, here and below
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0x20000, _TABLE_SIZE),
)

_BULLETS = frozenset("•‣▪●◦○■□►\N{EN DASH}-*")
# Others than ASCII's are those of quotes and of Chinese, Arabic, Urdu and Hindi.
_SENTENCE_ENDS = frozenset(".!?\"'…”\u2019»\u300d\u300f\u3002\uff01\uff1f\u061f\u06d4\u0964")
_SHORT_LINE = 30
_MOST_CHARACTERS = 2**20
_FACTOR = 0x9E3779B97F4A7C15  # odd, and without a pattern
# What normalizing takes out of a text; all else that is no control character stays.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")


def apply_steps(
    steps: Sequence[DocumentStep],
    texts: list[str],
    fields: dict[str, list[str]],
    sizes: list[int],
    counts: Sequence[StepCount],
) -> tuple[list[str], dict[str, list[str]], list[int]]:
    """Applies steps to documents, in order, and returns the remaining ones.

    Args:
        steps: what to do.
        texts: the documents.
        fields: a column of metadata for each field, one value for each text.
        sizes: the bytes of each text.
        counts: what each step did is added here; one for each step.
    """
    for step, count in zip(steps, counts, strict=True):
        count.documents_in += len(texts)
        count.bytes_in += sum(sizes)
        if isinstance(step, Normalize):
            texts = [normalize(text, step) for text in texts]
            sizes = [count_bytes(text) for text in texts]
        else:
            reasons = _reasons_to_drop(step, texts, fields)
            if any(reasons):
                kept, before = [reason == KEPT for reason in reasons], texts
                texts, sizes = list(compress(texts, kept)), list(compress(sizes, kept))
                fields = {name: list(compress(column, kept)) for name, column in fields.items()}
                for reason, text in zip(reasons, before, strict=True):
                    if reason:
                        count.drop(reason, text)
        count.documents_out += len(texts)
        count.bytes_out += sum(sizes)
    return texts, fields, sizes


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
    """Names the first rule of quality a text breaks; KEPT if it breaks none."""
    codes = code_points(text)
    kinds = kinds_of(codes)
    is_space = np.concatenate(([True], kinds & SPACE != 0))
    starts = np.flatnonzero(is_space[:-1] & ~is_space[1:])
    rules = chain(
        _word_rules(text, step, kinds, starts),
        _line_rules(text, step),
        _repetition_rules(step, codes * ~is_space[1:], starts),
    )
    return next((reason for is_broken, reason in rules if is_broken), KEPT)


def _word_rules(
    text: str, step: Quality, kinds: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp]
) -> Iterator[tuple[bool, str]]:
    n_characters = int(np.count_nonzero(kinds & SPACE == 0))
    n_words = len(starts)
    yield n_words < step.min_words, "too few words"
    mean_length = n_characters / max(n_words, 1)
    yield mean_length < step.min_mean_word_length, "words too short"
    yield mean_length > step.max_mean_word_length, "words too long"
    n_letters = int(np.count_nonzero(kinds & LETTER))
    yield n_letters < step.min_letter_share * n_characters, "too few letters"
    kinds_of_words = np.bitwise_or.reduceat(kinds, starts) if n_words else kinds
    n_with_letters, n_not_signs = (
        int(np.count_nonzero(kinds_of_words & kind)) for kind in (LETTER, WORD)
    )
    yield n_with_letters < step.min_letter_word_share * n_not_signs, "too few words with letters"
    # Number signs and ellipses are each held against the limit.
    n_symbols = max(text.count("#"), text.count("...") + text.count("…"))
    yield n_symbols > step.max_symbol_to_word_ratio * n_words, "too many symbols"
    yield _lacks_stop_words(text, step.stop_words), "too few stop words"
    yield not step.curly_brackets and "{" in text, "curly brackets"
    n_lines = text.count("\n")
    yield n_lines > step.max_lines_per_word * max(n_words, 1), "too many lines for its words"


def _lacks_stop_words(text: str, stop_words: tuple[str, ...]) -> bool:
    """Returns whether a text has not two different ones."""
    if not stop_words:
        return False
    words = (match[0] for match in _stop_word_pattern(stop_words).finditer(text))
    first = next(words, None)
    return all(word == first for word in words)


@functools.cache
def _stop_word_pattern(stop_words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, stop_words))})(?!\S)")


def _line_rules(text: str, step: Quality) -> Iterator[tuple[bool, str]]:
    """Judges lines, and paragraphs, but for those with nothing but white space."""
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    n_lines = len(lines)
    n_bullets = sum([line[0] in _BULLETS for line in lines])
    yield n_bullets > step.max_bullet_line_share * n_lines, "too many bullets"
    n_ellipses = sum([line.endswith(("...", "…")) for line in lines])
    yield n_ellipses > step.max_ellipsis_line_share * n_lines, "too many ellipses"
    paragraphs = list(filter(None, map(str.strip, text.split("\n\n"))))
    # Of paragraphs too: a text of lines of equal length ends few of its sentences at their ends.
    shares = [_share_of_sentence_ends(parts) for parts in (lines, paragraphs)]
    yield max(shares) < step.min_punctuated_line_share, "too few lines end a sentence"
    n_short = sum([len(line) <= _SHORT_LINE for line in lines])
    yield n_short > step.max_short_line_share * n_lines, "too many short lines"
    n_repeats, share = _count_repeats(lines)
    yield n_repeats > step.max_repeated_line_share * n_lines, "too many repeated lines"
    yield share > step.max_repeated_line_character_share, "too much in repeated lines"
    n_repeats, share = _count_repeats(paragraphs)
    n_most = step.max_repeated_paragraph_share * len(paragraphs)
    yield n_repeats > n_most, "too many repeated paragraphs"
    yield share > step.max_repeated_paragraph_character_share, "too much in repeated paragraphs"


def _share_of_sentence_ends(parts: list[str]) -> float:
    return sum([part[-1] in _SENTENCE_ENDS for part in parts]) / max(len(parts), 1)


def _count_repeats(parts: list[str]) -> tuple[int, float]:
    """Counts the parts that repeat an earlier one, and their share of the characters."""
    once = set(parts)
    if len(once) == len(parts):
        return 0, 0.0
    n_characters = sum(map(len, parts))
    return len(parts) - len(once), 1 - sum(map(len, once)) / n_characters


def _repetition_rules(
    step: Quality, codes: npt.NDArray[np.int32], starts: npt.NDArray[np.intp]
) -> Iterator[tuple[bool, str]]:
    """Judges words in a row, each with the white space behind it; of a long text its start.

    Codes of white space are 0.
    """
    codes = codes[:_MOST_CHARACTERS]
    starts = starts[: np.searchsorted(starts, len(codes))]
    if not len(starts):
        return
    # A word is known by a polynomial of its characters, modulo 2^64.
    powers, inverses = _powers()
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes.astype(np.uint64) * powers[: len(codes)], out=sums[1:])
    borders = np.append(starts, len(codes))
    words = _differences(sums[borders]) * inverses[starts]
    lengths = _differences(borders)
    longest_share = float(lengths.max() / lengths.sum())
    least = min(step.max_top_n_gram_shares, default=0.0)
    for n, most in enumerate(step.max_top_n_gram_shares, 2):
        count, share = _top_n_gram(words, lengths, n)
        yield share > most, f"one group of {n} words too often"
        if count * (len(step.max_top_n_gram_shares) + 1) * longest_share <= least:
            break  # longer groups are no more frequent
    least = min(step.max_repeated_n_gram_shares, default=0.0)
    for n, most in enumerate(step.max_repeated_n_gram_shares, 5):
        share = _repeated_share(words, lengths, n, least / longest_share)
        yield share > most, f"too much in repeated groups of {n} words"
        if share <= least:
            break  # longer groups repeat no more


@functools.cache
def _powers() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    factors = (_FACTOR, pow(_FACTOR, -1, 2**64))
    first, second = (np.full(_MOST_CHARACTERS, factor, np.uint64) for factor in factors)
    return np.cumprod(first), np.cumprod(second)


def _differences(borders: npt.NDArray[Any]) -> npt.NDArray[Any]:
    differences: npt.NDArray[Any] = borders[1:] - borders[:-1]  # np.diff takes four times as long
    return differences


def _n_grams(words: npt.NDArray[np.uint64], n: int) -> npt.NDArray[np.uint64]:
    """Returns a number for each n words in a row, equal where the words are."""
    keys = words
    for number in range(1, n):
        keys = keys[:-1] * np.uint64(_FACTOR) + words[number:]
    return keys


def _top_n_gram(
    words: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], n: int
) -> tuple[int, float]:
    """Counts the most frequent n words in a row, and returns their share of the characters."""
    keys = _n_grams(words, n)
    ordered = np.sort(keys)
    borders = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    counts = _differences(borders)
    top = int(counts.argmax())
    count = int(counts[top])
    if count <= 1:
        return count, 0.0
    start = int(np.flatnonzero(keys == ordered[borders[top]])[0])
    return count, min(1.0, float(lengths[start : start + n].sum() * count / lengths.sum()))


def _repeated_share(
    words: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], n: int, few_words: float
) -> float:
    """Returns the share of characters in n words in a row that occurred before; 0 for few words."""
    keys = _n_grams(words, n)
    ordered = np.sort(keys)
    if n * np.count_nonzero(ordered[1:] == ordered[:-1]) <= few_words:
        return 0.0
    is_repeat = np.ones(len(keys), np.bool_)
    is_repeat[np.unique(keys, return_index=True)[1]] = False
    is_inside = np.convolve(is_repeat, np.ones(n, np.bool_))
    return float(lengths[is_inside].sum() / lengths.sum())


def _reasons_to_drop(
    step: Keep | LengthLimits | Quality, texts: list[str], fields: dict[str, list[str]]
) -> list[str]:
    """Returns the reason to drop each document, or KEPT."""
    if isinstance(step, Keep):
        reasons_by_value = dict.fromkeys(step.values, KEPT)
        reason = f"not kept: {step.field}"
        return [reasons_by_value.get(value, reason) for value in fields[step.field]]
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


def code_points(text: str) -> npt.NDArray[np.int32]:
    """Returns the number Unicode has for each character."""
    return np.frombuffer(text.encode("utf-32-le"), "<i4").astype(np.int32, copy=False)


def kinds_of(codes: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """Returns LETTER, WORD, SPACE and ALONE, or'ed, for each character."""
    kinds: npt.NDArray[np.uint8] = _table().take(codes, mode="clip")
    return kinds


@functools.cache  # it takes 40 ms, so not when the module is imported
def _table() -> npt.NDArray[np.uint8]:
    kinds = {"L": LETTER | WORD, "M": LETTER | WORD, "N": WORD}
    table = np.fromiter(
        (
            kinds.get(unicodedata.category(chr(code))[0], 0) | SPACE * chr(code).isspace()
            for code in range(_TABLE_SIZE)
        ),
        np.uint8,
        _TABLE_SIZE,
    )
    for first, end in _WITHOUT_SPACES:
        table[first:end] |= ALONE * (table[first:end] & WORD != 0).astype(np.uint8)
    return table
