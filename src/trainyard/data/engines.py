"""Two engines that encode short texts with the rules of a vocabulary, with the same ids.

Gigatoken is about eighty times faster but young, so at load time its results for a thousand
difficult strings are compared with those of Hugging Face `tokenizers`; if one differs, or the
package is missing or rejects the vocabulary, the slow engine is used. For GPT-2's own vocabulary
the results are known, and the slow engine is not built.

Their Unicode differs: gigatoken 0.10 has 17, `tokenizers` 0.23 has 16. So a letter new in 17 is a
letter to one and a sign to the other, and a word with it may have other ids.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.data.vocabulary import END_OF_DOCUMENT, Vocabulary, byte_symbols

Ids = npt.NDArray[np.uint32]
Encoded = tuple[Ids, npt.NDArray[np.int64]]

# sha256 of GPT-2's rules and of the reference's ids of the tricky texts: spares most runs the time
# and the memory of building the reference.
_GPT2_ANSWERS = "adbf285f46dbd3d80b886d6cf9f979e2e6c18b7a59d7f3201d0092de4549146c"
_LOCK = threading.Lock()
DIGITS = {"type": "Digits", "individual_digits": True}

_log = logging.getLogger(__name__)


class Engine(Protocol):
    """Encodes texts that are normalized already, with few MiB in one call."""

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Returns the ids of all texts back to back, and the number of ids of each text."""


class HuggingFaceEngine:
    """The reference: exact for every vocabulary, a few MB/s."""

    def __init__(self, rules: str) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer.from_str(rules)

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts, each alone."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encoded]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((i for row in ids for i in row), np.uint32, lengths.sum()), lengths


