"""Text to token ids and back: an exact byte-level BPE with the fastest available engine.

    tokenizer = load_tokenizer("gpt2")
    tokenizer.encode(" hello world")                    # [23748, 995]
    tokens, lengths = tokenizer.encode_batch(["a", "", "b c"])
    tokens                                              # uint32, all documents back to back
    lengths                                             # int64: [1, 0, 2]
    tokenizer.decode([23748, 995])                      # " hello world"

`<|endoftext|>` inside a document is ordinary text with ordinary ids, so no text can end a document;
`special_tokens="parse"` gives it its own id, like Megatron-LM.

Two engines produce the same ids. Gigatoken is about eighty times faster but young, so at load time
its results for a thousand difficult strings are compared with those of Hugging Face `tokenizers`;
if one differs, or the package is missing or rejects the vocabulary, the slow engine is used. For
GPT-2's own vocabulary the results are known, and the slow engine is not built.

Memory is bounded: an engine gets a few MiB of text at a time, and a long document in windows.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.data.vocabulary import (
    END_OF_DOCUMENT,
    GPT2_SPLIT,
    Vocabulary,
    load_vocabulary,
)
from trainyard.errors import DataError

SpecialTokens = Literal["text", "parse"]
Ids = npt.NDArray[np.uint32]
Encoded = tuple[Ids, npt.NDArray[np.int64]]

# A block of 4 MiB and the document that hangs over its end: what is read at once, in one call.
_CALL_CHARACTERS = 5 * 2**20
_LONG_CHARACTERS = 2**20
_WINDOW_CHARACTERS = 2**18
_OVERLAP_CHARACTERS = 2**12
_CONTRACTION = re.compile(rb"'[sdmtlvr]")
# Four characters: the longest text that the end of a window can make the splitting rule misread.
_UNCERTAIN_BYTES = 16
# sha256 of GPT-2's rules and of the reference's ids of the tricky texts: spares most runs the time
# and the memory of building the reference.
_GPT2_ANSWERS = "adbf285f46dbd3d80b886d6cf9f979e2e6c18b7a59d7f3201d0092de4549146c"

_log = logging.getLogger(__name__)


class _Engine(Protocol):
    def encode_batch(self, texts: list[str]) -> Encoded: ...


class _HuggingFaceEngine:
    """The reference: exact for every vocabulary, a few MB/s."""

    def __init__(self, rules: str) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer.from_str(rules)

    def encode_batch(self, texts: list[str]) -> Encoded:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encoded]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((i for row in ids for i in row), np.uint32, lengths.sum()), lengths


class _GigatokenEngine:
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
        self._limit_cache()
        # One thread: the number of workers alone decides how many cores are used.
        layout = self._tokenizer.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data, np.int64)
        tokens = np.asarray(layout.content.data, np.uint32)
        self._unchecked_tokens += len(tokens)
        assert len(offsets) == len(texts) + 1, "every text has ids, or none, but is not lost"
        return tokens[offsets[0] : offsets[-1]], np.diff(offsets)


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
    """About a thousand short texts on which byte-level tokenizers are known to go wrong."""
    words = "word Word WORD 's 'S 'll ' '' can't 7 2026 3.14 1/2 ! ?! ... -- _ == `` <| |> a\u0301"
    scripts = "½ ² Ⅷ ٣ é ñ ß Ω Я 漢 かな 한 ไ हि \u0640 \ufe0f \ufeff \ufffd \U0001f600 \U0010ffff"
    joined = ["\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1ee", END_OF_DOCUMENT]
    parts = [*words.split(), *scripts.split(), *joined]
    spaces = [*" \t\n\r\v\f\0\x1c\x7f\x85\xa0\u200b\u2003\u2028\u3000", "  ", "\n\n", "\r\n", " \n"]
    pieces = [*parts, *spaces]
    pairs = ["".join(pair) for pair in product(pieces, pieces[::3])]
    long = [piece * 70 for piece in pieces]
    return ["", *pieces, *pairs, *long, " ".join(parts), "".join(chr(c) for c in range(0x250))]


def _build_engine(rules: str, name: str) -> _Engine:
    """Chooses the fast engine where it agrees with the reference, else the reference."""
    try:
        fast = _GigatokenEngine(rules)
        if _digest_answers(rules, fast) == _GPT2_ANSWERS:
            return fast
        return _choose_engine(fast, _HuggingFaceEngine(rules), name)
    except (ImportError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        _log.warning("tokenizer %s: the fast engine cannot be used (%s)", name, error)
        return _HuggingFaceEngine(rules)


def _digest_answers(rules: str, engine: _Engine) -> str:
    tokens, lengths = engine.encode_batch(_tricky_texts())
    return hashlib.sha256(rules.encode() + tokens.tobytes() + lengths.tobytes()).hexdigest()


def _choose_engine(fast: _Engine, reference: _Engine, name: str) -> _Engine:
    tokens, lengths = fast.encode_batch(_tricky_texts())
    expected_tokens, expected_lengths = reference.encode_batch(_tricky_texts())
    if np.array_equal(lengths, expected_lengths) and np.array_equal(tokens, expected_tokens):
        return fast
    _log.warning("tokenizer %s: the fast engine's ids differ; using the exact one", name)
    return reference


@dataclass(frozen=True)
class Windows:
    """Encodes long texts a window at a time, with constant memory.

    An engine takes about 25 bytes of memory per byte of a word, and words are unbounded: base64,
    DNA, a page of line feeds. So windows overlap and are joined at a common token:

        window 1   |The| cat| sat| on| the| m|
        window 2                     | the| mat| and| pur|
        joined     |The| cat| sat| on| the| mat| and| pur|

    The ids are those of the whole text, for any vocabulary with GPT-2's splitting rule:

    1. The splitting rule looks forward only. A window that begins where a word begins, or inside
       one, has the words of the whole text from there on, the first one cut at its front.
       `_find_joint` avoids the exception, a contraction: in `I'll` the rest of `'ll` is `ll`,
       another kind of word. Where a window ends, only words that touch its last characters can
       differ.
    2. Byte-pair encoding repeats the merge of least rank, leftmost first. Where no merge crosses a
       place in a word, either side is merged as if it were alone. So in the encoding of a word, any
       two neighbours are the encoding of their own bytes.
    3. Conversely, if any two neighbours in a row of tokens are that, the row is the encoding of its
       word: the first merge to cross a boundary would have done so with these two neighbours alone.

    The tokens before the shared one are neighbours in window 1, those after it in window 2, and by
    1 none crosses the border of a word of the whole text. So by 3 the joined row is right.

    Attributes:
        encode: returns the ids of a short text.
        token_bytes: the number of bytes of each id.
        added_bytes: the longest added token, which is found in the text before it is split.
    """

    encode: Callable[[str], Ids]
    token_bytes: npt.NDArray[np.int64]
    added_bytes: int
    window_characters: int
    overlap_characters: int

    def encode_long(self, text: str) -> Iterator[Ids]:
        """Yields the ids of a text piece by piece."""
        start, end = 0, self.window_characters
        ids = self.encode(text[:end])
        while end < len(text):
            tail_start = end - self.overlap_characters
            joint = self._find_joint(ids, text[tail_start:end])
            if joint:
                n_ids, n_characters = joint
                next_start = tail_start + n_characters
                next_end = next_start + self.window_characters
                next_ids = self.encode(text[next_start:next_end])
                if next_ids[0] == ids[n_ids]:
                    yield ids[:n_ids]
                    start, end, ids = next_start, next_end, next_ids
                    continue
            # No joint, as in a text of nothing but contractions: this window becomes longer.
            end += end - start
            ids = self.encode(text[start:end])
        yield ids

    def _find_joint(self, ids: Ids, tail: str) -> tuple[int, int] | None:
        """Finds the first token of the tail at which a window may begin.

        Returns the number of ids before it, and of the characters of the tail before it.
        """
        data = tail.encode()
        last = ids[-len(data) :]
        ends = len(data) - self.token_bytes[last].sum() + np.cumsum(self.token_bytes[last])
        starts = ends - self.token_bytes[last]
        certain = len(data) - max(_UNCERTAIN_BYTES, self.added_bytes)
        for index in np.flatnonzero((starts >= 2) & (ends <= certain)).tolist():
            place = int(starts[index])
            is_character = data[place] & 0xC0 != 0x80
            if is_character and not _CONTRACTION.search(data, place - 2, place + 2):
                return len(ids) - len(last) + index, len(data[:place].decode())
        return None


class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        name: the name of its folder, for people; the fingerprint is its identity.
        vocabulary_size: how many ids it has, special tokens included.
        eod_id: the id of `<|endoftext|>`, put between documents.
        fingerprint: sha256 of vocabulary, merges, special tokens and splitting rule.
        special_tokens: whether special tokens written in a text are "text" or are parsed.
        vocabulary: its rules.
    """

    def __init__(
        self, vocabulary: Vocabulary, name: str, special_tokens: SpecialTokens = "text"
    ) -> None:
        self.name = name
        self.vocabulary_size = len(vocabulary.tokens)
        self.eod_id = vocabulary.special_tokens[END_OF_DOCUMENT]
        self.fingerprint = vocabulary.fingerprint
        self.special_tokens = special_tokens
        self.vocabulary = vocabulary
        rules = vocabulary.render_json(with_special_tokens=special_tokens == "parse")
        self._engine = _build_engine(rules, name)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without an end of document."""
        return [int(token_id) for token_id in self.encode_batch([text])[0]]

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Returns the ids of all texts back to back, and the number of ids of each text.

        Raises:
            DataError: a text holds half a character (a lone surrogate), which has no bytes.
        """
        try:
            sizes = list(map(len, texts))
            if sum(sizes) <= _CALL_CHARACTERS and max(sizes, default=0) <= _LONG_CHARACTERS:
                return self._engine.encode_batch(texts)
            # A token is a byte or more. The pages of an array that are never written take no
            # memory; joining the pieces at the end would take it twice.
            n_bytes = sum(len(text) if text.isascii() else len(text) * 4 for text in texts)
            tokens, lengths, n_tokens = np.empty(n_bytes, np.uint32), [], 0
            for piece, lengths_of_texts in self._encode_in_pieces(texts):
                tokens[n_tokens : n_tokens + len(piece)] = piece
                n_tokens += len(piece)
                lengths.append(lengths_of_texts)
            return tokens[:n_tokens], np.concatenate(lengths)
        except TypeError:
            _refuse_lone_surrogates(texts)
            raise

    def _encode_in_pieces(self, texts: list[str]) -> Iterator[Encoded]:
        """Encodes a few MiB at a time; the length of a long text comes after its last ids."""
        call: list[str] = []
        n_characters = 0
        for text in texts:
            is_long = len(text) > _LONG_CHARACTERS and self._windows is not None
            if call and (is_long or n_characters + len(text) > _CALL_CHARACTERS):
                yield self._engine.encode_batch(call)
                call, n_characters = [], 0
            if is_long and self._windows:
                n_ids = 0
                for ids in self._windows.encode_long(text):
                    n_ids += len(ids)
                    yield ids, np.empty(0, np.int64)
                yield np.empty(0, np.uint32), np.array([n_ids])
            else:
                call.append(text)
                n_characters += len(text)
        yield self._engine.encode_batch(call)

    @cached_property
    def _windows(self) -> Windows | None:
        """Reads long texts; None where another splitting rule than GPT-2's forbids it."""
        if self.vocabulary.split != GPT2_SPLIT:
            return None
        token_bytes = list(map(len, self.vocabulary.token_bytes))
        added = {**self.vocabulary.added_tokens, **self.vocabulary.special_tokens}
        return Windows(
            lambda text: self._engine.encode_batch([text])[0],
            np.array(token_bytes),
            max(token_bytes[i] for i in added.values()),
            _WINDOW_CHARACTERS,
            _OVERLAP_CHARACTERS,
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Returns the text of ids; bytes that are no UTF-8 (half a character) become U+FFFD."""
        outside = [i for i in ids if not 0 <= i < self.vocabulary_size]
        if outside:
            raise DataError(
                f"id {outside[0]} is outside the vocabulary of {self.name} "
                f"(0 to {self.vocabulary_size - 1})",
                "decode with the tokenizer that made the ids",
            )
        token_bytes = self.vocabulary.token_bytes
        return b"".join(token_bytes[i] for i in ids).decode(errors="replace")


def _refuse_lone_surrogates(texts: list[str]) -> None:
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(text[error.start]):04x}"
            raise DataError(
                f"text {number} holds the lone surrogate {code} at character {error.start}",
                "it is half a character and has no UTF-8 bytes; write the character whole",
            ) from error


def load_tokenizer(source: str | Path, special_tokens: SpecialTokens = "text") -> Tokenizer:
    """Loads "gpt2", a folder or a tokenizer.json, as `load_vocabulary` reads them.

    Raises:
        DataError: as `load_vocabulary`.
    """
    return Tokenizer(load_vocabulary(source), tokenizer_name(source), special_tokens)


def tokenizer_name(source: str | Path) -> str:
    """Returns the name to display: that of the folder, which may be gone."""
    path = Path(source)
    return (path.parent if path.suffix == ".json" else path).resolve().name
