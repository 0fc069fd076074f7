"""GPT-2's tokenizer in plain Python, to compare with: slow, short, and nothing of it from `src`.

It reads vocab.json and merges.txt itself. A word is a row of byte strings; the pair of least rank,
leftmost first, is merged until no pair has a rank. A heap of pairs and the gaps that merges leave
keep a word of n bytes at n log n steps.

    bpe = ReferenceBpe(Path("gpt2"))
    bpe.encode("hello world")                       # [31373, 995]
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import regex

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _byte_of_symbol() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


class _Words(dict[str, list[int]]):
    """Encodes a word when it is asked for the first time."""

    def __init__(self, encode_word: Callable[[bytes], list[int]]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> list[int]:
        self[word] = self._encode_word(word.encode())
        return self[word]


class ReferenceBpe:
    """Holds ids by bytes, ranks by pairs of bytes, and the ids of the words seen so far."""

    def __init__(self, folder: Path) -> None:
        byte_of = _byte_of_symbol()
        spelled = json.loads((folder / "vocab.json").read_text("utf-8"))
        merges = (folder / "merges.txt").read_text("utf-8").split("\n")[1:]
        self._ids: dict[bytes, int] = {}
        self._ranks: dict[tuple[bytes, bytes], int] = {}
        for token, token_id in spelled.items():
            if token != "<|endoftext|>":
                self._ids[bytes(byte_of[symbol] for symbol in token)] = token_id
        for rank, merge in enumerate(filter(None, merges)):
            left, right = (bytes(byte_of[s] for s in part) for part in merge.split(" "))
            self._ranks[left, right] = rank
        self._words = _Words(self._encode_word)

    def encode(self, text: str) -> list[int]:
        words = self._words
        return [token_id for word in SPLIT.findall(text) for token_id in words[word]]

    def _encode_word(self, word: bytes) -> list[int]:
        ranks = self._ranks
        parts: list[bytes] = [bytes([byte]) for byte in word]
        after = [*range(1, len(parts)), -1]  # the next part that is not merged away; -1: none
        before = list(range(-1, len(parts) - 1))
        pairs = enumerate(pairwise(parts))
        heap = [(ranks[pair], place) for place, pair in pairs if pair in ranks]
        heapq.heapify(heap)
        while heap:
            rank, left = heapq.heappop(heap)
            right = after[left]
            if right < 0 or ranks.get((parts[left], parts[right])) != rank:
                continue  # one of the two was merged since
            parts[left], parts[right] = parts[left] + parts[right], b""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            for place in (before[left], left):
                if place >= 0 and after[place] >= 0:
                    new_rank = ranks.get((parts[place], parts[after[place]]))
                    if new_rank is not None:
                        heapq.heappush(heap, (new_rank, place))
        return [self._ids[part] for part in parts if part]
