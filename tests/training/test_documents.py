"""Runs whose attention stays within documents, and runs with a z-loss."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from tests.training.conftest import lines_of, losses_of, start, with_fields

import trainyard
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.sidecar import load_sidecar, save_sidecar
from trainyard.errors import CheckpointError, ConfigError
from trainyard.training.run_folder import RunFiles, find_end_of_document

WITHIN = "model.attention_within_documents=true"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with token files `web`, of GPT-2's tokenizer, and their run file."""
    monkeypatch.chdir(tmp_path)
    texts = [f"the {animal} said: {animal}" for animal in ("cat", "dog", "cow", "owl")]
    Path("web.jsonl").write_text(
        "".join(f'{{"text": "{text}"}}\n' for text in texts * 30), encoding="utf-8"
    )
    trainyard.prepare("web.jsonl", "web", tokenizer="gpt2")
    return tmp_path


def run_of(*overrides: str) -> Run:
    return load_run("tiny", ["data.blend.prefixes=['web_text_document']", *overrides]).run


def name_end(run: Run) -> Run:
    return find_end_of_document(run, RunFiles(Path(), run))


def test_the_token_is_that_of_the_tokenizer_or_of_the_files(web: Path) -> None:
    assert name_end(run_of()).model.end_of_document_id is None
    for overrides in ([], ["tokenizer.path=gpt2"], ["model.end_of_document_id=50256"]):
        run = run_of(WITHIN, "model.vocabulary_size=50257", *overrides)
        assert name_end(run).model.end_of_document_id == 50256
    run = run_of(WITHIN, "model.vocabulary_size=50257", "model.end_of_document_id=3")
    with pytest.raises(ConfigError, match="different tokens: 3 by model, 50256 by web_text_docum"):
        name_end(run)
    prefix = web / "web_text_document"
    save_sidecar(msgspec.structs.replace(load_sidecar(prefix), append_eod=False), prefix)
    with pytest.raises(ConfigError, match="web_text_document have no last token that ends them"):
        name_end(run_of(WITHIN))
    prefix.with_suffix(".json").unlink()
    with pytest.raises(ConfigError, match="needs the token that ends a document, and") as error:
        name_end(run_of(WITHIN))
    assert error.value.hint.startswith("model.end_of_document_id=50256 for GPT-2's tokens")


def test_a_run_is_trained_evaluated_and_resumed(
    tiny_run: Run, finished: Path, tmp_path: Path
) -> None:
    within = {"attention_within_documents": True, "end_of_document_id": 5}
    run = with_fields(tiny_run, model=within)
    start(tmp_path / "within", run)
    for kind in ("train", "evaluate"):
        losses = losses_of(tmp_path / "within", kind)
        assert all(map(math.isfinite, losses)) and losses != losses_of(finished, kind)
    start(tmp_path / "halves", with_fields(run, train={"length": "5 steps"}))
    start(tmp_path / "halves", run)
    assert losses_of(tmp_path / "halves") == losses_of(tmp_path / "within")
    with pytest.raises(CheckpointError, match="weights were trained to see as many documents"):
        start(tmp_path / "halves", tiny_run)


def test_the_reported_loss_is_without_the_z_loss(
    tiny_run: Run, finished: Path, tmp_path: Path
) -> None:
    start(tmp_path, with_fields(tiny_run, train={"z_loss": 1.0}))
    plain, found = (lines_of(folder, "train") for folder in (finished, tmp_path))
    assert found[0]["loss"] == plain[0]["loss"]
    assert found[0]["gradient_norm"] > 1.5 * plain[0]["gradient_norm"]
    assert found[-1]["loss"] != plain[-1]["loss"]
    with pytest.raises(CheckpointError, match=r"train\.z_loss: 1\.0 in the checkpoint, now 0\.0"):
        start(tmp_path, tiny_run)
