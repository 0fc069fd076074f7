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

Supported are byte-level BPEs, as of GPT-2, Llama 3, Qwen 2.5 and 3, SmolLM2, DeepSeek V3, gpt-oss,
and OpenAI's cl100k and o200k as converted for Hugging Face's libraries:

    normalizer       none, or NFC
    pre_tokenizer    ByteLevel, after any of Split, Digits and Punctuation
    model            BPE, with or without ignore_merges
    post_processor   none, or one that adds tokens only before a text (never added here)

The token that ends a document is `eos_token` of the files beside it. They have to agree, and
`<|endoftext|>` counts as named where the vocabulary has it: a chat model's files name another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from trainyard.errors import DataError
from trainyard.files import parse_json, publish_text, read_file

GPT2 = "gpt2"
"""The name of the included GPT-2 tokenizer."""
_PAIR = ("vocab.json", "merges.txt")
_LAYOUTS = (("tokenizer.json",), _PAIR, ("gpt2-vocab.json", "gpt2-merges.txt"))
_HINT = (
    "name a folder with vocab.json and merges.txt (or gpt2-vocab.json and gpt2-merges.txt), or one "
    "with a tokenizer.json; "
    "the name gpt2 means GPT-2's, which ships with Trainyard"
)
# 13 bytes never occur in UTF-8; SmolLM2's vocabulary lacks 21.
_MOST_MISSING_BYTES = 64
_log = logging.getLogger(__name__)
END_OF_DOCUMENT = "<|endoftext|>"
# The splitting rule of GPT-2: its regular expression, and no space put before the first word.
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = _WORDS % r"\p{N}{1,3}"
"""The splitting rule of Llama 3 and OLMo 2."""
QWEN2_PATTERN = _WORDS % r"\p{N}"
"""The splitting rule of Qwen 2 and 3."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The splitting rule of GPT-4o and gpt-oss."""
# Each matches every character of any text, so removing what does not match removes nothing.
_COVERING = [{"Regex": pattern} for pattern in (LLAMA3_PATTERN, QWEN2_PATTERN, O200K_PATTERN)]
_STEPS = ("Split", "Digits", "Punctuation")
_FLAGS = ("lstrip", "rstrip", "single_word")


def byte_symbols() -> list[str]:
    """Lists the printable character for each byte, 0 to 255, in byte-level files.

    Printable Latin-1 maps to itself; the others to code points from 256 on, in order.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in shown else next(spare)) for byte in range(256)]


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Reads a `tokenizer.json` and, beside it, the files that name the end of a document.

    Raises:
        DataError: it is malformed, unsupported, or its end of document is missing or ambiguous.
    """
    content = read_json(path)
    try:
        if problems := "; ".join(_find_unsupported(content)):
            raise DataError(
                f"{path} is not a supported tokenizer: {problems}",
                "supported: byte-level BPE, as of GPT-2, Llama 3, Qwen 3 and SmolLM2 "
                "(docs/corpora.md); or use gpt2 (included), or train one with `trainyard prepare "
                "--train-tokenizer`",
            )
        model, added = content["model"], content.get("added_tokens") or []
        ids = _add_tokens(path, dict(model["vocab"]), added)
        split = content["pre_tokenizer"]
        if split["type"] == "ByteLevel":
            split = {**GPT2_SPLIT, "use_regex": split.get("use_regex", True)}
        return build_vocabulary(
            path,
            ids,
            [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]],
            special_tokens={e["content"]: e["id"] for e in added if e["special"]},
            added_tokens={e["content"]: e["id"] for e in added if not e["special"]},
            split=split,
            normalizer="NFC" if _normalizers(content) else "",
            ignore_merges=bool(model.get("ignore_merges")),
            end_of_document=_find_end(path, content, ids),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"{path} is malformed: {type(error).__name__} {error}"
        raise DataError(problem, "save the tokenizer again") from error


