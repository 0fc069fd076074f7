"""Tests of the tokenizer: OpenAI's ids, both file layouts, every refusal."""

from __future__ import annotations

import bz2
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.families import FRAGMENTS, put, shorten_windows

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data import tokenizer as subject
from trainyard.data.tokenizer import Tokenizer, Windows, load_tokenizer
from trainyard.data.vocabulary import Vocabulary, byte_symbols, holds_tokenizer, load_vocabulary
from trainyard.errors import DataError, MachineError

EOT = "<|endoftext|>"
INJECTIONS = [EOT, f"a{EOT}b", f"{EOT}{EOT}", f" {EOT} \n{EOT}", "<|endoftext", f"x<|{EOT}|>"]


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(corpus(), 320, folder)
    return folder


@pytest.fixture(scope="module")
def trained(trained_folder: Path) -> Tokenizer:
    return load_tokenizer(trained_folder)


def corpus() -> list[str]:
    parts = product(("un", "re", "in"), ("do", "make", "count"), "abc")
    words = ["".join(word) for word in parts]
    return [" ".join(words), "The end, he said; it's 12 o'clock.\n\n", " ".join(reversed(words))]


def test_an_end_of_document_in_a_text_is_text_or_parsed_on_request(
    gpt2: Tokenizer, gpt2_folder: Path, reference: tiktoken.Encoding
) -> None:
    assert (gpt2.name, gpt2.vocabulary_size, gpt2.eod_id) == ("gpt2", 50257, 50256)
    parsing = load_tokenizer(gpt2_folder, "parse")
    for text in INJECTIONS:
        ids = gpt2.encode(text)
        assert ids == reference.encode_ordinary(text)
        assert gpt2.decode(ids) == text
        assert parsing.encode(text) == reference.encode(text, allowed_special="all")


@given(st.text() | st.text("undomake <|>endoftext'\n", max_size=40))
def test_a_trained_tokenizer_gives_every_text_back(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert trained.eod_id not in ids


def test_a_trained_tokenizer_is_the_same_every_time(trained_folder: Path, tmp_path: Path) -> None:
    path = train_tokenizer(corpus(), 320, tmp_path)
    assert path.read_bytes() == (trained_folder / "tokenizer.json").read_bytes()
    trained = load_tokenizer(tmp_path)
    assert (trained.vocabulary_size, trained.eod_id) == (320, 319)
    assert len(trained.encode("undoa remakeb")) <= 4


def test_a_folder_that_cannot_be_made_is_named_before_texts_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"file/folder: Not a directory"):
        train_tokenizer(iter(()), 300, tmp_path / "file" / "folder")


def read(folder: Path) -> Any:
    return json.loads((folder / "tokenizer.json").read_text("utf-8"))


def write_gpt2_layout(folder: Path, vocabulary: Vocabulary, prefix: str) -> list[Path]:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = ["#version: 0.2", *(f"{left} {right}" for left, right in vocabulary.merges), ""]
    texts = {"vocab.json": json.dumps(ids), "merges.txt": "\n".join(merges)}
    for name, text in texts.items():
        (folder / f"{prefix}{name}").write_text(text, "utf-8")
    return [folder / f"{prefix}{name}" for name in texts]


