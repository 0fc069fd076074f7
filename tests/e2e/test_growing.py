"""Runs that grow: beyond their length, from another's weights, with another schedule or data.

The film of docs/growing.md is played, too.
"""

from __future__ import annotations

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from tests.command import trainyard as call
from tests.e2e.test_layouts import said, train
from tests.faults.small_run import small_overrides, write_tokens
from tests.training.conftest import lines_of, losses_of, require_same

from trainyard.api.running import convert_start
from trainyard.checkpoint.format import manifest_sha256, read_manifest
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import CheckpointError, ConfigError, UserError
from trainyard.export.huggingface import export_huggingface
from trainyard.layout.resolve import resolve
from trainyard.training.run_folder import ancestry, open_run, read_history, write_run_folder

SEAM, N_STEPS = 3, 6
TENSOR = ["parallel.tensor=2", "parallel.zero_stage=0"]
STEADY = ["schedule.kind='warmup_stable_decay'", "schedule.warmup=0 steps"]
STEADY += ["schedule.decay=90 steps", "schedule.cooldown=9 steps", "model.dropout=0"]
WITH_OPTIMIZER = "train.start_with=weights_and_optimizer"
PAGE = Path(__file__).parents[2] / "docs" / "growing.md"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def base(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps at one learning rate, with its checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    assert train(folder, steady(tokens, N_STEPS, "name=base")) == [0]
    return folder


def run_of(tokens: Path, n_steps: int, *overrides: str) -> Run:
    """A run of so many steps; its schedule is that of `N_STEPS`."""
    fields = [*small_overrides(tokens, N_STEPS), f"train.length={n_steps} steps"]
    return load_run("tiny", [*fields, f"checkpoint.interval={SEAM}", *overrides]).run


def steady(tokens: Path, n_steps: int, *overrides: str) -> Run:
    """The same at one learning rate."""
    return run_of(tokens, n_steps, *STEADY, *overrides)


@pytest.mark.parametrize(
    ("n_ranks", "layout"), [(1, []), pytest.param(2, TENSOR, marks=pytest.mark.exhaustive)]
)
def test_a_branch_with_everything_kept_is_the_run_itself(
    tokens: Path, base: Path, tmp_path: Path, n_ranks: int, layout: list[str]
) -> None:
    branch = tmp_path / "branch"
    start = [f"train.start_from={base}@{SEAM}", WITH_OPTIMIZER, "data.skip=3 steps", "name=branch"]
    run = steady(tokens, N_STEPS - SEAM, *start, *layout)
    assert train(branch, run, n_ranks) == [0] * n_ranks
    if n_ranks == 1:
        assert losses_of(branch) == losses_of(base)[SEAM:]
        require_same(base, branch)
    assert losses_of(branch) == pytest.approx(losses_of(base)[SEAM:], rel=1e-5)
    checkpoint = base / "checkpoints" / "step-00000003"
    (ancestor,) = ancestry(branch)
    assert (ancestor["run"], ancestor["step"]) == ("base", SEAM)
    assert ancestor["sha256"] == manifest_sha256(checkpoint)
    assert read_manifest(branch / "checkpoints" / "step-00000003").training["ancestors"] == [
        ancestor
    ]
    shown = call("show", str(branch), folder=tmp_path).stdout
    assert f"base@3 (weights and optimizer, {ancestor['sha256'][:12]})" in " ".join(shown.split())
    assert f"base@3 (weights and optimizer, {ancestor['sha256'][:12]})" in (
        call("status", str(branch), folder=tmp_path).stdout
    )


def test_a_branch_equals_the_same_file_from_the_same_weights(
    tokens: Path, base: Path, tmp_path: Path
) -> None:
    """The weights come once from a checkpoint, and once from its export to Hugging Face."""
    exported = tmp_path / "exported"
    export_huggingface(base / "checkpoints" / "step-00000003", exported)
    new = ["schedule.kind=linear", "train.seed=7", "model.dropout=0.1"]
    for name, start in (("ours", f"{base}@3"), ("theirs", str(exported))):
        run = steady(tokens, SEAM, f"train.start_from={start}", *new)
        convert_start(run, tmp_path / name)
        assert train(tmp_path / name, run) == [0]
    assert losses_of(tmp_path / "ours") == losses_of(tmp_path / "theirs")
    require_same(tmp_path / "ours", tmp_path / "theirs")
    assert ancestry(tmp_path / "theirs")[0]["run"] == "exported"
    assert 'data.skip="24 sequences" continues after those that base has read' in (
        said(tmp_path / "ours", 0)
    )


def test_it_resumes_without_its_ancestor_and_has_grandchildren(
    tokens: Path, base: Path, tmp_path: Path
) -> None:
    mother, child = tmp_path / "mother", tmp_path / "child"
    shutil.copytree(base, mother)
    whole = tmp_path / "whole"
    start = [f"train.start_from={mother}@3", WITH_OPTIMIZER]
    for folder, lengths in ((whole, [N_STEPS]), (child, [SEAM])):
        for n_steps in lengths:
            assert train(folder, steady(tokens, n_steps, "name=child", *start)) == [0]
    shutil.rmtree(mother)
    assert train(child, steady(tokens, N_STEPS, "name=child", *start)) == [0]
    require_same(whole, child)
    grandchild = steady(tokens, 1, f"train.start_from={child}")
    write_run_folder(open_run(tmp_path / "grandchild", run=grandchild), "auto")
    chain = ancestry(tmp_path / "grandchild")
    assert [(each["run"], each["step"]) for each in chain] == [("base", 3), ("child", 6)]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.start_from=none-such"], "train.start_from='none-such': no folder none-such or"),
        (["train.start_from=BASE@4"], "has no checkpoint of step 4"),
        (["train.start_from=BASE@x"], "has no checkpoint of step x"),
        (
            ["train.start_from=BASE", "model.n_layers=3", "model.d_ff=128"],
            "is a model of another shape:\n  model.n_layers: 2 in the checkpoint, now 3; it fixes "
            "the weights' shapes and the dropout they were trained with\n  model.d_ff: 64 in",
        ),
        (
            ["train.start_from=BASE", WITH_OPTIMIZER, "precision.kind=fp8_lowbit"],
            "precision.kind='fp8_lowbit' stores other optimizer state than 'fp32'",
        ),
        (
            ["train.start_from=BASE", WITH_OPTIMIZER, "optimizer.kind=muon"],
            "optimizer.kind='muon' stores other optimizer state than 'adamw' of ",
        ),
        ([WITH_OPTIMIZER], "train.start_with='weights_and_optimizer' without train.start_from"),
        (["data.from_step=2"], "data.from_step=2, but the run has no checkpoint"),
        (["data.from_step=6"], "data.from_step=6, but train.length ends at step 6"),
        (["train.start_from=HERE"], "the folder of this run"),
    ],
)
def test_a_start_that_cannot_be_is_refused(
    tokens: Path, base: Path, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    places = [text.replace("BASE", str(base)).replace("HERE", str(folder)) for text in overrides]
    lowbit = (
        ["precision.fp8.emulate=true", "precision.fp8.precise_blocks=0"]
        if "fp8" in str(overrides)
        else []
    )
    with pytest.raises(UserError) as raised:
        run = steady(tokens, N_STEPS, *places, *lowbit)
        resolve(run)
        write_run_folder(open_run(folder, run=run), "overwrite")
    assert problem in raised.value.problem
    assert not list(folder.iterdir())


def test_imported_weights_have_no_optimizer_and_no_second_start(
    tokens: Path, base: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    export_huggingface(base / "checkpoints" / "step-00000003", exported)
    run = steady(tokens, SEAM, f"train.start_from={exported}", WITH_OPTIMIZER)
    convert_start(run, tmp_path / "new")
    with pytest.raises(CheckpointError, match="has weights alone"):
        write_run_folder(open_run(tmp_path / "new", run=run), "auto")
    (tmp_path / "new" / "start" / "checkpoints").rename(tmp_path / "new" / "checkpoints")
    with pytest.raises(CheckpointError, match="has imported weights of its own"):
        write_run_folder(
            open_run(tmp_path / "new", run=steady(tokens, SEAM, f"train.start_from={base}")), "auto"
        )


def test_the_schedule_changes_only_where_the_rate_is_continuous(
    tokens: Path, base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    cooldown = ["schedule.decay=10 steps", "schedule.cooldown=4 steps", "name=base"]
    with pytest.raises(CheckpointError) as raised:
        write_run_folder(
            open_run(folder, run=steady(tokens, 10, *cooldown, "schedule.kind=cosine")), "auto"
        )
    assert "learning rate at step 6: 0.001 in the checkpoint, now 0.000" in raised.value.problem
    assert train(folder, steady(tokens, 10, *cooldown)) == [0]
    rates = [line["learning_rate"] for line in lines_of(folder, "train")][-5:]
    assert rates == pytest.approx([0.001, 0.000775, 0.00055, 0.000325, 0.0001])
    assert "the schedule is new: learning rate 0.001 now, 0.0001 at the end" in said(folder, 0)
    ((step, changes),) = read_history(folder)
    assert step == N_STEPS
    assert {each.field for each in changes} == {
        *("train.length", "schedule.decay", "schedule.cooldown")
    }
    shown = " ".join(call("show", str(folder), folder=tmp_path).stdout.split())
    assert "train.length: 10 steps, before 6 steps" in shown


@pytest.mark.parametrize(("skip", "first"), [("0 steps", 0), ("6 steps", 48)])
def test_data_changes_from_a_step_on(
    tokens: Path, base: Path, tmp_path: Path, skip: str, first: int
) -> None:
    """It equals a branch with the same data; resumed halfway, it is the same."""
    folder, branch, halves = tmp_path / "base", tmp_path / "branch", tmp_path / "halves"
    for copy in (folder, halves):
        shutil.copytree(base, copy)
    (tmp_path / "new").mkdir()
    new = write_tokens(tmp_path / "new", seed=8)
    data = [f"data.blend.prefixes=['{new}']", f"data.skip={skip}"]
    with pytest.raises(CheckpointError) as raised:
        write_run_folder(open_run(folder, run=steady(tokens, 12, "name=base", *data)), "auto")
    assert "data.from_step=6 changes the data from here on" in str(raised.value.hint)
    with pytest.raises(CheckpointError, match=r"data\.from_step: 0 in the checkpoint, now 5"):
        write_run_folder(
            open_run(folder, run=steady(tokens, 12, *data, "data.from_step=5")), "auto"
        )
    data.append(f"data.from_step={N_STEPS}")
    assert train(folder, steady(tokens, 12, "name=base", *data)) == [0]
    assert f"the data is new from here, from sequence {first}" in said(folder, 0)
    start = [f"train.start_from={base}", WITH_OPTIMIZER, *data[:2]]
    assert train(branch, steady(tokens, N_STEPS, *start)) == [0]
    assert losses_of(branch) == losses_of(folder)[N_STEPS:]
    require_same(branch, folder)
    for n_steps in (9, 12):
        assert train(halves, steady(tokens, n_steps, "name=base", *data)) == [0]
    require_same(folder, halves)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        write_run_folder(open_run(tmp_path / "none", run=steady(tokens, 12, *data)), "auto")


def require_same_since(step: int, one: Path, other: Path) -> None:
    """Weights, moments, and the losses of every later step are equal to the last bit."""
    assert losses_of(one)[step - N_STEPS :] == losses_of(other)[step - N_STEPS :]
    require_same(one, other)


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
    assert [line["step"] for line in lines_of(extended, "start")] == [0, SEAM]
    require_same_since(SEAM, whole, extended)


def test_it_may_go_on_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    whole, extended = tmp_path / "whole", tmp_path / "extended"
    assert train(whole, run_of(tokens, N_STEPS)) == [0]
    assert train(extended, run_of(tokens, SEAM)) == [0]
    shutil.rmtree(whole / "checkpoints" / f"step-{N_STEPS:08d}")  # as if it had been killed
    for folder in (whole, extended):
        assert train(folder, run_of(tokens, N_STEPS, *TENSOR), 2) == [0, 0]
    require_same_since(SEAM, whole, extended)
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


def test_it_ends_no_earlier_than_it_has_come(tokens: Path, tmp_path: Path) -> None:
    assert train(tmp_path, run_of(tokens, N_STEPS)) == [0]
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{N_STEPS:08d}")
    with pytest.raises(CheckpointError) as raised:
        write_run_folder(open_run(tmp_path, run=run_of(tokens, SEAM - 1)), "auto")
    assert raised.value.problem == (
        "the checkpoint of step 3 was made with other settings:\n"
        "  train.length='2 steps' ends at step 2, before the checkpoint's step 3"
    )
    assert not (tmp_path / "history").exists()
    assert train(tmp_path, run_of(tokens, SEAM + 1)) == [0]
    assert [line["step"] for line in lines_of(tmp_path, "end")] == [N_STEPS, SEAM + 1]
    write_run_folder(open_run(tmp_path, run=run_of(tokens, N_STEPS)), "overwrite")
    assert not (tmp_path / "history").exists()


def losses(folder: Path) -> dict[int, float]:
    """Means of 20 steps, by the last of them."""
    return {line["step"]: line["loss"] for line in lines_of(folder, "train")}


@pytest.mark.exhaustive
def test_the_film_plays_and_its_losses_are_continuous(tmp_path: Path) -> None:
    film = PAGE.read_text(encoding="utf-8").partition("## A run that grew\n")[2]
    (run_file,) = re.findall(r"^```toml\n(.*?)^```", film, re.MULTILINE | re.DOTALL)
    (tmp_path / "base.toml").write_text(run_file)
    (tmp_path / "data").mkdir()
    for name, seed in (("old", 7), ("new", 8)):
        prefix = write_tokens(tmp_path / "data", seed, n_documents=1500)
        for path in tmp_path.glob(f"data/{prefix.name}.*"):
            path.rename(path.with_stem(name))
    said = {}
    lines = re.findall(r"^\$ trainyard (.*)$", film, re.MULTILINE)
    assert len(lines) == 8
    for line in lines:
        done = call(*shlex.split(line), folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        said[line.split()[0]] = " ".join(done.stdout.split())
    assert (tmp_path / "compare.html").exists()
    assert "from step 200 train.length: 300 steps, before 200 steps" in said["show"]
    assert "data.from_step: 300, before 0" in said["show"]
    assert "schedule.decay: 500 steps" in said["show"]
    assert "base@200 (weights and optimizer, " in said["status"]
    base, decay = (losses(tmp_path / "runs" / name) for name in ("base", "decay"))
    late = [loss for step, loss in base.items() if step >= 100]
    usual = max(abs(after - before) for before, after in pairwise(late))
    seams = [(base[step - 20], base[step], base[step + 20]) for step in (200, 300, 400)]
    for earlier, before, after in [*seams, (base[180], base[200], decay[20])]:
        assert abs(after - before) <= 2 * usual
        assert after < earlier + usual
