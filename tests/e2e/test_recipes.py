"""The recipes: what their guides set, written once more, changes nothing in them."""

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
KINDS = {"bf16": "bf16", "fp8": "fp8", "fp8-lowbit": "fp8_lowbit", "fp16": "fp16"}
LUMI_FP16 = (
    "precision.kind=fp16 parallel.recompute=block train.length='300B tokens' "
    "precision.loss_scale.initial=2048 precision.loss_scale.window=500 "
    "precision.loss_scale.hysteresis=2 precision.loss_scale.minimum=1 "
    "schedule.minimum_learning_rate=1e-6 "
)
POLARIS = "precision.loss_scale.initial=4096 parallel.zero_stage=1 parallel.recompute=block "
GUIDES = {
    **{
        f"msamp/{name}-{stem}": f"precision.kind={KINDS[stem]} {words}"
        for stem in ("bf16", "fp8", "fp8-lowbit")
        for name, words in {
            "345m": "train.micro_batch_size=8 train.global_batch_size=64 evaluate.batches=10 "
            "train.length='500_000 steps' model.sequence_length=1024",
            "6.7b": "train.micro_batch_size=1 train.global_batch_size=2048 evaluate.interval=500 "
            "train.seed=43 model.dropout=0 model.init_std=0.0099",
            "13b": "train.micro_batch_size=1 train.global_batch_size=1280 parallel.tensor=2 "
            "parallel.sequence=true checkpoint.interval=2000",
        }.items()
    },
    **{
        f"msamp/345m-deepspeed-{stem}": f"train.micro_batch_size=4 train.global_batch_size=8 "
        # 0 in the guide for both; on its one GPU that is the same.
        f"parallel.zero_stage={stage} checkpoint.interval=10000"
        for stem, stage in (("fp16", 0), ("fp8-lowbit", 1))
    },
    **{
        f"msamp/13b-deepspeed-{stem}": "train.micro_batch_size=4 parallel.tensor=2 "
        "parallel.sequence=false parallel.recompute=block parallel.zero_stage=1"
        for stem in ("bf16", "fp8-lowbit")
    },
    "polaris/gpt25b": f"{POLARIS} model.sequence_length=4096",
    "polaris/gpt13b": f"{POLARIS} model.sequence_length=2048",
    "azure/175b": "parallel.tensor=8 parallel.pipeline=16 parallel.sequence=true "
    "precision.loss_scale.initial=4294967296 model.init_std=0.006 model.dropout=0.1",
    "lumi/125m": f"{LUMI_FP16} train.global_batch_size=256 model.init_std=0.02 "
    "optimizer.learning_rate=6e-4",
    "lumi/13b": f"{LUMI_FP16} train.global_batch_size=1024 model.init_std=0.008 "
    "optimizer.learning_rate=1e-4 parallel.tensor=2 parallel.pipeline=2 train.micro_batch_size=2",
    "lumi/175b": f"{LUMI_FP16} train.global_batch_size=1536 model.init_std=0.005 "
    "optimizer.learning_rate=6e-5 parallel.tensor=8 parallel.pipeline=8",
    "benchmark64/full": "data.blend.weights=[0.35,0.65] data.split=98,2,0 "
    "train.global_batch_size=1536",
    "benchmark64/tgs": "train.batch_ramp=none train.global_batch_size=1536 train.length='10 steps'",
}


def recipe(name: str) -> Run:
    return load_run(str(FOLDER / f"{name}.toml")).run


@pytest.mark.parametrize("name", GUIDES)
def test_a_recipe_has_the_values_of_its_guide(name: str) -> None:
    words = [word.replace("'", "") for word in re.findall(r"(?:[^\s']|'[^']*')+", GUIDES[name])]
    assert load_run(str(FOLDER / f"{name}.toml"), words).run == recipe(name)


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
        readme = (path.parent / "README.md").read_text(encoding="utf-8")
        assert "## What runs today" in readme and path.name in readme, path
    assert len(names) == len(FILES), "names differ"


def test_azure_files_follow_the_presets_and_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/slimpajama").mkdir(parents=True)
    for number in range(72):
        (tmp_path / f"data/slimpajama/train_chunk_{number:02}_text_document.bin").touch()
    # Two presets have the guide's names for them.
    keys = {"356m": "857m", "64m": "375m"}
    millions = {"64m": 64, "125m": 124, "356m": 356, "1.3b": 1316}
    for size in ("175b", "30b", "13b", "1.3b", "356m", "64m", "125m"):
        run, preset = recipe(f"azure/{size}"), load_run(f"azure-{keys.get(size, size)}").run
        for section in ("model", "train", "optimizer", "schedule", "checkpoint", "evaluate", "log"):
            assert getattr(run, section) == getattr(preset, section), (size, section)
        data = find_token_files(run).data
        lists = [data.train.prefixes, data.test.prefixes, data.valid.prefixes]
        assert [len(prefixes) for prefixes in lists] == [42, 15, 15]
        numbers = [name[len("data/slimpajama/train_chunk_") :][:2] for p in lists for name in p]
        assert numbers == [f"{number:02}" for number in range(72)]
        count = parameter_count(run.model, resolve(run).padded_vocabulary_size)
        assert round(count / 1e6) == millions.get(size, round(count / 1e6))


def test_benchmark64_jobs() -> None:
    full, tgs = recipe("benchmark64/full"), recipe("benchmark64/tgs")
    assert BatchSchedule(full).consumed(2400) == 1_864_624  # printed in its log
    assert (resolve(full).n_steps, resolve(full).padded_vocabulary_size) == (8247, 51200)
    assert (resolve(tgs).n_sequences, tgs.model) == (15_360, full.model)
    assert full.parallel.tensor * full.parallel.pipeline == 64


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
