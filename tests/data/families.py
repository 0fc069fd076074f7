"""Tokenizers with the published structure of five families, over small vocabularies trained here.

Each is a folder of the files that a base model has: `tokenizer.json`, whose normalizer,
pre-tokenizer, flags, post-processor and kinds of added tokens are the published ones, and the
files that name the end of a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import trainers

from trainyard.data import tokenizer as tokenizer_module
from trainyard.data.tokenizer import Tokenizer
from trainyard.data.vocabulary import byte_symbols

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
# On which tokenizers are known to go wrong; a space before a word is written as _.
_FRAGMENTS = """
's 'S 'll 'LL 're ' '' 't'd've can't \u2019s '\u017f \u212a 0 7 1 12 123 1234 2026 31415926535
½ ² Ⅷ ٣ १२ \U0001d7d8 三 e\u0301 \u0301 a\u0323\u0307 a\u0307\u0323 \u212b \u0958 \u1100\u1161
\u08cf\u0301 a\u0898\u0301 \u0338 >\u0338 \u037e \u1fef ﬁ \0 \x7f \u200b \ufeff \u200d \ufffd
\U0001f600 \U0001f469\u200d\U0001f467 \U0010ffff word The _unsplit whole wholes _été http aaaa
漢字 한국어 हिन्दी Ω é ! ... == # // < <|
"""
FRAGMENTS = [
    *[*SPACES, "  ", "\n\n", "\r\n", " \n", "\n \n", "\r\n\t\r\n", "_", "!\n\n", "?!\r\n"],
    *(fragment.replace("_", " ") for fragment in _FRAGMENTS.split()),
]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
TEXTS = [
    "The words of a text, and it's what they'll say; I'd've said 2026 or 31415926535.\n\n",
    "  def f(x):\r\n\treturn x ** 2  # ½ or ²\r\n" * 3,
    "Señor naïve Ångström 漢字かな 한국어 हिन्दी Việt \U0001f469\u200d\U0001f467!\n",
]


def _split(pattern: str, **changes: object) -> dict[str, Any]:
    kind = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return in_sequence({**kind, **changes}, {**BYTE_LEVEL, "use_regex": False})


def in_sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _starts_with(token: str, token_id: int) -> dict[str, Any]:
    """Llama 3's: it puts a beginning of text before every text."""
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    single = [
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    template = {"type": "TemplateProcessing", "single": single, "pair": single}
    processors = [{**BYTE_LEVEL, "use_regex": True}, {**template, "special_tokens": special}]
    return {"type": "Sequence", "processors": processors}


PRE_TOKENIZERS = {
    "gpt2": {**BYTE_LEVEL, "use_regex": True},
    "llama3": _split(PATTERN),
    "qwen3": _split(PATTERN.replace("{1,3}", "")),
    "smollm2": in_sequence(
        {"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}
    ),
    "olmo2": _split(PATTERN, behavior="Removed", invert=True),
}
FAMILIES = tuple(PRE_TOKENIZERS)
# Special tokens; then those that are found in any text.
ADDED = {
    "gpt2": (["<|endoftext|>"], []),
    "llama3": (["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"], []),
    "qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "<think>"]),
    "smollm2": (["<|endoftext|>", "<|im_start|>", "<reponame>"], []),
    "olmo2": (["<|endoftext|>", "<|pad|>"], ["|||IP_ADDRESS|||"]),
}
FRAGMENTS += [token for special, found in ADDED.values() for token in (*special, *found)]
ENDS = {**dict.fromkeys(FAMILIES, "<|endoftext|>"), "llama3": "<|end_of_text|>"}


def put(*path: str | int, value: object) -> Callable[[Any], None]:
    """Returns a change of a `tokenizer.json`: the value at this path."""

    def change(content: Any) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


def build_content(family: str, size: int = 600) -> dict[str, Any]:
    """Returns the content of a `tokenizer.json`; the added tokens come after `size` others."""
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if family == "qwen3" else None,
        "pre_tokenizer": deepcopy(PRE_TOKENIZERS[family]),
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    empty = HuggingFaceTokenizer.from_str(json.dumps(content))
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_symbols(), show_progress=False
    )
    empty.train_from_iterator(TEXTS * 2, trainer)
    content["model"] = json.loads(empty.to_str())["model"]
    vocabulary = content["model"]["vocab"]
    if family == "llama3":
        # As of its 280,147 merges and 128,000 tokens: some tokens are whole words only.
        content["model"]["ignore_merges"] = True
        for word in ("Ġunsplit", "whole", "ĠÃ©tÃ©"):
            vocabulary[word] = len(vocabulary)
    special, found = ADDED[family]
    for token in (*special, *found):
        entry = {"id": len(vocabulary) + len(content["added_tokens"]), "content": token}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({**entry, **flags, "special": token in special})
    if family == "llama3":
        content["post_processor"] = _starts_with(special[0], len(vocabulary))
    return content


def write_folder(folder: Path, family: str, content: dict[str, Any] | None = None) -> Path:
    """Writes the files of a family's base model, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = content or build_content(family)
    end = ENDS[family]
    end_id = next(each["id"] for each in content["added_tokens"] if each["content"] == end)
    files = {
        "tokenizer.json": content,
        "tokenizer_config.json": {"eos_token": end, "model_max_length": 4096},
        "special_tokens_map.json": {"eos_token": {"content": end, "lstrip": False}},
        "generation_config.json": {"eos_token_id": end_id},
    }
    for name, each in files.items():
        (folder / name).write_text(json.dumps(each), "utf-8")
    return folder


def assert_exact(tokenizer: Tokenizer, reference: HuggingFaceTokenizer, texts: list[str]) -> None:
    """Compares the ids of texts, encoded together, with those of the reference."""
    tokens, lengths = tokenizer.encode_batch(texts)
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    assert lengths.tolist() == [len(each.ids) for each in expected]
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [token_id for each in expected for token_id in each.ids]


def shorten_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a document of 2,000 characters a long one."""
    for name, size in (("_CALL", 5000), ("_LONG", 2000), ("_WINDOW", 600), ("_OVERLAP", 100)):
        monkeypatch.setattr(tokenizer_module, f"{name}_CHARACTERS", size)


def load_reference(content: dict[str, Any], *, parse: bool = False) -> HuggingFaceTokenizer:
    """Loads Hugging Face's own tokenizer; unless `parse`, special tokens in a text are text."""
    entries = content["added_tokens"]
    # A token that is not in this vocabulary gets the next free id, whatever its entry says.
    ids = {each["content"]: each["id"] for each in entries}
    model = {**content["model"], "vocab": {**content["model"]["vocab"], **ids}}
    added = [each for each in entries if parse or not each["special"]]
    changed = {**content, "added_tokens": added, "model": model}
    return HuggingFaceTokenizer.from_str(json.dumps(changed))
