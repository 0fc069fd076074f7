from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from trainyard.architecture import parameter_count
from trainyard.cli.show_run import render_run_summary
from trainyard.config.corpus import load_corpus, output_prefixes
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.patterns import find_token_files
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import resolve

FOLDER = Path(__file__).parents[2] / "recipes"
FILES = sorted(FOLDER.glob("*/*.toml"))


def recipe(name: str) -> Run:
    return load_run(str(FOLDER / f"{name}.toml")).run


def test_every_recipe_loads_resolves_and_counts() -> None:
    names = set()
    for path in FILES:
        loaded = load_run(str(path))
        run = loaded.run
        count = parameter_count(run.model, resolve(run).padded_vocabulary_size)
        assert f"parameters {count:,} (" in render_run_summary(loaded).plain, path
        assert run.data.blend.prefixes or run.data.train.prefixes, path
        if run.precision.kind == "fp16":
            assert "precision.loss_scale.initial" in loaded.origins, path
        names.add(run.name)
    assert len(names) == len(FILES), "names differ"


def test_every_guide_has_a_folder_that_names_its_recipes() -> None:
    folders = {path.parent for path in FILES}
    assert {folder.name for folder in folders} == {
        "msamp", "polaris", "azure", "lumi", "benchmark64", "laptop"
    }  # fmt: skip
    for folder in folders:
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "## What runs today" in text
        for path in folder.glob("*.toml"):
            assert path.name in text


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_lowbit"])
def test_msamp_megatron_columns(kind: str) -> None:
    stem = kind.replace("_", "-")
    small, middle, large = (recipe(f"msamp/{size}-{stem}") for size in ("345m", "6.7b", "13b"))
    assert all(run.precision.kind == kind for run in (small, middle, large))
    assert (small.train.micro_batch_size, small.train.global_batch_size) == (8, 64)
    assert resolve(small).n_tokens == 500_000 * 64 * 1024
    assert (middle.train.micro_batch_size, middle.train.global_batch_size) == (1, 2048)
    assert (large.train.micro_batch_size, large.train.global_batch_size) == (1, 1280)
    assert (large.parallel.tensor, large.parallel.sequence) == (2, True)
    assert (middle.train.seed, middle.model.dropout, middle.model.init_std) == (43, 0, 0.0099)
    assert (small.evaluate.batches, middle.evaluate.interval, large.checkpoint.interval) == (
        10, 500, 2000
    )  # fmt: skip


def test_msamp_deepspeed_columns() -> None:
    # 0 in the guide for both; on its one GPU that is the same.
    for stem, zero_stage in (("fp16", 0), ("fp8-lowbit", 1)):
        run = recipe(f"msamp/345m-deepspeed-{stem}")
        assert (run.train.micro_batch_size, run.train.global_batch_size) == (4, 8)
        assert (run.parallel.zero_stage, run.checkpoint.interval) == (zero_stage, 10_000)
    for stem in ("bf16", "fp8-lowbit"):
        run = recipe(f"msamp/13b-deepspeed-{stem}")
        assert run.train.micro_batch_size == 4
        assert (run.parallel.tensor, run.parallel.sequence) == (2, False)
        assert (run.parallel.recompute, run.parallel.zero_stage) == ("block", 1)


def test_polaris_jobs() -> None:
    example, default = recipe("polaris/gpt25b"), recipe("polaris/gpt13b")
    assert (example.model.sequence_length, default.model.sequence_length) == (4096, 2048)
    for run in (example, default):
        assert run.train.global_batch_size > 1
        assert run.precision.loss_scale.initial == 2**12
        assert (run.parallel.zero_stage, run.parallel.recompute) == (1, "block")
        assert str(run.train.length) != "10 steps"