def _add_tokens(path: Path, ids: dict[str, int], added: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the ids with those of the added tokens, if `tokenizers` would give them the same.

    It keeps the id that the vocabulary has; others get the next one, whatever their entry says.
    """
    n_ids = len(ids)
    following = n_ids
    for entry in added:
        token, token_id = entry["content"], entry["id"]
        expected = ids.get(token, following)
        if token_id != expected:
            raise DataError(
                f"{path}: the added token {token!r} has id {token_id}, but Hugging Face's "
                f"tokenizers gives it {expected}",
                "list the added tokens by id, without gaps after the last id of model.vocab; or "
                "put them into model.vocab, with their ids",
            )
        ids[token] = token_id
        following = max(following, token_id + 1) if token_id >= n_ids else following
    return ids


def _find_unsupported(content: dict[str, Any]) -> Iterator[str]:
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        yield f"model.type is {kind!r}, not 'BPE'"
        return
    for key in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            yield f"model.{key} is {model[key]!r}"
    if model.get("unk_token") and not set(byte_symbols()) <= model["vocab"].keys():
        yield f"model.unk_token is {model['unk_token']!r}, for bytes without a token"
    for kind in _normalizers(content):
        if kind != "NFC":
            yield f"normalizer {kind!r}"
    yield from _find_unsupported_steps(content)
    yield from _find_unsupported_additions(content)
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        yield f"decoder is {content.get('decoder')!r}, not 'ByteLevel'"


def _find_unsupported_steps(content: dict[str, Any]) -> Iterator[str]:
    *steps, last = _steps(content.get("pre_tokenizer"), "pretokenizers") or [{}]
    for step in steps:
        covers_all = step.get("pattern") in _COVERING
        if step.get("type") not in _STEPS:
            yield f"pre_tokenizer {step.get('type')!r}"
        elif step.get("behavior") == "Removed" and not (step.get("invert") and covers_all):
            yield f"pre_tokenizer {step['type']!r} removes text"
    if last.get("type") != "ByteLevel":
        yield f"pre_tokenizer ends in {last.get('type')!r}, not 'ByteLevel'"
    elif last.get("add_prefix_space"):
        yield "pre_tokenizer 'ByteLevel' puts a space before a text"


def _find_unsupported_additions(content: dict[str, Any]) -> Iterator[str]:
    for step in _steps(content.get("post_processor"), "processors"):
        template = [next(iter(item)) for item in step.get("single") or []]
        if step["type"] != "ByteLevel" and template[-1:] != ["Sequence"]:
            yield f"post_processor {step['type']!r} adds tokens after a text"
    for entry in content.get("added_tokens") or []:
        flags = [flag for flag in _FLAGS if entry.get(flag)]
        if entry.get("normalized") and _normalizers(content):
            flags.append("normalized")
        if flags:
            yield f"{', '.join(flags)} of the added token {entry['content']!r}"


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if not part:
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]


def _normalizers(content: dict[str, Any]) -> list[str]:
    return [step["type"] for step in _steps(content.get("normalizer"), "normalizers")]


def render_end(token: str, token_id: int) -> dict[str, Any] | None:
    """Renders the end of document as a template that adds nothing; None for `<|endoftext|>`.

    A copy of a tokenizer is one file, and a `tokenizer.json` has no field for it.
    """
    if token == END_OF_DOCUMENT:
        return None
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    template = {"type": "TemplateProcessing", "single": [first], "pair": [first, second]}
    return {**template, "special_tokens": special}


def _find_end(path: Path, content: dict[str, Any], ids: dict[str, int]) -> str:
    """Returns the token that ends a document."""
    for token in (content.get("post_processor") or {}).get("special_tokens", {}):
        if content["post_processor"] == render_end(token, ids[token]):
            return str(token)
    named: dict[str, list[str]] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        for token in _ends_named_in(path.with_name(name), ids):
            named.setdefault(token, []).append(name)
    if END_OF_DOCUMENT in ids:
        named.setdefault(END_OF_DOCUMENT, []).append(path.name)
    if len(named) != 1:
        choices = "; ".join(f"{token} in {', '.join(names)}" for token, names in named.items())
        raise DataError(
            f"{path}: one token must end a document; named are: {choices or 'none'}",
            "take the files of the base model, not of a chat model; or copy tokenizer.json to a "
            "folder with only a tokenizer_config.json beside it, with the eos_token of the base "
            "model, such as <|end_of_text|> of Llama 3",
        )
    return next(iter(named))


def _ends_named_in(path: Path, ids: dict[str, int]) -> list[str]:
    """Lists the tokens that one of a model's files says end a text."""
    content = read_json(path) if path.is_file() else {}
    if token := content.get("eos_token"):
        return [str(token.get("content") if isinstance(token, dict) else token)]
    named = content.get("eos_token_id")
    token_ids = named if isinstance(named, list) else [] if named is None else [named]
    token_of = {token_id: token for token, token_id in ids.items()}
    return [token_of.get(token_id, f"id {token_id}") for token_id in token_ids]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object.

    Raises:
        DataError: it cannot be read, or is none.
    """
    try:
        content = parse_json(_read_text(path))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}", "fetch or save it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object", "fetch or save the file again")
    return content


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A checked byte-level BPE."""

    tokens: list[str]
    """The spelling of each id in byte symbols; "" for an id without a token."""
    merges: list[tuple[str, str]]
    special_tokens: dict[str, int]
    added_tokens: dict[str, int] = field(default_factory=dict)
    """Found in a text before it is split, like special tokens, but always."""
    split: dict[str, Any] = field(default_factory=lambda: GPT2_SPLIT)
    """The pre-tokenizer."""
    normalizer: str = ""
    """NFC, or none."""
    ignore_merges: bool = False
    """Whether a word that is a token is not split, whatever the merges give."""
    end_of_document: str = END_OF_DOCUMENT

    @property
    def eod_id(self) -> int:
        """The id of the token between documents."""
        return self.special_tokens[self.end_of_document]

    @cached_property
    def missing_bytes(self) -> bytes:
        """The bytes without a token, which are not encoded: 21 of them in SmolLM2's vocabulary."""
        tokens = set(self.tokens)
        return bytes(n for n, symbol in enumerate(byte_symbols()) if symbol not in tokens)

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
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [
            {"id": token_id, "content": token, **flags, "special": token in special}
            for token_id, token in sorted((i, t) for t, i in (self.added_tokens | special).items())
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
    if not path.exists():
        raise DataError(f"the tokenizer {source} does not exist", _HINT)
    if path.is_file():
        folder, names = path.parent, next((n for n in _LAYOUTS if path.name in n), (path.name,))
    else:
        folder, present = path, {entry.name for entry in path.iterdir()}
        names = next((names for names in _LAYOUTS if not present.isdisjoint(names)), _PAIR)
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"the tokenizer folder {folder} has no {name}", _HINT)
    first, *merges = (folder / name for name in names)
    if not merges:
        return read_tokenizer_json(first)
    return build_vocabulary(first, read_json(first), _parse_merges(_read_text(merges[0])))


def holds_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files of a tokenizer, in either layout."""
    return any(all((folder / name).is_file() for name in names) for names in _LAYOUTS)


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


def build_vocabulary(
    path: Path, ids: dict[str, int], merges: list[Any], **rules: Any
) -> Vocabulary:
    """Checks the parts of a vocabulary and joins them.

    Args:
        path: is named in errors.
        ids: of every token.
        merges: of two tokens each, if they are right.
        rules: other fields of `Vocabulary`; those of GPT-2 where absent.

    Raises:
        DataError: an id of two tokens, an unknown token in a merge, or no end of document.
    """
    token_of = {token_id: token for token, token_id in ids.items() if isinstance(token_id, int)}
    least, most = min(token_of, default=0), max(token_of, default=0)
    if len(token_of) < len(ids) or least < 0 or most >= 2 * len(ids):
        hint = "ids are whole numbers from 0, each has one token at most, and most have one"
        raise DataError(f"{path}: {len(ids)} tokens have the ids {least} to {most}", hint)
    tokens = [token_of.get(token_id, "") for token_id in range(most + 1)]
    missing = [byte for byte, symbol in enumerate(byte_symbols()) if symbol not in ids]
    if len(missing) > _MOST_MISSING_BYTES:
        raise DataError(
            f"{path} is not a byte-level vocabulary: {len(missing)} bytes have no token, the first "
            f"is byte {missing[0]}",
            "nearly every byte needs a token, as in GPT-2's vocab.json",
        )
    end = rules.get("end_of_document", END_OF_DOCUMENT)
    if end not in ids:
        raise DataError(
            f"{path} has no token {end}, the end of a document",
            "take all files from the same tokenizer, or add it to the vocabulary as the last id",
        )
    special = {**rules.get("special_tokens", {}), end: ids[end]}
    added = {token: i for token, i in rules.get("added_tokens", {}).items() if token != end}
    literal = {*special, *added}
    foreign = {symbol for token in tokens if token not in literal for symbol in token}
    foreign -= set(byte_symbols())
    if foreign:
        token = next(t for t in tokens if t not in literal and not foreign.isdisjoint(t))
        hint = "spell tokens in byte symbols, as GPT-2's vocab.json does"
        raise DataError(f"{path}: the token {token!r} (id {ids[token]}) is not bytes", hint)
    _check_merges(path, ids, merges)
    # Of a repeated merge the last one counts, as in `tokenizers`.
    pairs = [*dict.fromkeys((left, right) for left, right in reversed(merges))][::-1]
    if not rules.get("ignore_merges"):
        made = {*byte_symbols(), *literal, *map("".join, pairs)}
        if n_idle := len(ids.keys() - made):
            _warn(
                f"{path}: no merge makes {n_idle:,} of {len(ids):,} tokens, so no text has them; "
                "if that is not intended, fetch or save the tokenizer again"
            )
    checked = {**rules, "special_tokens": special, "added_tokens": added}
    return Vocabulary(tokens=tokens, merges=pairs, **checked)


@cache  # a command may read a tokenizer several times
def _warn(message: str) -> None:
    _log.warning(message)


def _check_merges(path: Path, ids: dict[str, int], merges: list[Any]) -> None:
    for rank, merge in enumerate(merges):
        if len(merge) != 2 or not (isinstance(merge[0], str) and isinstance(merge[1], str)):
            hint = "a merge is two tokens with one space between them"
            raise DataError(f"{path}: merge {rank} is {merge!r:.80}, not two tokens", hint)
        left, right = merge
        if not (left in ids and right in ids and left + right in ids):
            unknown = next(part for part in (left, right, left + right) if part not in ids)
            raise DataError(
                f"{path}: merge {rank} {left!r} + {right!r} needs the token {unknown!r}, "
                "which is not in the vocabulary",
                "take the vocabulary and the merges from the same tokenizer",
            )


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "fetch or save it again") from error


def _parse_merges(text: str) -> list[tuple[str, ...]]:
    lines = text.split("\n")
    if lines[0].startswith("#version"):
        lines = lines[1:]
    return [tuple(line.rstrip("\r").split(" ")) for line in lines if line.strip()]
