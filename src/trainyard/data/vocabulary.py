"""The rules of a byte-level BPE: its tokens, merges and special tokens, from either file layout.

GPT-2's layout is a folder with `vocab.json` and `merges.txt`; the other is one `tokenizer.json`.
Both hold the same content, so both give the same `Vocabulary` and the same fingerprint:

    load_vocabulary("gpt2")                     # GPT-2's, included in this package
    load_vocabulary("data/gpt2")                # vocab.json + merges.txt: the same fingerprint
    load_vocabulary("data/gpt2-vocab.json")     # beside gpt2-merges.txt: the same fingerprint
    load_vocabulary("data/gpt2/tokenizer.json") # the same fingerprint

The package includes only GPT-2's merges, compressed. Its tokens follow from them: the 256 bytes in
the order of their symbols, then the result of each merge, then `<|endoftext|>`.

We save one `tokenizer.json`: a single file is published atomically, includes its special tokens and
its splitting rule, and opens directly in Hugging Face libraries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from trainyard.data.tokenizer_json import (
    END_OF_DOCUMENT,
    GPT2_RULES,
    Rules,
    byte_symbols,
    read_json,
    read_tokenizer_json,
    render_end,
)
from trainyard.errors import DataError
from trainyard.files import publish_text, read_file

GPT2 = "gpt2"
"""The name of the included GPT-2 tokenizer."""
_PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
_HINT = (
    "name a folder with vocab.json and merges.txt (or gpt2-vocab.json and gpt2-merges.txt), or one "
    "with a tokenizer.json; "
    "the name gpt2 means GPT-2's, which ships with Trainyard"
)
# 13 bytes never occur in UTF-8; SmolLM2's vocabulary lacks 21.
_MOST_MISSING_BYTES = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Rules):
    """A checked byte-level BPE.

    `tokens[i]` is the spelling of id `i` in byte symbols; "" for an id without a token.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]

    @property
    def eod_id(self) -> int:
        """The id of the token between documents."""
        return self.special_tokens[self.end_of_document]

    @cached_property
    def missing_bytes(self) -> bytes:
        """The bytes without a token, which are not encoded: 21 of them in SmolLM2's vocabulary."""
        there = set(self.tokens)
        return bytes(n for n, symbol in enumerate(byte_symbols()) if symbol not in there)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id."""
        of_symbol = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        literal = {*self.special_tokens, *self.added_tokens}
        return [
            token.encode() if token in literal else bytes(of_symbol[symbol] for symbol in token)
            for token in self.tokens
        ]

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that decides an id, whatever the file layout."""
        rules = [self.tokens, self.merges, self.special_tokens, self.added_tokens, self.split]
        newer = [self.normalizer, self.ignore_merges, self.end_of_document]
        if newer != ["", False, END_OF_DOCUMENT]:
            rules += newer
        canonical = json.dumps(rules, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def render_json(self, *, with_special_tokens: bool = True) -> str:
        """Renders a `tokenizer.json`; without special tokens, their spelling is ordinary text."""
        special = self.special_tokens if with_special_tokens else {}
        # Without merges, a word of a text that is spelled like a special token would become it.
        is_hidden = self.ignore_merges and not with_special_tokens
        hidden = {"", *(self.special_tokens if is_hidden else ())}
        added = [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in special,
            }
            for token, token_id in sorted({**self.added_tokens, **special}.items(), key=_by_id)
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        split = {**byte_level, **self.split} if "use_regex" in self.split else self.split
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": self.ignore_merges,
            "vocab": {
                token: token_id for token_id, token in enumerate(self.tokens) if token not in hidden
            },
            "merges": self.merges,
        }
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": self.normalizer} if self.normalizer else None,
            "pre_tokenizer": split,
            "post_processor": render_end(self.end_of_document, self.eod_id),
            "decoder": {**byte_level, "use_regex": True},
            "model": model,
        }
        return json.dumps(content, ensure_ascii=False)


def _by_id(item: tuple[str, int]) -> int:
    return item[1]


def save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Writes a `tokenizer.json`, atomically."""
    publish_text(path, vocabulary.render_json())


def load_vocabulary(source: str | Path) -> Vocabulary:
    """Reads and checks a tokenizer.

    Args:
        source: a folder with vocab.json and merges.txt, also named gpt2-vocab.json and
            gpt2-merges.txt, or with a tokenizer.json; or one of these files. The string "gpt2" is
            the included tokenizer, while "./gpt2" and a `Path` are always files.

    Raises:
        DataError: a file is missing or malformed, or it is not a byte-level BPE with
            `<|endoftext|>`; or a folder "gpt2" here holds a different tokenizer.
    """
    if source == GPT2:
        return _load_gpt2()
    path = Path(source)
    if path.is_file():
        named = [pair for pair in _PAIRS if path.name in pair]
        return _from_pair(path.parent, named[0]) if named else _from_tokenizer_json(path)
    if not path.is_dir():
        raise DataError(f"the tokenizer {source} does not exist", _HINT)
    if (path / "tokenizer.json").is_file():
        return _from_tokenizer_json(path / "tokenizer.json")
    there = [pair for pair in _PAIRS if any((path / name).is_file() for name in pair)]
    return _from_pair(path, there[0] if there else _PAIRS[0])


def _from_pair(folder: Path, names: tuple[str, str]) -> Vocabulary:
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"the tokenizer folder {folder} has no {name}", _HINT)
    vocabulary, merges = (folder / name for name in names)
    return build_vocabulary(vocabulary, read_json(vocabulary), _read_merges(merges))


def holds_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files of a tokenizer, in either layout."""
    layouts = (("tokenizer.json",), *_PAIRS)
    return any(all((folder / name).is_file() for name in names) for names in layouts)


