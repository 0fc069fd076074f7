from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.checkpoint.format import Manifest, StoredTokenizer
from trainyard.checkpoint.resume import FREE, Change, check_resumable, refusal_of, run_changes
from trainyard.config.load import all_fields, load_run
from trainyard.config.run import Run
from trainyard.errors import CheckpointError
from trainyard.layout.resolve import resolve

ROOT = Path(__file__).parents[2]


def _run(*overrides: str):
    return load_run("tiny", list(overrides)).run


def _manifest(step: int = 10, *overrides: str) -> Manifest:
    run = _run(*overrides).model_dump(mode="json")
    facts = {"consumed_sequences": 0, "consumed_tokens": 0, "data_fingerprint": "abc"}
    return Manifest(step=step, run=run, grids=(), files={}, **facts)


def test_every_field_is_either_free_or_refused_with_a_reason():
    """The list is in config/resume.toml; what trains another model is not free by mistake."""
    free = {field for field in all_fields() if not refusal_of(field)}
    sections = ("model.", "train.", "data.", "optimizer.", "schedule.", "precision.")
    assert {field for field in free if field.startswith(sections)} == {
        *("model.vocabulary_multiple", "data.cache_folder"),
        *(f"data.{name}.prefixes" for name in ("blend", "train", "valid", "test")),
        *(f"data.{name}.patterns" for name in ("blend", "train", "valid", "test")),
        *("train.length", "train.micro_batch_size", "train.stop_after_minutes", "train.compile"),
        *("train.deterministic", "precision.fp8.all_gather", "precision.fp8.emulate"),
    }


def test_changes_are_listed_with_both_values():
    saved = _run()
    assert run_changes(saved, saved) == []
    wanted = _run(
        "log.interval=5",
        "train.seed=7",
        "train.batch_ramp.start=4",
        "train.batch_ramp.increment=4",
        "train.batch_ramp.length=80 sequences",
    )
    changes = {change.field: change for change in run_changes(saved, wanted)}
    assert str(changes["log.interval"]) == "log.interval: 10 in the checkpoint, now 5"
    assert changes["log.interval"].refusal == ""
    assert str(changes["train.seed"]) == (
        "train.seed: 1234 in the checkpoint, now 7; it decides the data order and dropout"
    )
    assert str(changes["train.batch_ramp.length"]).startswith(
        "train.batch_ramp.length: absent in the checkpoint, now 80 sequences; "
    )


def resume(manifest: Manifest, wanted: Run, data: str, tokenizer: str) -> list[Change]:
    return check_resumable(manifest, wanted, resolve(wanted).n_steps, data, tokenizer)


def test_refused_changes_are_told_all_at_once():
    wanted = _run("train.length=9 steps", "model.dropout=0.0", "log.interval=5")
    with pytest.raises(CheckpointError) as raised:
        resume(_manifest(), wanted, "other", "")
    assert raised.value.problem == (
        "the checkpoint of step 10 was made with other settings:\n"
        "  model.dropout: 0.1 in the checkpoint, now 0.0; "
        "it fixes the weights' shapes and the dropout they were trained with\n"
        "  train.length='9 steps' ends at step 9, before the checkpoint's step 10\n"
        "  data: the token files have fingerprint 'abc' in the checkpoint, now 'other'"
    )
    assert "`trainyard train tiny` continues with those; " in raised.value.hint
    assert "train.start_from=tiny@10" in raised.value.hint


COMPLETE_P = "model.parametrization=complete_p"


@pytest.mark.parametrize("field", [COMPLETE_P, "model.base_d_model=64", "model.base_n_layers=1"])
@pytest.mark.parametrize("step", [0, 10])
def test_another_parametrization_is_refused(field: str, step: int):
    why = "; weights and learning rates were scaled by it"
    with pytest.raises(CheckpointError) as raised:
        resume(_manifest(step=step), _run(field), "abc", "")
    name, _, value = field.partition("=")
    (line,) = raised.value.problem.splitlines()[1:]
    assert line.startswith(f"  {name}: ") and line.endswith(f"now {value}{why}")


def test_the_page_lists_what_may_change():
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    assert not [name for name in FREE if f"`{name}`" not in page]


@pytest.mark.parametrize("n_steps", [10, 60])
def test_the_length_may_change_down_to_the_step_reached(n_steps: int):
    (change,) = resume(_manifest(), _run(f"train.length={n_steps} steps"), "abc", "")
    assert str(change) == f"train.length: 50 steps in the checkpoint, now {n_steps} steps"


def test_another_tokenizer_is_refused():
    tokenizer = StoredTokenizer(n_bytes=1, sha256="0" * 64, fingerprint="a" * 64)
    saved = _manifest().model_copy(update={"tokenizer": tokenizer})
    wanted = _run("tokenizer.path=moved")
    with pytest.raises(CheckpointError) as raised:
        resume(saved, wanted, "abc", "b" * 64)
    assert raised.value.problem.endswith(
        f"\n  tokenizer.path='moved': the tokenizer has fingerprint '{'a' * 64}' "
        f"in the checkpoint, now '{'b' * 64}'"
    )
    for manifest, fingerprint in ((saved, "a" * 64), (saved, ""), (_manifest(), "b" * 64)):
        assert len(resume(manifest, wanted, "abc", fingerprint)) == 1
    at_start = _manifest(step=0).model_copy(update={"tokenizer": tokenizer})
    assert len(resume(at_start, wanted, "abc", "b" * 64)) == 1


def test_before_the_first_step_only_the_shape_is_settled():
    wanted = _run("train.length=60 steps", "model.dropout=0.0", "optimizer.learning_rate=1e-2")
    assert len(resume(_manifest(step=0), wanted, "other", "")) == 3
    with pytest.raises(CheckpointError, match=r"model\.n_layers: 2 in the checkpoint, now 3"):
        resume(_manifest(step=0), _run("model.n_layers=3"), "abc", "")
