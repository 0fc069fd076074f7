"""Tokenises a long text in windows, with constant memory.

An engine takes about 25 bytes of memory per byte of a word, and words are unbounded: base64, DNA, a
page of line feeds. So windows overlap and are joined at a common token:

    window 1   |The| cat| sat| on| the| m|
    window 2                     | the| mat| and| pur|
    joined     |The| cat| sat| on| the| mat| and| pur|

The ids are those of the whole text, for any vocabulary with GPT-2's splitting rule:

1. The splitting rule looks forward only. A window that begins where a word begins, or inside one,
   has the words of the whole text from there on, the first one cut at its front. `_find_joint`
   avoids the exception, a contraction: in `I'll` the rest of `'ll` is `ll`, another kind of word.
   Where a window ends, only words that touch its last characters can differ.
2. Byte-pair encoding repeats the merge of least rank, leftmost first. Where no merge crosses a
   place in a word, either side is merged as if it were alone. So in the encoding of a word, any two
   neighbours are the encoding of their own bytes.
3. Conversely, if any two neighbours in a row of tokens are that, the row is the encoding of its
   word: the first merge to cross a boundary would have done so with these two neighbours alone.

The tokens before the shared one are neighbours in window 1, those after it in window 2, and by 1
none crosses the border of a word of the whole text. So by 3 the joined row is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]

_CONTRACTION = re.compile(rb"'[sdmtlvr]")
# Four characters: the longest text that the end of a window can make the splitting rule misread.
_UNCERTAIN_BYTES = 16


@dataclass(frozen=True)
class Windows:
    """Encodes long texts a window at a time.

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