class GigatokenEngine:
    """The fast one; its cache of words only grows, so it is made anew now and then."""

    # A million new words; ordinary text stays far below. The table of the cache doubles, and while
    # it does the old one and the new one need twice this.
    cache_limit_bytes = 80 * 2**20
    check_every_tokens = 2**19

    def __init__(self, rules: str) -> None:
        self._rules = rules
        self._renew()

    def _renew(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._tokenizer: Any = None  # lets the old cache go before the new one starts
        _return_free_memory()
        self._tokenizer = load_hf_json(self._rules)
        self._unchecked_tokens = 0
        # Measured each time, so that memory of others in this process does not count for long.
        self._resident_at_start_bytes = _resident_bytes()

    def _limit_cache(self) -> None:
        if self._unchecked_tokens > self.check_every_tokens:
            self._unchecked_tokens = 0
            if _resident_bytes() - self._resident_at_start_bytes > self.cache_limit_bytes:
                self._renew()

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts in one thread: the number of workers decides how many cores are used."""
        with _arrays_as_they_are():  # one thread at a time
            self._limit_cache()
            tokens, lengths = self._tokenizer.encode_batch(texts, parallel=False)
            self._unchecked_tokens += len(tokens)
        assert len(lengths) == len(texts), "every text has ids, or none, but is not lost"
        return tokens, lengths


class _Awkward(ModuleType):
    """Stands in for the package awkward, to which gigatoken hands its two arrays."""

    Array = type("Array", (), {})

    @staticmethod
    def unflatten(tokens: Ids, lengths: npt.NDArray[np.int64]) -> Encoded:
        return tokens, lengths


@contextmanager
def _arrays_as_they_are() -> Iterator[None]:
    """Spares the package awkward: its import takes 0.7 s of each process, longer than any other."""
    with _LOCK:
        theirs = sys.modules.get("awkward")
        sys.modules["awkward"] = _Awkward("awkward")
        try:
            yield
        finally:
            del sys.modules["awkward"]
            if theirs:
                sys.modules["awkward"] = theirs


class DigitsEngine:
    """The fast one for vocabularies that first split a text at every numeral.

    Gigatoken does not know this step, but it splits a text at added tokens. So each numeral becomes
    one: with its own id, or with an id above the vocabulary that stands for several.
    """

    def __init__(
        self, vocabulary: Vocabulary, reference: Engine, with_special_tokens: bool
    ) -> None:
        numerals = _find_numerals()
        ids, lengths = reference.encode_batch(numerals)
        self._first_stand_in = len(vocabulary.tokens)
        self._n_ids = lengths
        self._columns = np.arange(lengths.max())
        self._ids = np.zeros((len(numerals), len(self._columns)), np.uint32)
        self._ids[self._columns < lengths[:, None]] = ids
        stand_ins = np.arange(len(numerals)) + self._first_stand_in
        added_ids = np.where(lengths == 1, self._ids[:, 0], stand_ins).tolist()
        added = {**dict(zip(numerals, added_ids, strict=True)), **vocabulary.added_tokens}
        _, *steps = vocabulary.split["pretokenizers"]
        split = {**vocabulary.split, "pretokenizers": steps} if steps[1:] else steps[0]
        inner = replace(vocabulary, split=split, added_tokens=added)
        self._engine = GigatokenEngine(inner.render_json(with_special_tokens=with_special_tokens))

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts, each alone."""
        tokens, lengths = self._engine.encode_batch(texts)
        places = np.flatnonzero(tokens >= self._first_stand_in)
        if not len(places):
            return tokens, lengths
        numerals = tokens[places] - self._first_stand_in
        n_more = self._n_ids[numerals] - 1
        repeats = np.ones(len(tokens), np.int64)
        repeats[places] += n_more
        starts = places + np.cumsum(n_more) - n_more
        used = self._columns <= n_more[:, None]
        tokens = np.repeat(tokens, repeats)
        tokens[(starts[:, None] + self._columns)[used]] = self._ids[numerals][used]
        of_text = np.searchsorted(np.cumsum(lengths), places, side="right")
        return tokens, lengths + np.bincount(of_text, n_more, len(lengths)).astype(np.int64)


class PartialEngine:
    """The fast one for vocabularies without some bytes, which it cannot leave out.

    It gets a token for each of them. Batches that hold one are left to the reference.
    """

    def __init__(self, fast: Engine, reference: Engine, missing: bytes) -> None:
        self._fast, self._reference, self._missing = fast, reference, missing

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts, each alone."""
        lossy = any(count_bytes_of(self._missing, text) for text in texts)
        return (self._reference if lossy else self._fast).encode_batch(texts)


def count_bytes_of(some: bytes, text: str) -> int:
    """Counts the bytes of a text that are among some."""
    data = text.encode()
    return len(data) - len(data.translate(None, some))


def _find_numerals() -> list[str]:
    """Lists the characters that the Digits step splits off; none is above U+1FFFF."""
    from tokenizers import pre_tokenizers

    # An "a" between any two, so that any other piece of one character is a numeral.
    text = "a".join(map(chr, [*range(0xD800), *range(0xE000, 0x20000)]))
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(text)
    return sorted({piece for piece, _ in pieces if len(piece) == 1} - {"a"})


def _return_free_memory() -> None:
    """Returns freed memory to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def _resident_bytes() -> int:
    """The memory this process holds now (Linux), or the most it ever held (elsewhere)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _tricky_texts() -> list[str]:
    """Over a thousand short texts on which byte-level tokenizers are known to go wrong."""
    words = "word Word WORD 's 'S 'll ' '' can't 7 2026 3.14 1/2 ! ?! ... -- _ == `` <| |> a\u0301"
    scripts = "½ ² Ⅷ ٣ é ñ ß Ω Я 漢 かな 한 ไ हि \u0640 \ufe0f \ufeff \ufffd \U0001f600 \U0010ffff"
    joined = ["\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1ee", END_OF_DOCUMENT]
    parts = [*words.split(), *scripts.split(), *joined]
    spaces = [*" \t\n\r\v\f\0\x1c\x7f\x85\xa0\u200b\u2003\u2028\u3000", "  ", "\n\n", "\r\n", " \n"]
    pieces = [*parts, *spaces]
    pairs = ["".join(pair) for pair in product(pieces, pieces[::3])]
    long = [piece * 70 for piece in pieces]
    return ["", *pieces, *pairs, *long, " ".join(parts), "".join(chr(c) for c in range(0x250))]


def build_engine(vocabulary: Vocabulary, name: str, *, with_special_tokens: bool) -> Engine:
    """Chooses the fast engine where it agrees with the reference, else the reference.

    Args:
        vocabulary: its rules; normalizing is left to the caller.
        name: of the tokenizer, for warnings.
        with_special_tokens: whether special tokens in a text get their ids.
    """
    vocabulary = replace(vocabulary, normalizer="")
    rules = vocabulary.render_json(with_special_tokens=with_special_tokens)
    if missing := vocabulary.missing_bytes:
        spare = [byte_symbols()[byte] for byte in missing]
        vocabulary = replace(vocabulary, tokens=[*vocabulary.tokens, *spare])
    try:
        if vocabulary.split.get("pretokenizers", [None])[0] == DIGITS:
            reference = HuggingFaceEngine(rules)
            digits = DigitsEngine(vocabulary, reference, with_special_tokens)
            return _choose_engine(digits, reference, name, missing)
        fast = GigatokenEngine(vocabulary.render_json(with_special_tokens=with_special_tokens))
        if _digest_answers(rules, fast) == _GPT2_ANSWERS:
            return fast
        return _choose_engine(fast, HuggingFaceEngine(rules), name, missing)
    except (ImportError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        _log.warning("tokenizer %s: the fast engine cannot be used (%s)", name, error)
        return HuggingFaceEngine(rules)


def _digest_answers(rules: str, engine: Engine) -> str:
    tokens, lengths = engine.encode_batch(_tricky_texts())
    return hashlib.sha256(rules.encode() + tokens.tobytes() + lengths.tobytes()).hexdigest()


def _choose_engine(fast: Engine, reference: Engine, name: str, missing: bytes) -> Engine:
    texts = [text for text in _tricky_texts() if not count_bytes_of(missing, text)]
    tokens, lengths = fast.encode_batch(texts)
    expected_tokens, expected_lengths = reference.encode_batch(texts)
    if np.array_equal(lengths, expected_lengths) and np.array_equal(tokens, expected_tokens):
        return PartialEngine(fast, reference, missing) if missing else fast
    _log.warning("tokenizer %s: the fast engine's ids differ; using the exact one", name)
    return reference