def _load_gpt2() -> Vocabulary:
    packed = resources.files("trainyard.data") / "gpt2" / "merges.txt.xz"
    lines = lzma.decompress(packed.read_bytes()).decode()
    merges = [(left, right) for left, right in _parse_merges(lines)]
    tokens = [*sorted(byte_symbols()), *map("".join, merges), END_OF_DOCUMENT]
    special = {END_OF_DOCUMENT: len(tokens) - 1}
    vocabulary = Vocabulary(tokens=tokens, merges=merges, special_tokens=special)
    folder = Path(GPT2)
    if holds_tokenizer(folder) and load_vocabulary(folder).fingerprint != vocabulary.fingerprint:
        raise DataError(
            f"{GPT2} names the tokenizer that ships with Trainyard, but the folder {GPT2} here "
            "holds a different one",
            f"write ./{GPT2} to use the folder, or rename the folder to use the included one",
        )
    return vocabulary


def _from_tokenizer_json(path: Path) -> Vocabulary:
    ids, merges, rules = read_tokenizer_json(path)
    return build_vocabulary(path, ids, merges, rules)


def build_vocabulary(
    path: Path,
    ids: dict[str, int],
    merges: list[Any],
    rules: Rules = GPT2_RULES,
) -> Vocabulary:
    """Checks the parts of a vocabulary and joins them; `path` is named in errors.

    Raises:
        DataError: an id of two tokens, an unknown token in a merge, or no end of document.
    """
    if not all(isinstance(token_id, int) for token_id in ids.values()):
        raise DataError(f"{path} is malformed: an id is not a whole number", "save it again")
    token_of = {token_id: token for token, token_id in ids.items()}
    least, most = min(token_of, default=0), max(token_of, default=0)
    if len(token_of) < len(ids) or least < 0 or most >= 2 * len(ids):
        hint = "ids count from 0, each has one token at most, and most have one"
        raise DataError(f"{path}: {len(ids)} tokens have the ids {least} to {most}", hint)
    tokens = [token_of.get(token_id, "") for token_id in range(most + 1)]
    missing = [byte for byte, symbol in enumerate(byte_symbols()) if symbol not in ids]
    if len(missing) > _MOST_MISSING_BYTES:
        raise DataError(
            f"{path} is not a byte-level vocabulary: {len(missing)} bytes have no token, the first "
            f"is byte {missing[0]}",
            "nearly every byte needs a token, as in GPT-2's vocab.json",
        )
    end = rules.end_of_document
    if end not in ids:
        raise DataError(
            f"{path} has no token {end}",
            "it marks the end of a document; add it to the vocabulary as the last id",
        )
    special = {**rules.special_tokens, end: ids[end]}
    added = {token: rules.added_tokens[token] for token in rules.added_tokens if token != end}
    literal = {*special, *added}
    foreign = {symbol for token in tokens if token not in literal for symbol in token}
    foreign -= set(byte_symbols())
    for token in tokens if foreign else ():
        if token not in literal and not foreign.isdisjoint(token):
            hint = "spell tokens in byte symbols, as GPT-2's vocab.json does"
            raise DataError(f"{path}: the token {token!r} (id {ids[token]}) is not bytes", hint)
    _check_merges(path, ids, merges)
    # Of a repeated merge the last one counts, as in `tokenizers`.
    pairs = [*dict.fromkeys((left, right) for left, right in reversed(merges))][::-1]
    if not rules.ignore_merges:
        made = {*byte_symbols(), *literal, *map("".join, pairs)}
        if n_idle := len(ids.keys() - made):
            _warn(
                f"{path}: no merge makes {n_idle:,} of {len(ids):,} tokens, so no text has them; "
                "if that is not intended, fetch or save the tokenizer again"
            )
    checked = {**vars(rules), "special_tokens": special, "added_tokens": added}
    return Vocabulary(tokens=tokens, merges=pairs, **checked)


@cache  # a command may read a tokenizer several times
def _warn(message: str) -> None:
    _log.warning(message)


def _check_merges(path: Path, ids: dict[str, int], merges: list[Any]) -> None:
    for rank, merge in enumerate(merges):
        if len(merge) != 2 or not (isinstance(merge[0], str) and isinstance(merge[1], str)):
            hint = "a merge is two tokens with one space between them"
            raise DataError(f"{path}: merge {rank} is {_short(merge)}, not two tokens", hint)
        left, right = merge
        if not (left in ids and right in ids and left + right in ids):
            unknown = next(part for part in (left, right, left + right) if part not in ids)
            raise DataError(
                f"{path}: merge {rank} {left!r} + {right!r} needs the token {unknown!r}, "
                "which is not in the vocabulary",
                "take the vocabulary and the merges from the same tokenizer",
            )


def _read_merges(path: Path) -> list[tuple[str, ...]]:
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "fetch or save it again") from error
    return _parse_merges(text)


def _parse_merges(text: str) -> list[tuple[str, ...]]:
    lines = text.split("\n")
    if lines[0].startswith("#version"):
        lines = lines[1:]
    return [tuple(line.rstrip("\r").split(" ")) for line in lines if line.strip()]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
