"""Text to token ids and back: an exact byte-level BPE with the fastest available engine.

    tokenizer = load_tokenizer("gpt2")
    tokenizer.encode(" hello world")                    # [23748, 995]
    tokens, lengths = tokenizer.encode_batch(["a", "", "b c"])
    tokens                                              # uint32, all documents back to back
    lengths                                             # int64: [1, 0, 2]
    tokenizer.decode([23748, 995])                      # " hello world"

`<|endoftext|>` inside a document is ordinary text with ordinary ids, so no text can end a document;
`special_tokens="parse"` gives it its own id, like Megatron-LM.

No token is added to a text: neither a beginning of text, as Llama 3's own code adds, nor an end.

There are two engines. Gigatoken is about eighty times faster but young, so at load time its results
for a thousand difficult strings are compared with those of Hugging Face `tokenizers`; if one
differs, or the package is missing or rejects the vocabulary, the slow engine is used. For GPT-2's
own vocabulary the results are known, and the slow engine is not built. Their Unicode differs:
gigatoken 0.10 has 17, `tokenizers` 0.23 has 16. So a letter new in 17 is a letter to one and a sign
to the other, and a word with it may have other ids.

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
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.data.vocabulary import (
    END_OF_DOCUMENT,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    Vocabulary,
    byte_symbols,
    load_vocabulary,
)
from trainyard.errors import DataError

SpecialTokens = Literal["text", "parse"]
Ids = npt.NDArray[np.uint32]
Encoded = tuple[Ids, npt.NDArray[np.int64]]
"""The ids of texts back to back, and the number of ids of each text."""

# A block of 4 MiB and the document that hangs over its end: what is read at once, in one call.
_CALL_CHARACTERS = 5 * 2**20
_LONG_CHARACTERS = 2**20
_WINDOW_CHARACTERS = 2**18
_OVERLAP_CHARACTERS = 2**12
_CONTRACTION = re.compile(rb"'[sdmtlvr]", re.IGNORECASE)
# Four characters: the longest text that the end of a window can make the splitting rule misread.
_UNCERTAIN_BYTES = 16
# sha256 of GPT-2's rules and of the reference's ids of the tricky texts: spares most runs the time
# and the memory of building the reference.
_GPT2_ANSWERS = "adbf285f46dbd3d80b886d6cf9f979e2e6c18b7a59d7f3201d0092de4549146c"
_DIGITS = {"type": "Digits", "individual_digits": True}
_LOCK = threading.Lock()
_log = logging.getLogger(__name__)


class Engine(Protocol):
    """Encodes texts that are normalized already, with few MiB in one call."""

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts, each alone."""


class HuggingFaceEngine:
    """The reference: exact for every vocabulary, a few MB/s; built when it is first used."""

    def __init__(self, rules: str) -> None:
        self._rules = rules

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        return HuggingFaceTokenizer.from_str(self._rules)

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts, each alone."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encoded]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((i for row in ids for i in row), np.uint32, lengths.sum()), lengths