def test_both_layouts_have_one_fingerprint(trained_folder: Path, tmp_path: Path) -> None:
    fingerprint = load_vocabulary(trained_folder).fingerprint
    assert load_vocabulary(trained_folder / "tokenizer.json").fingerprint == fingerprint
    for prefix in ("gpt2-", ""):
        files = write_gpt2_layout(tmp_path, load_vocabulary(trained_folder), prefix)
        assert holds_tokenizer(tmp_path)
        for source in (tmp_path, *files):
            assert load_vocabulary(source).fingerprint == fingerprint
    # As the Hugging Face hub writes it: merges as strings, offsets trimmed or not.
    content = read(trained_folder)
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["pre_tokenizer"]["trim_offsets"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    assert load_vocabulary(tmp_path).fingerprint == fingerprint


def test_any_change_changes_the_fingerprint(trained_folder: Path, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(trained_folder)
    swapped = [vocabulary.merges[1], vocabulary.merges[0], *vocabulary.merges[2:]]
    changed = [
        replace(vocabulary, merges=swapped),
        replace(vocabulary, tokens=vocabulary.tokens[::-1]),
        replace(vocabulary, special_tokens={**vocabulary.special_tokens, "a": 3}),
        replace(vocabulary, split={**vocabulary.split, "use_regex": False}),
        replace(vocabulary, normalizer="NFC"),
        replace(vocabulary, ignore_merges=True),
        replace(vocabulary, end_of_document=EOT[:-1]),
    ]
    assert len({vocabulary.fingerprint, *(other.fingerprint for other in changed)}) == 8


def test_half_a_character_is_refused_and_decoded_with_a_mark(trained: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"text 1 holds the lone surrogate \\ud800 at character 2"):
        trained.encode_batch(["fine", "ab\ud800"])
    assert trained.decode(trained.encode("é")[:1]) == "\ufffd"
    for token_id in (-1, 320):
        with pytest.raises(DataError, match=rf"id {token_id} is outside the .* \(0 to 319"):
            trained.decode([5, token_id])


def test_the_known_answers_for_gpt2_are_those_of_the_reference(gpt2: Tokenizer) -> None:
    rules = gpt2.vocabulary.render_json(with_special_tokens=False)
    answers = subject.HuggingFaceEngine(rules).encode_batch(subject._tricky_texts())
    assert subject._digest_answers(rules, answers) == subject._GPT2_ANSWERS
    assert subject._digest_answers(rules + " ", answers) != subject._GPT2_ANSWERS


def test_an_engine_that_differs_is_not_used(
    trained_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = load_vocabulary(trained_folder)
    build = partial(subject.build_engine, vocabulary, "a", with_special_tokens=False)
    assert isinstance(build(), subject.GigatokenEngine)
    assert not caplog.text
    other = partial(subject.GigatokenEngine, vocabulary, with_special_tokens=True)
    monkeypatch.setattr(subject, "GigatokenEngine", lambda _, reference, **__: other(reference))
    assert isinstance(build(), subject.HuggingFaceEngine)
    assert "tokenizer a: the fast engine's ids differ" in caplog.text


def test_a_vocabulary_the_fast_engine_refuses_is_still_served(
    trained_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = read(trained_folder)
    odd = {"type": "Split", "pattern": {"Regex": "o|e"}, "behavior": "Isolated", "invert": False}
    byte_level = {**content["pre_tokenizer"], "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [odd, byte_level]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(tmp_path)
    assert "the fast engine" in caplog.text
    assert isinstance(tokenizer._engine, subject.HuggingFaceEngine)
    tokens, lengths = tokenizer.encode_batch(["redo the end", "", "x"])
    assert tokenizer.decode(tokens) == "redo the endx"
    assert lengths[1:].tolist() == [0, 1]
    # With this splitting rule nobody knows where a window may begin.
    monkeypatch.setattr(subject, "_LONG_CHARACTERS", 1000)
    long = "redo the end " * 100
    tokens, lengths = tokenizer.encode_batch(["x", long])
    assert lengths.tolist() == [1, len(tokens) - 1]
    assert tokenizer.decode(tokens[1:]) == long


def test_the_package_awkward_is_neither_imported_nor_hidden(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(trained._engine, subject.GigatokenEngine)
    monkeypatch.delitem(sys.modules, "awkward", raising=False)
    expected = trained.encode("undo the end")
    assert "awkward" not in sys.modules
    theirs = ModuleType("awkward")
    monkeypatch.setitem(sys.modules, "awkward", theirs)
    assert trained.encode("undo the end") == expected
    assert sys.modules["awkward"] is theirs
    with pytest.raises(DataError):
        trained.encode("\ud800")
    assert sys.modules["awkward"] is theirs


@pytest.mark.parametrize("is_renewed", [False, True])
def test_threads_encode_at_once(
    trained: Tokenizer, is_renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_renewed:  # before each text
        monkeypatch.setattr(subject.GigatokenEngine, "check_every_tokens", 0)
        monkeypatch.setattr(subject.GigatokenEngine, "cache_limit_bytes", -(2**60))
    text = "undo the end " * 20_000  # long enough for the threads to meet in the engine
    before = trained._engine._tokenizer  # type: ignore[attr-defined]
    expected = trained.encode_batch([text])[0].tolist()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(trained.encode_batch, [[text]] * 24))
    assert all(tokens.tolist() == expected for tokens, _ in found)
    assert not isinstance(sys.modules.get("awkward"), subject._Awkward)
    assert (trained._engine._tokenizer is before) is not is_renewed  # type: ignore[attr-defined]


MEASURE_MEMORY = """
import resource, sys
from pathlib import Path
from types import ModuleType
import numpy as np
from trainyard.data.tokenizer import load_tokenizer

tokenizer = load_tokenizer(Path(sys.argv[1]))
tokenizer.encode_batch(["a"])
letters = np.random.default_rng(0).integers(97, 123, 16 * 2**20, np.uint8)
letters[::10] = 32
text = letters.tobytes().decode() if sys.argv[2] == "words" else sys.argv[2] * 2**24
del letters
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens, lengths = tokenizer.encode_batch([text])
assert lengths.tolist() == [len(tokens)]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - tokens.nbytes)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
@pytest.mark.parametrize("text", ("\n", "a", "words"))
def test_memory_does_not_grow_with_the_document(gpt2_folder: Path, text: str) -> None:
    command = [sys.executable, "-c", MEASURE_MEMORY, str(gpt2_folder), text]
    added_bytes = int(subprocess.run(command, check=True, capture_output=True).stdout)
    assert added_bytes < 160 * 2**20  # 16 MiB of text


def test_too_little_text_or_too_few_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the text gives only 257 tokens, not 300") as caught:
        train_tokenizer(["a"], 300, tmp_path)
    assert "ask for 257 tokens or fewer" in caught.value.hint
    with pytest.raises(DataError, match="a vocabulary of 256 tokens is too small"):
        train_tokenizer(["a"], 256, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the tokenizer .*nowhere does not exist") as caught:
        load_vocabulary(tmp_path / "nowhere")
    assert "vocab.json and merges.txt" in caught.value.hint
    assert "gpt2 means GPT-2's, which ships with Trainyard" in caught.value.hint
    with pytest.raises(DataError, match=r"has no vocab.json"):
        load_vocabulary(tmp_path)
    (tmp_path / "gpt2-vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no gpt2-merges.txt"):
        load_vocabulary(tmp_path / "gpt2-vocab.json")


def _drop_end(content: Any) -> None:
    content["added_tokens"] = []
    del content["model"]["vocab"][EOT]


def _drop_bytes(content: Any) -> None:
    ids = content["model"]["vocab"]
    for byte, symbol in enumerate(byte_symbols()[:65]):
        ids["zz" * byte] = ids.pop(symbol)


BROKEN = [
    (put("added_tokens", value=[{"id": 3}]), "is malformed: KeyError 'content'"),
    (put("model", "vocab", "a", value="x"), "320 tokens have the ids 0 to 319"),
    (put("model", "vocab", "new", value=5000), "321 tokens have the ids 0 to 5000"),
    (put("model", "vocab", "new", value=5), "321 tokens have the ids 0 to 319"),
    (put("model", "vocab", "new", value=-1), "321 tokens have the ids -1 to 319"),
    (put("added_tokens", 0, "id", value=7), "has id 7, but Hugging Face's tokenizers gives it 319"),
    (put("model", "vocab", "漢", value=320), "the token '漢' (id 320) is not bytes"),
    (put("model", "merges", value=[7]), "is malformed: TypeError 'int' object is not"),
    (put("model", "merges", value=["a b c"]), "merge 0 is ('a', 'b', 'c'), not two tokens"),
    (put("model", "merges", value=["q q"]), "merge 0 'q' + 'q' needs the token 'qq', which is not"),
    (_drop_end, "one token must end a document; named are: none"),
    (_drop_bytes, "not a byte-level vocabulary: 65 bytes have no token, the first is byte 0"),
]


@pytest.mark.parametrize(("change", "problem"), BROKEN)
def test_a_wrong_tokenizer_is_refused(
    trained_folder: Path, tmp_path: Path, change: Callable[[Any], Any], problem: str
) -> None:
    content = read(trained_folder)
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(DataError) as caught:
        load_vocabulary(path)
    assert problem in caught.value.problem
    assert str(path) in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize("text", ["{", "[]", '"\xff"'])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        DataError, match=r"tokenizer.json (is not (valid JSON|a JSON object)|cannot be read)"
    ):
        load_vocabulary(tmp_path)


# -- OpenAI's ids of whole corpora and of hostile text

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
