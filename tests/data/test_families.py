"""Tests of the tokenizers of Llama 3, Qwen 2 and 3, SmolLM2 and OLMo 2, against `tokenizers`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import families
from tests.data.families import FRAGMENTS, TEXTS, assert_exact, build_content, load_reference
from tests.data.published import SMOLLM2, fetch_published
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from trainyard.data.tokenizer import GigatokenEngine, Tokenizer, Windows, load_tokenizer
from trainyard.data.vocabulary import load_vocabulary, save_vocabulary
from trainyard.errors import DataError

# Gigatoken's Unicode is newer than the reference's, and Python's is older than either.
KNOWN = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=3)
TEXT = st.lists(st.sampled_from(FRAGMENTS) | KNOWN, max_size=30).map("".join)
RUN = st.tuples(st.sampled_from(FRAGMENTS), st.integers(1, 70)).map(lambda run: run[0] * run[1])
HOSTILE = st.lists(TEXT | RUN, max_size=4).map("".join)


class Published(NamedTuple):
    """A family's folder, both ways to load it and Hugging Face's."""

    folder: Path
    text: Tokenizer
    parsing: Tokenizer
    text_reference: HuggingFaceTokenizer
    parsing_reference: HuggingFaceTokenizer


@pytest.fixture(scope="module", params=families.FAMILIES)
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    content = build_content(request.param)
    parent = tmp_path_factory.mktemp("families")
    folder = families.write_folder(parent / request.param, request.param, content)
    loaded = load_tokenizer(folder), load_tokenizer(folder, "parse")
    references = load_reference(content), load_reference(content, parse=True)
    return Published(folder, *loaded, *references)


def cut(tokenizer: Tokenizer, window: int, overlap: int) -> Windows:
    assert tokenizer._windows
    sizes = {"window_characters": window, "overlap_characters": overlap}
    return replace(tokenizer._windows, **sizes)


def test_words_have_the_ids_of_the_reference(published: Published) -> None:
    assert isinstance(published.text._engine, GigatokenEngine)
    assert isinstance(published.parsing._engine, GigatokenEngine)
    texts = ["", *FRAGMENTS, *TEXTS]
    texts += [first + second for first in FRAGMENTS for second in FRAGMENTS]
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
        pieces = list(cut(tokenizer, window, overlap).encode_long(text))
        assert np.concatenate(pieces).tolist() == tokenizer._engine.encode_batch([text])[0].tolist()


@pytest.mark.parametrize(
    "piece", ["a", "word ", "1", "12 ", "\n", " ", "=", "!\n", "'ll", "漢", "½"]
)
def test_a_long_run_has_the_ids_of_the_reference(
    published: Published, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    families.shorten_windows(monkeypatch)
    monkeypatch.delitem(vars(published.text), "_windows", raising=False)
    text = piece * (9000 // len(piece)) + "end"
    assert_exact(published.text, published.text_reference, ["", text, "a", f" {text}"])
    monkeypatch.delitem(vars(published.text), "_windows")


def test_windows_of_prose_are_short(published: Published) -> None:
    sizes: list[int] = []

    def encode(piece: str) -> Any:
        sizes.append(len(piece))
        return published.text._engine.encode_batch([piece])[0]

    windows = replace(cut(published.text, 400, 80), encode=encode)
    assert sum(map(len, windows.encode_long(TEXTS[0] * 100))) > 2000
    assert max(sizes) == 400


@given(data=st.data())
def test_any_ids_decode_as_by_the_reference(published: Published, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, published.text.vocabulary_size - 1), max_size=30))
    decoded = published.parsing_reference.decode(ids, skip_special_tokens=False)
    assert published.text.decode(ids) == decoded


def test_a_copy_is_the_same_tokenizer(published: Published, tmp_path: Path) -> None:
    save_vocabulary(published.text.vocabulary, tmp_path / "tokenizer.json")
    copy = load_vocabulary(tmp_path)
    assert copy == published.text.vocabulary
    assert copy.fingerprint == published.text.fingerprint
    assert copy.tokens[copy.eod_id] == families.ENDS[published.folder.name]
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
    tokenizer = load_tokenizer(families.write_folder(tmp_path, "llama3", content))
    assert tokenizer.decode(tokenizer.encode("STOP")) == "STOP"
    assert len(tokenizer.encode("STOP")) == 4
    assert len(load_tokenizer(tmp_path, "parse").encode("STOP")) == 1


# The files of chat models name the end of a turn: this one stands in for that of the base model.
BASE_CONFIG = {"eos_token": "<|endoftext|>"}


@pytest.fixture(scope="module")
def lines(shared_data: Path) -> list[str]:
    corpora = shared_data / "corpora"
    wikitext = (corpora / "wikitext2_valid.txt").read_text("utf-8").splitlines()[:2000]
    with (corpora / "novels.jsonl").open(encoding="utf-8") as novels:
        return [*wikitext, json.loads(next(novels))["text"][:200_000]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "n_ids"),
    [
        ("gpt2", 50_257),
        ("llama3", 128_256),
        ("llama3_1", 128_256),
        ("qwen2_5", 151_665),
        ("qwen3", 151_669),
        (SMOLLM2, 49_152),
        ("gpt35turbo", 100_277),
        ("gpt4o", 200_019),
        ("gptoss", 200_019),
        ("deepseek_v3", 128_815),
    ],
)
def test_a_published_tokenizer_has_the_ids_of_the_reference(
    tmp_path: Path,
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
    n_ids: int,
) -> None:
    folder = fetch_published(name)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    try:
        vocabulary = load_vocabulary(folder)
    except DataError as error:
        assert "one token must end a document" in error.problem
        assert name in ("qwen2_5", "qwen3", "gptoss")
        base = tmp_path / "base"
        base.mkdir()
        shutil.copy(folder / "tokenizer.json", base)
        (base / "tokenizer_config.json").write_text(json.dumps(BASE_CONFIG))
        folder, vocabulary = base, load_vocabulary(base)
    texts = [*lines, *FRAGMENTS, *(a + b for a in FRAGMENTS[::3] for b in FRAGMENTS)]
    texts += ["\x04a\x1d b\x06\x06", "\U000c0000 word\U0004ffff"]
    tokenizer, parsing = load_tokenizer(folder), load_tokenizer(folder, "parse")
    assert_exact(tokenizer, load_reference(content), texts)
    assert_exact(parsing, HuggingFaceTokenizer.from_str(json.dumps(content)), texts)
    assert isinstance(tokenizer._engine, GigatokenEngine)
    assert (tokenizer.vocabulary_size, caplog.messages) == (n_ids, [])
    assert len(vocabulary.missing_bytes) == (21 if name == SMOLLM2 else 0)
    assert tokenizer.count_lost_bytes("\x04a\x1d") == (2 if name == SMOLLM2 else 0)

    save_vocabulary(vocabulary, tmp_path / "tokenizer.json")
    copy = tmp_path / "tokenizer.json"
    assert load_vocabulary(copy).fingerprint == vocabulary.fingerprint
    assert_exact(parsing, HuggingFaceTokenizer.from_file(str(copy)), texts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama2", "gemma3", "claude"])
def test_other_published_tokenizers_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"is not a supported tokenizer: .*normalizer"):
        load_vocabulary(fetch_published(name))
