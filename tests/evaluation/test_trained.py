from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from tests.evaluation.lm_eval_scores import save_random
from typer.testing import CliRunner, Result

from trainyard.cli.evaluate import evaluate
from trainyard.cli.generate import generate, stream_text
from trainyard.config.load import load_run
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.indexed import IndexedWriter
from trainyard.data.loader import build_orders
from trainyard.data.tokenizer import Tokenizer, load_tokenizer
from trainyard.errors import CheckpointError, ConfigError, DataError
from trainyard.evaluation import trained as subject
from trainyard.evaluation.loss import count_bytes, unigram_loss
from trainyard.evaluation.trained import count_training_tokens, read_documents, read_trained_run
from trainyard.layout.resolve import resolve

TEXT = "It was a dark and stormy night, and the café 漢 was closed; it was late. " * 3


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # orders of the data are kept in runs/cache


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(train_tokenizer([TEXT], 280, folder))


@pytest.fixture(scope="module")
def run_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model in a run folder, on token files of the text."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    prefix = folder.parent / "corpus"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for number in range(60):
            ids = [*tokenizer.encode(TEXT[number:]), tokenizer.eod_id]
            writer.add_document(np.array(ids, np.uint16))
    path = train_tokenizer([TEXT], 280, folder.parent / "tokenizer").parent
    save_untrained(folder, f"data.blend.prefixes=['{prefix}']", f"tokenizer.path='{path}'")
    return folder


def save_untrained(folder: Path, *overrides: str, scale: float = 1.0) -> None:
    """Saves a model that has learnt nothing as the checkpoint of step 7."""
    small = ["model.d_model=16", "model.d_ff=32", "model.vocabulary_size=280"]
    small += ["data.split='80,0,20'", "evaluate.batches=1"]
    cache = f"data.cache_folder='{folder.parent / 'cache'}'"
    run = load_run("tiny", [*small, cache, *overrides]).run
    save_random(run, folder, step=7, seed=1, scales={"": scale})


