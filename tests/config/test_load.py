from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.config.load import LoadedRun, all_fields, field_value, load_run, render_run
from trainyard.config.run import Run
from trainyard.config.schema import field_manuals
from trainyard.errors import ConfigError


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problem_of(source: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(source, list(overrides))
    assert caught.value.exit_code == 2
    return caught.value


# -- which value wins, and where it is said to come from


def test_preset_then_file_then_command_line(tmp_path: Path) -> None:
    text = 'extends = "tiny"\n[model]\nn_layers = 3\n[train]\nseed = 5\n'
    path = write(tmp_path, "run.toml", text)
    loaded = load_run(path, ["train.seed=6", "train.seed=7", "name=mine"])
    assert (loaded.run.model.d_model, loaded.run.model.n_layers) == (64, 3)
    assert (loaded.run.train.seed, loaded.run.name) == (7, "mine")
    assert loaded.run.guard.skipped_steps_limit == 10
    origins = loaded.origins
    assert origins["model.d_model"] == "tiny"
    assert origins["model.n_layers"] == path
    assert origins["train.seed"] == origins["name"] == "command line"
    assert "guard.skipped_steps_limit" not in origins


def test_a_run_that_has_begun_is_given_by_folder_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "tiny"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        write(folder, "run.toml", f'name = "{name}"\n[train]\nseed = 5\n')
    monkeypatch.chdir(tmp_path)
    for source in ("mine", "runs/mine", "runs/mine/", str(folder.parent / "mine")):
        assert load_run(source, ["train.length=7 steps"]).run.train.seed == 5
    assert load_run("tiny").run.train.seed == 1234  # a preset goes first
    assert load_run("runs/tiny").run.train.seed == 5


def test_extends_one_level_only(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", 'extends = "tiny"\n')
    child = write(tmp_path, "child.toml", 'extends = "base.toml"\n')
    assert "which itself extends tiny" in problem_of(child).problem
    path = write(tmp_path, "run.toml", 'extends = "gpt3-13"\n')
    assert "no preset named 'gpt3-13'" in problem_of(path).problem


def test_a_batch_ramp_can_be_taken_away(tmp_path: Path) -> None:
    path = write(tmp_path, "run.toml", 'extends = "gpt3-125m"\n[train]\nbatch_ramp = "none"\n')
    loaded = load_run(path)
    assert loaded.run.train.batch_ramp is None
    assert field_value(loaded.run, "train.batch_ramp.start") is None
    assert "train.batch_ramp.start" not in loaded.origins
    again = load_run(path, ["train.batch_ramp={start = 8, increment = 8, length = '1M tokens'}"])
    assert again.run.train.batch_ramp is not None
    assert again.run.train.batch_ramp.start == 8
    ramp = load_run("gpt3-125m", ["train.batch_ramp.start=32"]).run.train.batch_ramp
    assert ramp is not None
    assert (ramp.start, ramp.increment) == (32, 16)


# -- overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.clip_norm=inf", float("inf")),
        ("optimizer.betas=[0.8, 0.99]", (0.8, 0.99)),
        ("train.seed = 9", 9),
        ("model.vocabulary_size=50_304", 50304),
        ("log.tensorboard=false", False),
        ("name=a-b.c_1", "a-b.c_1"),
        ('name="2024"', "2024"),
        ("description=two words", "two words"),
        ("description=a=b", "a=b"),
        ("data.blend.prefixes=['x', 'y']", ("x", "y")),
        ('evaluate.sample_prompts=["a b", ""]', ("a b", "")),
        ("precision.kind=bf16", "bf16"),
    ],
)
def test_override_values_are_toml_or_plain_text(override: str, value: object) -> None:
    field = override.partition("=")[0].strip()
    run = load_run("tiny", [override]).run
    assert field_value(run, field) == value


@pytest.mark.parametrize("text", ["train.seed", "=3", "", " = 4", "model..n_layers=2"])
def test_override_without_field_or_value(text: str) -> None:
    error = problem_of("tiny", text)
    assert error.problem == f"{text!r} is not of the form section.field=value"


# -- files that cannot be read


@pytest.mark.parametrize(
    ("source", "problem", "hint"),
    [
        ("gpt3-175", "no preset named 'gpt3-175'", "did you mean the preset gpt3-175b?"),
        ("tinny.toml", "no run file tinny.toml", "did you mean the preset tiny?"),
        ("unlike.toml", "no run file unlike.toml", "trainyard show lists the presets"),
    ],
)
def test_no_such_run(source: str, problem: str, hint: str) -> None:
    error = problem_of(source)
    assert error.problem == problem and error.hint.startswith(hint)


def test_a_file_that_is_not_text_or_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for path in tmp_path.iterdir():
        assert problem_of(str(path)).problem.startswith(f"cannot read the run file {path}")


