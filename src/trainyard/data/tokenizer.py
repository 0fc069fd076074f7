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

Memory is bounded: an engine (`engines.py`) gets a few MiB of text at a time, and a long document in
windows.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainyard.data.engines import DIGITS, Encoded, Ids, build_engine, count_bytes_of
from trainyard.data.vocabulary import LLAMA3_PATTERN, QWEN2_PATTERN, Vocabulary, load_vocabulary
from trainyard.errors import DataError

SpecialTokens = Literal["text", "parse"]

# A block of 4 MiB and the document that hangs over its end: what is read at once, in one call.
_CALL_CHARACTERS = 5 * 2**20
_LONG_CHARACTERS = 2**20
_WINDOW_CHARACTERS = 2**18
_OVERLAP_CHARACTERS = 2**12
_CONTRACTION = re.compile(rb"'[sdmtlvr]", re.IGNORECASE)
# Four characters: the longest text that the end of a window can make the splitting rule misread.
_UNCERTAIN_BYTES = 16


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
            place = int(starts[index])
            is_character = data[place] & 0xC0 != 0x80
            if (
                is_character
                and not _CONTRACTION.search(data, place - 2, place + 2)
                and (not self.after_letters or _is_letter(data[:place].decode()[-1]))
            ):
                return len(ids) - len(last) + index, len(data[:place].decode())
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
            # A token is a byte or more. The pages of an array that are never written take no
            # memory; joining the pieces at the end would take it twice.
            n_bytes = sum(len(text) if text.isascii() else len(text) * 4 for text in texts)
            tokens, lengths, n_tokens = np.empty(n_bytes, np.uint32), [], 0
            for piece, lengths_of_texts in self._encode_in_pieces(texts):
                tokens[n_tokens : n_tokens + len(piece)] = piece
                n_tokens += len(piece)
                lengths.append(lengths_of_texts)
            return tokens[:n_tokens], np.concatenate(lengths)
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
        patterns = [step.get("pattern") for step in steps if step != DIGITS]
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
