"""Tests that published tokenizers are read, with the ids of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.data.families import FRAGMENTS, assert_exact, load_reference
from tests.data.published import SMOLLM2, fetch_published
from tokenizers import Tokenizer as HuggingFaceTokenizer

from trainyard.data.tokenizer import GigatokenEngine, load_tokenizer
from trainyard.data.vocabulary import load_vocabulary, save_vocabulary
from trainyard.errors import DataError

pytestmark = pytest.mark.exhaustive
# The files of chat models name the end of a turn: this one stands in for that of the base model.
BASE_CONFIG = {"eos_token": "<|endoftext|>"}


@pytest.fixture(scope="module")
def lines(shared_data: Path) -> list[str]:
    corpora = shared_data / "corpora"
    wikitext = (corpora / "wikitext2_valid.txt").read_text("utf-8").splitlines()[:2000]
    with (corpora / "novels.jsonl").open(encoding="utf-8") as novels:
        return [*wikitext, json.loads(next(novels))["text"][:200_000]]


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
        assert "several tokens may end a document" in error.problem
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


@pytest.mark.parametrize("name", ["llama2", "gemma3", "claude"])
def test_other_published_tokenizers_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"is not a supported tokenizer: .*normalizer"):
        load_vocabulary(fetch_published(name))