def test_broken_toml_names_file_and_place(tmp_path: Path) -> None:
    path = write(tmp_path, "run.toml", "[model]\nn_layers = twelve\n")
    error = problem_of(path)
    assert error.problem.startswith(f"{path} is not valid TOML")
    assert "line 2" in error.problem
    assert error.hint == 'texts need quotes: name = "my-run"'
    twice = problem_of(write(tmp_path, "twice.toml", "name = 'a'\nname = 'b'\n"))
    assert twice.hint == "give each field once"


# -- several problems, each with its place


def test_all_problems_at_once_with_where_each_came_from(tmp_path: Path) -> None:
    text = 'extends = "tiny"\n[model]\nn_layer = 3\n[train]\nseed = "x"\n'
    path = write(tmp_path, "run.toml", text)
    error = problem_of(path, "precision.kind=bf17")
    assert error.problem.splitlines() == [
        f"3 problems in the run {path}:",
        f"  model.n_layer: unknown field; did you mean 'model.n_layers'?  [{path}]",
        f"  train.seed: must be a valid integer (got 'x')  [{path}]",
        "  precision.kind: must be 'fp32', 'fp16', 'bf16', 'fp8' or 'fp8_lowbit' "
        "(got 'bf17'); did you mean 'bf16'?  [command line]",
    ]
    assert error.hint == "trainyard show --fields lists every field with its meaning"


def test_conflicts_name_the_origin_of_both_fields() -> None:
    error = problem_of("tiny", "parallel.tensor=3")
    heading, *lines = error.problem.splitlines()
    assert heading == "2 problems in the run tiny:"
    suggestion = "; nearest that works: parallel.tensor=2  [tiny, command line]"
    assert len(lines) == 2 and all(line.endswith(suggestion) for line in lines)


# -- misspelt keys


def test_nearly_all_typos_are_understood() -> None:
    """One letter is missing, in a section or a field."""
    fields = all_fields()
    tables = {field.rpartition(".")[0] for field in fields} - {""}
    understood = []
    for number, name in enumerate([*fields[::3], *sorted(tables)]):
        *parents, right = name.split(".")
        place = number % (len(right) - 1) + 1
        wrong = ".".join([*parents, right[:place] + right[place + 1 :]])
        problem = problem_of("tiny", f"{wrong}=1").problem
        assert f"{wrong}: unknown field; " in problem
        understood.append(f"did you mean '{name}'?" in problem)
    assert sum(understood) >= 0.95 * len(understood)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("seed=3", "did you mean 'train.seed'?"),
        ("train.learning_rate=3", "did you mean 'optimizer.learning_rate'?"),
        ("extnds=3", "did you mean 'extends'?"),
        ("model.xyzzyxyzzy=3", "known here: n_layers, d_model, n_heads"),
        ("precision.loss_scale.windoww=3", "did you mean 'precision.loss_scale.window'?"),
        ("extends=x", "top of a run file, not on the command line"),
    ],
)
def test_suggestions(override: str, suggestion: str) -> None:
    assert suggestion in problem_of("tiny", override).problem


# -- the text of a run


def test_a_rendered_run_has_every_field_and_reads_back(tmp_path: Path) -> None:
    overrides = ["model.positions=rotary", "model.rotary_scaling.factor=8.0"]
    overrides += [
        "model.end_of_document_id=50256",
        "model.base_d_expert=8",
        "train.stop_after_minutes=1.5",
    ]
    overrides += ["optimizer.clip_norm=inf", 'description="a\\"b\\nc é"']
    overrides += ["data.train={prefixes=['a', 'b'], weights=[1, 2.5]}"]
    run = load_run("gpt3-125m", [*overrides, "train.length=146_484_375 sequences"]).run
    text = render_run(run)
    for field in all_fields():
        assert f"{field.rpartition('.')[2]} = " in text, field
    assert load_run(write(tmp_path, "run.toml", text)).run == run


def test_every_field_has_a_manual_and_choices_are_listed() -> None:
    manual = field_manuals()
    assert len(manual) > 60
    assert all(len(text) > 9 for text in manual.values())
    assert manual["precision.kind"].endswith("One of fp32, fp16, bf16, fp8, fp8_lowbit.")
    assert "train.batch_ramp.start" in manual


def test_a_run_without_anything_is_the_default(tmp_path: Path) -> None:
    assert load_run(write(tmp_path, "run.toml", "")) == LoadedRun(Run(), {})


@pytest.mark.parametrize(
    "override", [r'data.blend.prefixes=["a", "b\u0000c"]', r'description="x\u0000"']
)
def test_a_nul_character_is_refused_in_any_text(override: str) -> None:
    """Every function of the operating system would refuse it, with no word of the field."""
    field = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{field}='.*' contains a NUL character"):
        load_run("tiny", [override])