class GigatokenEngine:
    """The fast engine, in one thread; its cache of words only grows, so it is renewed now and then.

    Two kinds of vocabulary need help:

    - One that first splits a text at every numeral, a step that gigatoken does not know. But it
      splits a text at added tokens, so each numeral becomes one: with its own id, or with an id
      above the vocabulary, a placeholder for the several ids that the reference gives it.
    - One without a token for some bytes, which gigatoken cannot leave out. It gets a token for
      each, and batches that hold such a byte go to the reference.
    """

    # A million new words; ordinary text stays far below. The table of the cache doubles, and while
    # it does the old one and the new one need twice this.
    cache_limit_bytes = 80 * 2**20
    check_every_tokens = 2**19

    def __init__(
        self, vocabulary: Vocabulary, reference: Engine, *, with_special_tokens: bool
    ) -> None:
        self._missing = vocabulary.missing_bytes
        self._reference = reference if self._missing else None
        spare = [byte_symbols()[byte] for byte in self._missing]
        vocabulary = replace(vocabulary, tokens=[*vocabulary.tokens, *spare])
        self._first_placeholder = len(vocabulary.tokens)
        self._has_placeholders = vocabulary.split.get("pretokenizers", [None])[0] == _DIGITS
        if self._has_placeholders:
            numerals = _find_numerals()
            ids, self._n_ids = reference.encode_batch(numerals)
            self._ids = np.zeros((len(numerals), self._n_ids.max()), np.uint32)
            self._ids[np.arange(self._n_ids.max()) < self._n_ids[:, None]] = ids
            placeholders = np.arange(len(numerals)) + self._first_placeholder
            added_ids = np.where(self._n_ids == 1, self._ids[:, 0], placeholders).tolist()
            added = dict(zip(numerals, added_ids, strict=True)) | vocabulary.added_tokens
            _, *steps = vocabulary.split["pretokenizers"]
            split = {**vocabulary.split, "pretokenizers": steps} if steps[1:] else steps[0]
            vocabulary = replace(vocabulary, split=split, added_tokens=added)
        self._rules = vocabulary.render_json(with_special_tokens=with_special_tokens)
        self._renew()

    def _renew(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._tokenizer: Any = None  # lets the old cache go before the new one starts
        _return_free_memory()
        self._tokenizer = load_hf_json(self._rules)
        self._unchecked_tokens = 0
        # Measured each time, so that memory of others in this process does not count for long.
        self._resident_at_start_bytes = _resident_bytes()

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Encodes texts, each alone."""
        if self._reference and any(count_bytes_of(self._missing, text) for text in texts):
            return self._reference.encode_batch(texts)
        with _arrays_as_they_are():  # one thread at a time
            if self._unchecked_tokens > self.check_every_tokens:
                self._unchecked_tokens = 0
                if _resident_bytes() - self._resident_at_start_bytes > self.cache_limit_bytes:
                    self._renew()
            # The number of workers decides how many cores are used.
            tokens, lengths = self._tokenizer.encode_batch(texts, parallel=False)
            self._unchecked_tokens += len(tokens)
        assert len(lengths) == len(texts), "every text has ids, or none, but is not lost"
        if self._has_placeholders:
            return self._replace_placeholders(tokens, lengths)
        return tokens, lengths

    def _replace_placeholders(self, tokens: Ids, lengths: npt.NDArray[np.int64]) -> Encoded:
        positions = np.flatnonzero(tokens >= self._first_placeholder)
        if not len(positions):
            return tokens, lengths
        numerals = tokens[positions] - self._first_placeholder
        n_more = self._n_ids[numerals] - 1
        repeats = np.ones(len(tokens), np.int64)
        repeats[positions] += n_more
        starts = positions + np.cumsum(n_more) - n_more
        columns = np.arange(self._ids.shape[1])
        used = columns <= n_more[:, None]
        tokens = np.repeat(tokens, repeats)
        tokens[(starts[:, None] + columns)[used]] = self._ids[numerals][used]
        of_text = np.searchsorted(np.cumsum(lengths), positions, side="right")
        return tokens, lengths + np.bincount(of_text, n_more, len(lengths)).astype(np.int64)


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
    reference = HuggingFaceEngine(rules)
    missing = vocabulary.missing_bytes
    texts = [text for text in _tricky_texts() if not count_bytes_of(missing, text)]
    try:
        fast = GigatokenEngine(vocabulary, reference, with_special_tokens=with_special_tokens)
        digest = _digest_answers(rules, fast.encode_batch(texts))
        if digest == _GPT2_ANSWERS:
            return fast
        if digest == _digest_answers(rules, reference.encode_batch(texts)):
            return fast
        _log.warning("tokenizer %s: the fast engine's ids differ; using the exact one", name)
    except (ImportError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        _log.warning("tokenizer %s: the fast engine cannot be used (%s)", name, error)
    reference.encode_batch([""])  # builds it now, so that it fails here if it cannot be built
    return reference


def _digest_answers(rules: str, answers: Encoded) -> str:
    tokens, lengths = answers
    return hashlib.sha256(rules.encode() + tokens.tobytes() + lengths.tobytes()).hexdigest()


@dataclass(frozen=True)
class Windows:
    """Encodes long texts a window at a time, with constant memory.

    An engine takes about 25 bytes of memory per byte of a word, and words are unbounded: base64,
    DNA, a page of line feeds. So windows overlap and are joined at a common token:

        window 1   |The| cat| sat| on| the| m|
        window 2                     | the| mat| and| pur|
        joined     |The| cat| sat| on| the| mat| and| pur|

    The ids are those of the whole text, for any vocabulary with one of these splitting rules:

    1. GPT-2's rule looks forward only. A window that begins where a word begins, or inside one, has
       the words of the whole text from there on, the first one cut at its front. `_find_joint`
       avoids the exception, a contraction: in `I'll` the rest of `'ll` is `ll`, another kind of
       word. Where a window ends, only words that touch its last characters can differ. All this
       holds too where the text was first split at every numeral.
       Llama 3's and Qwen 2's rules join a sign to the letters after it and to the line feeds after
       it, and numerals by threes: the rest of such a word is another kind of word. So a window
       begins after a letter only (`after_letters`), which nothing but a letter can follow in a
       word; nor does what is before it depend on what is after it.
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
        after_letters: whether a window may begin after a letter only.
    """

    encode: Callable[[str], Ids]
    token_bytes: npt.NDArray[np.int64]
    added_bytes: int
    window_characters: int
    overlap_characters: int
    after_letters: bool = False

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
            start = int(starts[index])
            if data[start] & 0xC0 == 0x80:  # within a character
                continue
            before = data[:start].decode()
            if not _CONTRACTION.search(data, start - 2, start + 2) and (
                not self.after_letters or _is_letter(before[-1])
            ):
                return len(ids) - len(last) + index, len(before)
        return None


def _is_letter(character: str) -> bool:
    """Returns whether an old Unicode and a new one say so, and so any engine's."""
    return character.isalpha() and unicodedata.ucd_3_2_0.category(character)[0] == "L"


class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        name: the name of its folder, for people; the fingerprint is its identity.
        vocabulary_size: how many ids it has, special tokens included.
        eod_id: the id of the token between documents, such as `<|endoftext|>`.
        fingerprint: sha256 of vocabulary, merges, special tokens, splitting rule and normalizer.
        special_tokens: whether special tokens written in a text are "text" or are parsed.
        vocabulary: its rules.
    """

    def __init__(
        self, vocabulary: Vocabulary, name: str, special_tokens: SpecialTokens = "text"
    ) -> None:
        self.name = name
        self.vocabulary_size = len(vocabulary.tokens)
        self.eod_id = vocabulary.eod_id
        self.fingerprint = vocabulary.fingerprint
        self.special_tokens = special_tokens
        self.vocabulary = vocabulary
        parse = special_tokens == "parse"
        self._engine = build_engine(vocabulary, name, with_special_tokens=parse)
        self._found_in_text = {
            **vocabulary.added_tokens,
            **(vocabulary.special_tokens if parse else {}),
        }

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without an end of document."""
        return [int(token_id) for token_id in self.encode_batch([text])[0]]

    def encode_batch(self, texts: list[str]) -> Encoded:
        """Returns the ids of all texts back to back, and the number of ids of each text.

        Raises:
            DataError: a text holds half a character (a lone surrogate), which has no bytes.
        """
        originals = texts
        try:
            if self.vocabulary.normalizer:
                texts = [self._normalize(text) for text in texts]
            sizes = list(map(len, texts))
            if sum(sizes) <= _CALL_CHARACTERS and max(sizes, default=0) <= _LONG_CHARACTERS:
                return self._engine.encode_batch(texts)
            tokens, lengths = zip(*self._encode_in_pieces(texts), strict=True)
            return np.concatenate(tokens), np.concatenate(lengths)
        except (TypeError, UnicodeEncodeError):
            _refuse_lone_surrogates(originals)
            raise

    def count_lost_bytes(self, text: str) -> int:
        """Counts the bytes of a text without a token, which are not encoded."""
        missing = self.vocabulary.missing_bytes
        return count_bytes_of(missing, text) if missing else 0

    def _normalize(self, text: str) -> str:
        """Returns the NFC of a text, except in tokens that are found in it, as by the reference.

        Its Unicode is older than Python's. So what Python finds normalized it leaves unchanged too,
        and only the other lines take its time.
        """
        if text.isascii() or unicodedata.is_normalized("NFC", text):
            return text
        return "".join(
            piece
            if piece in self._found_in_text or unicodedata.is_normalized("NFC", piece)
            else self._normalizer.normalize_str(piece)
            for piece in self._borders.split(text)
        )

    @cached_property
    def _normalizer(self) -> Any:
        from tokenizers import normalizers

        return normalizers.NFC()

    @cached_property
    def _borders(self) -> re.Pattern[str]:
        """Finds line feeds, which join no other character, and tokens that are found in a text."""
        borders = ["\n", *sorted(self._found_in_text, key=len, reverse=True)]
        return re.compile(f"({'|'.join(map(re.escape, borders))})")

    def _encode_in_pieces(self, texts: list[str]) -> Iterator[Encoded]:
        """Encodes a few MiB at a time; the length of a long text comes after its last ids."""
        call: list[str] = []
        n_characters = 0
        for text in texts:
            is_long = len(text) > _LONG_CHARACTERS and self._windows is not None
            is_long = is_long and not self.count_lost_bytes(text)  # they hide where a token lies
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
        """Reads long texts; None where the splitting rule is one for which nothing is proved."""
        *steps, last = self.vocabulary.split.get("pretokenizers", [self.vocabulary.split])
        patterns = [step.get("pattern") for step in steps if step != _DIGITS]
        after_letters = patterns in ([{"Regex": LLAMA3_PATTERN}], [{"Regex": QWEN2_PATTERN}])
        if not after_letters and (patterns or not last.get("use_regex")):
            return None
        token_bytes = list(map(len, self.vocabulary.token_bytes))
        added = {**self.vocabulary.added_tokens, **self.vocabulary.special_tokens}
        return Windows(
            lambda text: self._engine.encode_batch([text])[0],
            np.array(token_bytes),
            max(token_bytes[i] for i in added.values()),
            _WINDOW_CHARACTERS,
            _OVERLAP_CHARACTERS,
            after_letters,
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Returns the text of ids; bytes that are no UTF-8 (half a character) become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """Returns the bytes of the text of ids, which may begin or end within a character."""
        outside = [i for i in ids if not 0 <= i < self.vocabulary_size]
        if outside:
            raise DataError(
                f"id {outside[0]} is outside the vocabulary of {self.name} "
                f"(0 to {self.vocabulary_size - 1})",
                "decode with the tokenizer that made the ids",
            )
        token_bytes = self.vocabulary.token_bytes
        return b"".join(token_bytes[i] for i in ids)


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