def call(verb: object, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(verb)  # type: ignore[type-var]
    return CliRunner().invoke(app, list(arguments))


def test_a_run_folder_and_its_checkpoint_give_the_same_model(run_folder: Path) -> None:
    from_run = read_trained_run(run_folder)
    from_checkpoint = read_trained_run(from_run.checkpoint)
    assert from_run.checkpoint.name == "step-00000007"
    models = [trained.load_model() for trained in (from_run, from_checkpoint)]
    tokens = torch.arange(20)[None].to(models[0].head_weight.device)
    assert torch.equal(*(model(tokens) for model in models))
    assert from_run.require_tokenizer().vocabulary_size == 280


def test_documents_of_token_files_and_of_a_text_file(
    run_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prefix = str(run_folder.parent / "corpus")
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        documents = list(read_documents(name, None))
        assert len(documents) == 60
        assert tokenizer.decode(documents[3][:-1].tolist()) == TEXT[3:]
    path = tmp_path / "book.txt"
    path.write_text(f"\ufeff{TEXT}", encoding="utf-8")  # as `prepare`, without a byte-order mark
    (document,) = read_documents(str(path), tokenizer)
    assert tokenizer.decode(document.tolist()) == TEXT


def test_a_sequence_that_cuts_characters_counts_their_bytes_within_it(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode("añ中"))
    assert len(ids) == 6, "a token for each byte"
    counted = [count_bytes(ids[first:end], tokenizer) for first, end in ((0, 2), (2, 5), (5, 6))]
    assert counted == [2, 3, 1]


def test_held_out_text_that_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9!")
    (tmp_path / "book.txt").write_text("plain")
    for name, reader, problem in (
        ("none.txt", tokenizer, "cannot read none.txt: No such file"),
        ("latin.txt", tokenizer, "latin.txt is not UTF-8 text: byte 3 is 0xe9"),
        ("a.JSON", tokenizer, "a.JSON is JSON.* plain text"),
        ("web.jsonl", tokenizer, "web.jsonl is JSON.* plain text"),
        ("book.txt", None, "book.txt is text, and the run names no tokenizer"),
    ):
        with pytest.raises(DataError, match=problem):
            read_documents(name, reader)


def test_evaluating_the_test_split_keeps_the_result(run_folder: Path) -> None:
    result = call(evaluate, str(run_folder))
    assert result.exit_code == 0, result.output
    found = json.loads((run_folder / "evaluation.json").read_text())
    assert found["n_tokens"] == 8 * 64  # one global batch
    assert found["loss"] == pytest.approx(math.log(280), abs=0.2)  # nothing learnt yet
    bits = found["loss"] * found["n_tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / found["n_bytes"])
    assert f"loss          {found['loss']:.4f} nats per token" in result.output
    assert f"unigram loss  {found['unigram_loss']:.4f}" in result.output
    assert 0 < found["unigram_loss"] < found["loss"]


def test_weights_that_are_not_finite_give_no_result(run_folder: Path, tmp_path: Path) -> None:
    corpus = f"data.blend.prefixes=['{run_folder.parent / 'corpus'}']"
    theirs = f"data.cache_folder='{tmp_path / 'theirs'}'"
    save_untrained(tmp_path / "run", corpus, theirs, scale=math.nan)
    result = call(evaluate, "run", "--json")
    assert result.stdout == ""
    assert isinstance(result.exception, CheckpointError)
    assert "step-00000007 on its test split is nan" in result.exception.problem
    assert not Path("run/evaluation.json").exists()
    assert not (tmp_path / "theirs").exists()


def test_evaluating_a_text_prints_exact_bits_per_byte(
    run_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    checkpoint = str(read_trained_run(run_folder).checkpoint)
    found = json.loads(call(evaluate, checkpoint, "--data", str(path), "--json").stdout)
    ids = tokenizer.encode(TEXT)
    assert (found["n_tokens"], found["n_bytes"]) == (len(ids), len(TEXT.encode()))
    run = read_trained_run(run_folder).run
    order = build_orders(run, resolve(run))["train"]
    assert order is not None
    counts = count_training_tokens(order, 280)
    expected = np.bincount(order.sequences(0, len(order))[:, 1:].ravel(), minlength=280)
    assert counts.tolist() == expected.tolist()
    unigram = unigram_loss(counts, np.bincount(ids, minlength=280))
    assert found["unigram_loss"] == pytest.approx(unigram)


def test_a_run_without_a_test_split_needs_data(run_folder: Path, tmp_path: Path) -> None:
    prefix = run_folder.parent / "corpus"
    save_untrained(tmp_path / "run", f"data.blend.prefixes=['{prefix}']", "data.split='100,0,0'")
    error = call(evaluate, str(tmp_path / "run")).exception
    assert isinstance(error, ConfigError)
    assert "the run has no test split: data.split='100,0,0'" in error.problem


def test_a_text_can_be_evaluated_where_the_training_data_is_not(
    run_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    save_untrained(folder, "data.blend.prefixes=['moved-away']")
    data = str(run_folder.parent / "corpus")
    result = call(evaluate, str(folder), "--data", data, "--json")
    found = json.loads(result.stdout)
    assert found["unigram_loss"] is None
    assert found["bits_per_byte"] is None  # this run names no tokenizer
    assert json.loads((folder / "evaluation.json").read_text()) == found
    assert isinstance(call(evaluate, str(folder)).exception, DataError)


def test_generated_text_continues_the_prompt_the_same_each_time(run_folder: Path) -> None:
    arguments = (str(run_folder), "--prompt", "It was", "--tokens", "12")
    first = call(generate, *arguments)
    assert first.exit_code == 0, first.output
    assert first.output.startswith("It was")
    assert call(generate, *arguments).output == first.output
    assert call(generate, *arguments, "--seed", "1").output != first.output
    two = call(generate, *arguments, "--samples", "2").output
    assert "--- sample 2 of 2\nIt was" in two
    trained = read_trained_run(run_folder)
    without = subject.TrainedRun(trained.checkpoint, trained.run, None)
    with pytest.raises(ConfigError, match=r"has no tokenizer.path, so it cannot read text"):
        without.require_tokenizer()


def test_streamed_text_waits_for_whole_characters(tokenizer: Tokenizer) -> None:
    text = "a 漢字 \U0001f600."
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # characters are cut into several tokens
    pieces = list(stream_text([*ids, tokenizer.eod_id, 5], tokenizer.decode, tokenizer.eod_id))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces[:-1])
    assert pieces[0] == "a"
    cut_short = tokenizer.encode("a字")[:-1]
    assert "".join(stream_text(cut_short, tokenizer.decode, tokenizer.eod_id)) == "a\ufffd"
