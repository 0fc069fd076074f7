"""GPT-2's tokenizer as it ships: OpenAI's ids, and what the name "gpt2" means."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

import trainyard.data
from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.prepare import prepare, train_on_inputs
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import DataError

FOLDER = Path(trainyard.data.__file__).parent / "gpt2"
ROOT = Path(__file__).parents[2]
# Of vocab.json and merges.txt as OpenAI published them.
FINGERPRINT = "a067685b47761341be45d012e64d1d9dad2fbb52cf30333dfc88a4c61e73e1c3"
TOKENS_SHA256 = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_id_is_that_of_the_pinned_checksum() -> None:
    vocabulary = load_vocabulary("gpt2")
    assert len(vocabulary.tokens) == 50257
    assert vocabulary.special_tokens == {"<|endoftext|>": 50256}
    digest = hashlib.sha256("\n".join(vocabulary.tokens).encode()).hexdigest()
    assert (digest, vocabulary.fingerprint) == (TOKENS_SHA256, FINGERPRINT)


def test_its_files_are_package_data_with_their_licence() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "data/gpt2/*" in settings["tool"]["setuptools"]["package-data"]["trainyard"]
    licence = (FOLDER / "LICENSE").read_text(encoding="utf-8")
    assert licence.startswith("Modified MIT License\n\nSoftware Copyright (c) 2019 OpenAI\n")
    assert str((FOLDER / "LICENSE").relative_to(ROOT)) in settings["project"]["license-files"]
    assert (FOLDER / "merges.txt.xz").stat().st_size < 190_000


def test_a_folder_of_that_name_is_not_passed_over(working_folder: Path) -> None:
    other = load_vocabulary(train_tokenizer(["some words"], 260, Path("gpt2")))
    with pytest.raises(DataError, match="the folder gpt2 here holds a different one") as caught:
        load_vocabulary("gpt2")
    assert "write ./gpt2 to use the folder" in caught.value.hint
    for name in ("./gpt2", "gpt2/", "gpt2/tokenizer.json", Path("gpt2"), working_folder / "gpt2"):
        assert load_vocabulary(name).fingerprint == other.fingerprint


def test_a_folder_of_that_name_with_the_same_tokenizer_or_none_is_no_matter() -> None:
    Path("gpt2").mkdir()
    Path("gpt2/config.json").write_text("{}")
    shipped = load_vocabulary("gpt2")
    Path("gpt2/tokenizer.json").write_text(shipped.render_json(), encoding="utf-8")
    assert load_vocabulary("gpt2").fingerprint == load_vocabulary("./gpt2").fingerprint


def test_text_is_prepared_with_it_and_it_is_not_trained_anew() -> None:
    Path("a.jsonl").write_text('{"text": " hello world"}\n')
    corpus = Corpus(inputs=("a.jsonl",), output="web", tokenizer="gpt2")
    (sidecar,) = prepare(corpus, workers=2)
    assert (sidecar.tokenizer.name, sidecar.tokenizer.fingerprint) == ("gpt2", FINGERPRINT)
    assert Path("web_text_document.bin").read_bytes().hex() == "c45ce30350c4"
    with pytest.raises(DataError, match="gpt2 ships with Trainyard and cannot be trained"):
        train_on_inputs(corpus, 257, overwrite=True)
    assert not Path("gpt2").exists()
