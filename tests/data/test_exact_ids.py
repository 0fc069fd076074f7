"""Tests that the ids are GPT-2's, by OpenAI's tokenizer, on whole corpora and on hostile text."""

from __future__ import annotations

import bz2
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.families import FRAGMENTS, shorten_windows

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.tokenizer import Tokenizer, Windows, load_tokenizer
from trainyard.errors import DataError

SPLIT_TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)
RUNS = st.lists(st.tuples(st.sampled_from(FRAGMENTS), st.integers(1, 90)), max_size=6).map(
    lambda runs: "".join(fragment * n for fragment, n in runs)
)


@pytest.fixture(scope="module")
def novels(shared_data: Path) -> list[str]:
    with (shared_data / "corpora" / "novels.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def assert_exact(tokenizer: Tokenizer, reference: tiktoken.Encoding, texts: list[str]) -> None:
    tokens, lengths = tokenizer.encode_batch(texts)
    expected = [reference.encode_ordinary(text) for text in texts]
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.dtype == np.uint32
    assert np.array_equal(tokens, np.array([i for ids in expected for i in ids], np.uint32))


def with_windows(tokenizer: Tokenizer, window: int, overlap: int) -> Windows:
    assert tokenizer._windows
    return replace(tokenizer._windows, window_characters=window, overlap_characters=overlap)


def test_novels_have_the_ids_that_megatron_wrote(
    gpt2: Tokenizer, shared_data: Path, novels: list[str]
) -> None:
    tokens, lengths = gpt2.encode_batch(novels)
    golden = np.fromfile(shared_data / "megatron" / "novels_text_document.bin", np.uint16)
    is_end = np.ones(len(golden), bool)
    is_end[np.delete(np.arange(len(golden)), np.cumsum(lengths + 1) - 1)] = False
    assert (golden[is_end] == gpt2.eod_id).all()
    assert len(lengths) == len(novels)
    assert np.array_equal(golden[~is_end], tokens)


@pytest.mark.exhaustive
def test_corpora_have_the_ids_of_the_reference(
    gpt2: Tokenizer, reference: tiktoken.Encoding, shared_data: Path, novels: list[str]
) -> None:
    corpora = shared_data / "corpora"
    texts = [path.read_text("utf-8") for path in sorted(corpora.glob("*.txt"))]
    xml = [bz2.decompress(path.read_bytes()).decode() for path in corpora.glob("*.bz2")]
    assert len(texts) == 2
    assert len(xml) == 1
    assert_exact(gpt2, reference, [*texts, *xml, *novels[::30]])


@pytest.mark.exhaustive
def test_every_code_point_has_the_ids_of_the_reference(
    gpt2: Tokenizer, reference: tiktoken.Encoding
) -> None:
    def characters(start: int, end: int) -> Iterator[str]:
        return (chr(code) for code in range(start, end) if not 0xD800 <= code < 0xE000)

    # Scripts and symbols one by one, with neighbours that show what kind the character is.
    assert_exact(gpt2, reference, [f" {c}s{c}{c}" for c in characters(0, 0x10000)])
    rest = "".join(characters(0x10000, 0x110000))
    assert_exact(gpt2, reference, [rest[i : i + 4096] for i in range(0, len(rest), 4096)])


@settings(max_examples=300)
@given(texts=st.lists(SPLIT_TEXTS | RUNS, max_size=4))
def test_hostile_texts_have_the_ids_of_the_reference(
    gpt2: Tokenizer, reference: tiktoken.Encoding, texts: list[str]
) -> None:
    assert_exact(gpt2, reference, texts)


@pytest.mark.exhaustive
def test_words_of_one_and_two_megabytes_have_the_ids_of_the_reference(
    gpt2: Tokenizer, reference: tiktoken.Encoding, novels: list[str]
) -> None:
    letters = "".join(filter(str.isalpha, "".join(novels[:900])))
    for n in (2**20, 2**21):  # the second is cut into windows
        word = letters[:n]
        assert len(word) == n
        assert gpt2.encode(word) == reference.encode_ordinary(word)


@settings(max_examples=300)
@given(text=SPLIT_TEXTS | RUNS, window=st.integers(30, 120), overlap=st.integers(20, 29))
def test_windows_have_the_ids_of_the_whole(
    gpt2: Tokenizer, reference: tiktoken.Encoding, text: str, window: int, overlap: int
) -> None:
    pieces = list(with_windows(gpt2, window, overlap).encode_long(text))
    assert np.concatenate(pieces).tolist() == reference.encode_ordinary(text)


@pytest.fixture(scope="module")
def without_contractions(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    words = "llama lava sad dad read vera mama veto resin "
    return load_tokenizer(train_tokenizer([words * 9], 280, folder))


@settings(max_examples=300)
@given(
    text=st.text("'l", max_size=9).map(lambda text: f"{text}'llama" * 20),
    window=st.integers(31, 60),
)
def test_no_window_begins_inside_a_contraction(
    without_contractions: Tokenizer, text: str, window: int
) -> None:
    # The contractions of this vocabulary are several tokens, so that a joint could lie in one.
    pieces = list(with_windows(without_contractions, window, 30).encode_long(text))
    assert np.concatenate(pieces).tolist() == without_contractions.encode(text)


def test_documents_long_and_short_keep_their_places(
    gpt2: Tokenizer,
    reference: tiktoken.Encoding,
    novels: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorten_windows(monkeypatch)
    monkeypatch.delattr(gpt2, "_windows", raising=False)
    short = [novels[1][i : i + 300] for i in range(0, 9000, 300)]
    texts = ["", novels[0][:30_000], "a", "", *short, novels[2][:2001], novels[3][:2000]]
    assert_exact(gpt2, reference, [*texts, "漢" * 2500, ""])
    monkeypatch.delattr(gpt2, "_windows")
    assert_exact(gpt2, reference, [])
    lone = r"text 1 holds the lone surrogate \\udc80 at character 2600"
    with pytest.raises(DataError, match=lone):
        gpt2.encode_batch(["fine", "a" * 2600 + "\udc80"])
