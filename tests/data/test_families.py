"""Tests of the tokenizers of Llama 3, Qwen 2 and 3, SmolLM2 and OLMo 2, against `tokenizers`."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.families import (
    ADDED,
    ENDS,
    FAMILIES,
    TEXTS,
    build_content,
    load_reference,
    write_folder,
)
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from trainyard.data import tokenizer as subject
from trainyard.data.tokenizer import GigatokenEngine, Tokenizer, load_tokenizer
from trainyard.data.vocabulary import load_vocabulary, save_vocabulary
from trainyard.errors import DataError

SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
FRAGMENTS = [
    *[*SPACES, "  ", "\n\n", "\r\n", " \n", "\n \n", "\r\n\t\r\n"],
    *[
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'re",
        "'",
        "''",
        "'t'd've",
        "can't",
        "\u2019s",
        "'\u017f",
        "\u212a",
    ],
    *["0", "7", "12", "123", "1234", "31415926535", "½", "²", "Ⅷ", "٣", "१२", "\U0001d7d8", "三"],
    *["e\u0301", "\u0301", "a\u0323\u0307", "a\u0307\u0323", "\u212b", "\u0958", "\u1100\u1161"],
    *["\u08cf\u0301", "a\u0898\u0301", "\u0338", ">\u0338", "\u037e", "\u1fef", "ﬁ"],
    *[
        "\0",
        "\x7f",
        "\u200b",
        "\ufeff",
        "\u200d",
        "\ufffd",
        "\U0001f469\u200d\U0001f467",
        "\U0010ffff",
    ],
    *[
        "word",
        "The",
        " unsplit",
        "whole",
        "wholes",
        " été",
        "http",
        "aaaa",
        "漢字",
        "한국어",
        "हिन्दी",
        "Ω",
    ],
    *["!", "...", "==", "_", "#", "//", "!\n\n", "?!\r\n", "<", "<|"],
    *[token for special, found in ADDED.values() for token in (*special, *found)],
]
# Gigatoken's Unicode is newer than the reference's, and Python's is older than either.
KNOWN = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=3)
TEXT = st.lists(st.sampled_from(FRAGMENTS) | KNOWN, max_size=30).map("".join)
RUN = st.tuples(st.sampled_from(FRAGMENTS), st.integers(1, 70)).map(lambda run: run[0] * run[1])
HOSTILE = st.lists(TEXT | RUN, max_size=4).map("".join)


class Published(NamedTuple):
    """A family's folder, its `tokenizer.json`, both ways to load it and Hugging Face's."""

    folder: Path
    content: dict[str, Any]
    text: Tokenizer
    parsing: Tokenizer
    text_reference: HuggingFaceTokenizer
    parsing_reference: HuggingFaceTokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    content = build_content(request.param)
    folder = write_folder(
        tmp_path_factory.mktemp("families") / request.param, request.param, content
    )
    return Published(
        folder,
        content,
        load_tokenizer(folder),
        load_tokenizer(folder, "parse"),
        load_reference(content),
        load_reference(content, parse=True),
    )


def assert_exact(tokenizer: Tokenizer, reference: HuggingFaceTokenizer, texts: list[str]) -> None:
    tokens, lengths = tokenizer.encode_batch(texts)
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    assert lengths.tolist() == [len(each.ids) for each in expected]
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [token_id for each in expected for token_id in each.ids]


def test_the_fast_engine_is_in_use(published: Published) -> None:
    assert isinstance(published.text._engine, GigatokenEngine)
    assert isinstance(published.parsing._engine, GigatokenEngine)


def test_words_have_the_ids_of_the_reference(published: Published) -> None:
    texts = [
        "",
        *FRAGMENTS,
        *TEXTS,
        *(first + second for first in FRAGMENTS for second in FRAGMENTS),
    ]
    assert_exact(published.text, published.text_reference, texts)
    assert_exact(published.parsing, published.parsing_reference, texts)


@settings(max_examples=60)
@given(texts=st.lists(HOSTILE, max_size=3))
def test_hostile_texts_have_the_ids_of_the_reference(
    published: Published, texts: list[str]
) -> None:
    assert_exact(published.text, published.text_reference, texts)
    assert_exact(published.parsing, published.parsing_reference, texts)


@settings(max_examples=60)
@given(text=HOSTILE, window=st.integers(40, 120), overlap=st.integers(20, 39))
def test_windows_have_the_ids_of_the_whole(
    published: Published, text: str, window: int, overlap: int
) -> None:
    for tokenizer in (published.text, published.parsing):
        assert tokenizer._windows
        sizes = {"window_characters": window, "overlap_characters": overlap}
        windows = replace(tokenizer._windows, **sizes)
        pieces = list(windows.encode_long(text))
        assert np.concatenate(pieces).tolist() == tokenizer._engine.encode_batch([text])[0].tolist()


@pytest.mark.parametrize(
    "piece", ["a", "word ", "1", "12 ", "\n", " ", "=", "!\n", "'ll", "漢", "½"]
)
def test_a_long_run_has_the_ids_of_the_reference(
    published: Published, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    for name, size in (("_CALL", 5000), ("_LONG", 2000), ("_WINDOW", 600), ("_OVERLAP", 100)):
        monkeypatch.setattr(subject, f"{name}_CHARACTERS", size)
    monkeypatch.delitem(vars(published.text), "_windows", raising=False)
    text = piece * (9000 // len(piece)) + "end"
    assert_exact(published.text, published.text_reference, ["", text, "a", f" {text}"])
    monkeypatch.delitem(vars(published.text), "_windows")


def test_windows_of_prose_are_short(published: Published) -> None:
    assert published.text._windows
    longest = 0

    def encode(piece: str) -> Any:
        nonlocal longest
        longest = max(longest, len(piece))
        return published.text._engine.encode_batch([piece])[0]

    sizes = {"window_characters": 400, "overlap_characters": 80}
    windows = replace(published.text._windows, encode=encode, **sizes)
    assert sum(map(len, windows.encode_long(TEXTS[0] * 100))) > 2000
    assert longest == 400


@given(data=st.data())
def test_any_ids_decode_as_by_the_reference(published: Published, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, published.text.vocabulary_size - 1), max_size=30))
    decoded = published.parsing_reference.decode(ids, skip_special_tokens=False)
    assert published.text.decode(ids) == decoded


def test_a_text_comes_back(published: Published) -> None:
    for text in (*FRAGMENTS, *TEXTS):
        normal = (
            unicodedata.normalize("NFC", text) if published.text.vocabulary.normalizer else text
        )
        if "\u0898" not in text and "\u08cf" not in text:  # newer than the reference's Unicode
            assert published.text.decode(published.text.encode(text)) == normal


def test_half_a_character_is_refused(published: Published) -> None:
    with pytest.raises(DataError, match=r"text 1 holds the lone surrogate \\ud800 at character 3"):
        published.text.encode_batch(["fine", "a\u0301b\ud800"])


def test_a_copy_is_the_same_tokenizer(published: Published, tmp_path: Path) -> None:
    save_vocabulary(published.text.vocabulary, tmp_path / "tokenizer.json")
    copy = load_vocabulary(tmp_path)
    assert copy == published.text.vocabulary
    assert copy.fingerprint == published.text.fingerprint
    assert copy.tokens[copy.eod_id] == ENDS[published.folder.name]
    reference = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert ids == published.text.encode(text), "and adds no token"


@pytest.mark.exhaustive
def test_every_character_has_the_ids_of_the_reference(published: Published) -> None:
    # Gigatoken's Unicode is newer: to it, code points that the reference does not know are letters.
    unknown = pre_tokenizers.Split(Regex(r"\p{Cn}+"), "removed")
    code_points = map(chr, [*range(1, 0xD800), *range(0xE000, 0x110000)])
    characters = "".join(piece for piece, _ in unknown.pre_tokenize_str("".join(code_points)))
    assert len(characters) > 290_000
    for frame in ("a{0}s{0}{0} 1{0}2 {0}'{0}!{0}\n{0}", "e{0}\u0301 \u0323{0}\u0323"):
        for start in range(0, len(characters), 100_000):
            texts = [frame.format(each) for each in characters[start : start + 100_000]]
            assert_exact(published.text, published.text_reference, texts)


def test_ignore_merges_matters() -> None:
    content = build_content("llama3")
    kept = load_reference({**content, "model": {**content["model"], "ignore_merges": False}})
    for word in (" unsplit", "whole", " été"):
        assert len(load_reference(content).encode(word, add_special_tokens=False).ids) == 1
        assert len(kept.encode(word, add_special_tokens=False).ids) > 1


def test_a_special_token_is_text_even_as_a_whole_word(tmp_path: Path) -> None:
    content = build_content("llama3")
    content["added_tokens"][2]["content"] = "STOP"  # a word, which ignore_merges would look up
    tokenizer = load_tokenizer(write_folder(tmp_path, "llama3", content))
    assert tokenizer.decode(tokenizer.encode("STOP")) == "STOP"
    assert len(tokenizer.encode("STOP")) == 4
    assert len(load_tokenizer(tmp_path, "parse").encode("STOP")) == 1