def test_azure_files_follow_the_presets_and_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/slimpajama").mkdir(parents=True)
    for number in range(72):
        (tmp_path / f"data/slimpajama/train_chunk_{number:02}_text_document.bin").touch()
    # Two presets have the guide's names for them.
    keys = {"356m": "857m", "64m": "375m"}
    for size in ("175b", "30b", "13b", "1.3b", "356m", "64m", "125m"):
        run, preset = recipe(f"azure/{size}"), load_run(f"azure-{keys.get(size, size)}").run
        assert run.name == f"azure-{size}"
        for section in ("model", "train", "optimizer", "schedule", "checkpoint", "evaluate", "log"):
            assert getattr(run, section) == getattr(preset, section), (size, section)
        data = find_token_files(run).data
        lists = [data.train.prefixes, data.test.prefixes, data.valid.prefixes]
        assert [len(prefixes) for prefixes in lists] == [42, 15, 15]
        numbers = [name[len("data/slimpajama/train_chunk_") :][:2] for p in lists for name in p]
        assert numbers == [f"{number:02}" for number in range(72)]
    for size, n_millions in (("64m", 64), ("125m", 124), ("356m", 356), ("1.3b", 1316)):
        run = recipe(f"azure/{size}")
        count = parameter_count(run.model, resolve(run).padded_vocabulary_size)
        assert round(count / 1e6) == n_millions
    run = recipe("azure/175b")
    assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.sequence) == (8, 16, True)
    assert run.precision.loss_scale.initial == 2**32
    assert (run.model.init_std, run.model.dropout) == (0.006, 0.1)


def test_lumi_jobs() -> None:
    small, middle, large = (recipe(f"lumi/{size}") for size in ("125m", "13b", "175b"))
    layout = middle.parallel
    assert (layout.tensor, layout.pipeline, middle.train.micro_batch_size) == (2, 2, 2)
    assert (large.parallel.tensor, large.parallel.pipeline) == (8, 8)
    assert [run.train.global_batch_size for run in (small, middle, large)] == [256, 1024, 1536]
    assert [run.model.init_std for run in (small, middle, large)] == [0.02, 0.008, 0.005]
    assert [run.optimizer.learning_rate for run in (small, middle, large)] == [6e-4, 1e-4, 6e-5]
    for run in (small, middle, large):
        scale = run.precision.loss_scale
        assert (scale.initial, scale.window, scale.hysteresis, scale.minimum) == (2048, 500, 2, 1)
        assert (run.precision.kind, run.parallel.recompute) == ("fp16", "block")
        assert run.schedule.minimum_learning_rate == 1e-6
        assert str(run.train.length) == "300B tokens"


def test_benchmark64_jobs() -> None:
    full, tgs = recipe("benchmark64/full"), recipe("benchmark64/tgs")
    batches = BatchSchedule(full)
    assert batches.consumed(2400) == 1_864_624  # printed in its log
    assert resolve(full).n_steps == 8247
    assert full.data.blend.weights == (0.35, 0.65)
    assert full.data.split == "98,2,0"
    assert tgs.train.batch_ramp is None
    assert (resolve(tgs).n_steps, resolve(tgs).n_sequences) == (10, 15_360)
    assert tgs.model == full.model
    assert tgs.train.global_batch_size == full.train.global_batch_size == 1536
    assert full.parallel.tensor * full.parallel.pipeline == 64
    assert resolve(full).padded_vocabulary_size == 51200


DATA_FILES = sorted(FOLDER.glob("*/data/*.toml"))


@pytest.mark.parametrize("path", DATA_FILES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_every_data_file_makes_what_a_recipe_of_its_guide_reads(path: Path) -> None:
    corpus = load_corpus(path, {})
    runs = [load_run(str(recipe)).run for recipe in path.parents[1].glob("*.toml")]
    read = {
        re.sub(r"\[.*:.*\]", "", prefix)
        for run in runs
        for blend in (run.data.blend, run.data.train, run.data.valid, run.data.test)
        for prefix in blend.prefixes
    }
    # SlimPajama: 59,166 shards, 822 each.
    n_outputs = 72 if path.stem == "slimpajama" else 1
    for prefix in output_prefixes(corpus, n_outputs):
        assert any(fnmatchcase(prefix, each) for each in read), prefix
    assert corpus.tokenizer in {run.tokenizer.path for run in runs}
