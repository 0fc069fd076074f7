"""A run that goes on beyond its length: what it computes, what it says, and what it keeps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.e2e.test_layouts import lines, losses, said, train, weights
from tests.faults.small_run import small_overrides, write_tokens

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import CheckpointError
from trainyard.training.run_folder import open_run, write_run_folder

N_STEPS, SEAM = 6, 3
TENSOR = ["parallel.tensor=2", "parallel.zero_stage=0"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def run_of(tokens: Path, n_steps: int, *overrides: str) -> Run:
    """A run of so many steps; its schedule is that of `N_STEPS`."""
    fields = [*small_overrides(tokens, N_STEPS), f"train.length={n_steps} steps"]
    return load_run("tiny", [*fields, f"checkpoint.interval={SEAM}", *overrides]).run


def require_same(one: Path, other: Path) -> None:
    """Weights, moments, and the losses of every step are equal to the last bit."""
    n_after = N_STEPS - SEAM
    assert losses(one)[-n_after:] == losses(other)[-n_after:]
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys() and len(found) > 20
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("n_ranks", "layout"),
    [(1, []), (2, []), pytest.param(2, TENSOR, marks=pytest.mark.exhaustive)],
)
def test_an_extended_run_equals_one_begun_with_its_length(
    tokens: Path, tmp_path: Path, n_ranks: int, layout: list[str]
) -> None:
    whole, extended = tmp_path / "whole", tmp_path / "extended"
    assert train(whole, run_of(tokens, N_STEPS, *layout), n_ranks) == [0] * n_ranks
    for n_steps in (SEAM, N_STEPS):
        assert train(extended, run_of(tokens, n_steps, *layout), n_ranks) == [0] * n_ranks
    assert [line["step"] for line in lines(extended, "start")] == [0, SEAM]
    require_same(whole, extended)


def test_it_may_go_on_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    whole, extended = tmp_path / "whole", tmp_path / "extended"
    assert train(whole, run_of(tokens, N_STEPS)) == [0]
    assert train(extended, run_of(tokens, SEAM)) == [0]
    shutil.rmtree(whole / "checkpoints" / f"step-{N_STEPS:08d}")  # as if it had been killed
    for folder in (whole, extended):
        assert train(folder, run_of(tokens, N_STEPS, *TENSOR), 2) == [0, 0]
    require_same(whole, extended)
    log = said(extended, 0)
    assert (
        "changed since the checkpoint: train.length: 3 steps in the checkpoint, now 6 steps" in log
    )
    assert (
        "the schedule is the same: learning rate 0.000868 now, 0.0001 at the end; "
        "the order of the training data is the same\n"
    ) in log
    (earlier,) = (extended / "history").iterdir()
    assert earlier.name == "until-00000003.toml"
    assert load_run(str(earlier)).run == run_of(tokens, SEAM)
    assert load_run(str(extended)).run == run_of(tokens, N_STEPS, *TENSOR)


def test_beyond_an_epoch_it_says_that_the_order_is_new(tokens: Path, tmp_path: Path) -> None:
    batch = "train.global_batch_size=64"
    assert train(tmp_path, run_of(tokens, SEAM, batch)) == [0]
    cache = tmp_path / "cache"
    more = [batch, "evaluate.interval=1", f"data.cache_folder={cache}"]
    assert train(tmp_path, run_of(tokens, 2 * N_STEPS, *more)) == [0]
    # The orders of train, valid and test; none of before.
    assert len(list(cache.glob("*document_index*"))) == 3
    assert (
        "; the training data needs more or fewer passes, so its order is new from here, as in "
        "Megatron-LM: some sequences repeat early, others come late\n"
    ) in said(tmp_path, 0)
    assert "from here on, the held-out loss uses other sequences\n" in said(tmp_path, 0)


def test_another_interval_of_evaluation_may_need_other_held_out_sequences(
    tokens: Path, tmp_path: Path
) -> None:
    evaluations = ["train.global_batch_size=64", "evaluate.interval=4"]
    assert train(tmp_path, run_of(tokens, N_STEPS, *evaluations)) == [0]
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{N_STEPS:08d}")
    evaluations[-1] = "evaluate.interval=1"
    assert train(tmp_path, run_of(tokens, N_STEPS, *evaluations)) == [0]
    assert "from here on, the held-out loss uses other sequences\n" in said(tmp_path, 0)


def test_it_ends_no_earlier_than_it_has_come(tokens: Path, tmp_path: Path) -> None:
    assert train(tmp_path, run_of(tokens, N_STEPS)) == [0]
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{N_STEPS:08d}")
    with pytest.raises(CheckpointError) as raised:
        write_run_folder(open_run(tmp_path, run=run_of(tokens, SEAM - 1)), "auto")
    assert raised.value.problem == (
        "the checkpoint of step 3 belongs to another run:\n"
        "  train.length='2 steps' ends at step 2, before the checkpoint's step 3"
    )
    assert not (tmp_path / "history").exists()
    assert train(tmp_path, run_of(tokens, SEAM + 1)) == [0]
    assert [line["step"] for line in lines(tmp_path, "end")] == [N_STEPS, SEAM + 1]
    write_run_folder(open_run(tmp_path, run=run_of(tokens, N_STEPS)), "overwrite")
    assert not (tmp_path / "history").exists()
