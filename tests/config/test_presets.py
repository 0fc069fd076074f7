from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from trainyard.architecture import expert_layers, padded_vocabulary_size, parameter_count
from trainyard.config.load import field_value, load_run, preset_names, render_run
from trainyard.config.run import Optimizer, Run
from trainyard.export.families import find_family
from trainyard.layout.resolve import resolve
from trainyard.planning.memory import busiest_memory
from trainyard.planning.room import gpu_bytes


def preset(name: str) -> Run:
    return load_run(name).run


def billions(name: str, tensor: int = 1) -> float:
    model = preset(name).model
    return parameter_count(model, padded_vocabulary_size(model, tensor)) / 1e9


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_resolves_and_is_rendered(name: str, tmp_path: Path) -> None:
    run = preset(name)
    assert run.name == name
    assert len(run.description) > 20
    assert resolve(run).n_steps > 0
    path = tmp_path / "run.toml"
    path.write_text(render_run(run), encoding="utf-8")
    assert load_run(str(path)).run == run
    # Dropout only where the source has it.
    is_megatron = name.startswith(("azure-", "mds-", "polaris-")) or name == "msamp-345m"
    assert run.model.dropout == 0.1 * (is_megatron or name == "tiny")
    if name.startswith("polaris-"):
        optimizer = run.optimizer
        settings = (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay)
        assert settings == (1.5e-4, (0.9, 0.999), 0.01)
        assert str(run.schedule.decay) == str(run.train.length) == "320k steps"
        assert run.train.global_batch_size == 512


def test_all_families_are_there() -> None:
    families = Counter(name.partition("-")[0] for name in preset_names())
    assert families == {
        **{"gpt3": 8, "mds": 8, "polaris": 40, "msamp": 3, "azure": 7, "modern": 7, "llama": 4},
        **{"demo": 1, "gpt2": 1, "laptop": 1, "tiny": 1, "qwen3": 2, "smollm2": 2, "olmo": 1},
        **{"moe": 3, "olmoe": 1, "mixtral": 1, "deepseek": 1},
    }


PAPER = [  # arXiv:2005.14165, table 2.1, in sequences of 2048
    ("125m", 12, 768, 12, 256, 6.0e-4, 0.02),
    ("350m", 24, 1024, 16, 256, 3.0e-4, 0.018),
    ("760m", 24, 1536, 16, 256, 2.5e-4, 0.015),
    ("1.3b", 24, 2048, 16, 512, 2.0e-4, 0.013),
    ("2.7b", 32, 2560, 32, 512, 1.6e-4, 0.011),
    ("6.7b", 32, 4096, 32, 1024, 1.2e-4, 0.009),
    ("13b", 40, 5120, 40, 1024, 1.0e-4, 0.008),
    ("175b", 96, 12288, 96, 1536, 0.6e-4, 0.005),
]


@pytest.mark.parametrize(("key", "layers", "width", "heads", "batch", "rate", "std"), PAPER)
def test_gpt3_and_mds_tables(
    key: str, layers: int, width: int, heads: int, batch: int, rate: float, std: float
) -> None:
    paper, mds = preset(f"gpt3-{key}"), preset(f"mds-{key}")
    for run in (paper, mds):
        assert (run.model.n_layers, run.model.d_model, run.model.n_heads) == (layers, width, heads)
        train = (run.model.sequence_length, run.train.global_batch_size, str(run.train.length))
        assert train == (2048, batch, "300B tokens")
        settings = {"betas": (0.9, 0.95), "weight_decay": 0.1, "clip_norm": 1.0}
        assert run.optimizer == Optimizer(learning_rate=rate, **settings)
    assert paper.schedule.minimum_learning_rate == pytest.approx(rate / 10)
    assert str(paper.schedule.warmup) == "375M tokens"
    assert str(paper.schedule.decay) == "260B tokens"
    assert paper.model.init_std == 0.02
    ramp = paper.train.batch_ramp
    assert ramp is not None
    assert ramp.start == ramp.increment == (64 if key in ("6.7b", "13b") else 16)
    assert 4e9 <= ramp.length.amount <= 12e9
    assert mds.train.batch_ramp is None
    assert mds.schedule.minimum_learning_rate == 1e-6
    assert (str(mds.schedule.warmup), str(mds.schedule.decay)) == ("3B tokens", "300B tokens")
    assert mds.model.init_std == std
    assert std == pytest.approx(math.sqrt(1 / (3 * width)), rel=0.1)


SMALL = "gpt3-125m gpt3-350m modern-125m modern-350m smollm2-135m smollm2-360m qwen3-0.6b"


@pytest.mark.parametrize("name", SMALL.split())
def test_small_presets_fill_a_small_gpu_and_divide_on_eight(name: str) -> None:
    run, room = preset(name), gpu_bytes("RTX 4090")
    assert run.train.micro_batch_size > 1
    assert busiest_memory(run, resolve(run, 1), on_gpu=True).peak_bytes <= room
    assert resolve(run, 8).data_parallel_size == 8


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt3-125m", 0.125), ("gpt3-350m", 0.356), ("gpt3-760m", 0.760), ("gpt3-1.3b", 1.32),
        ("gpt3-2.7b", 2.65), ("gpt3-6.7b", 6.66), ("gpt3-13b", 12.85), ("gpt3-175b", 174.6),
        ("msamp-345m", 0.3549), ("msamp-6.7b", 6.659), ("msamp-13b", 12.854),
        ("azure-175b", 174.6), ("azure-30b", 30.0), ("azure-13b", 12.85), ("azure-1.3b", 1.32),
        ("azure-857m", 0.356), ("azure-375m", 0.064), ("azure-125m", 0.124),
        ("laptop", 0.0101), ("polaris-gpt125m", 0.125), ("polaris-bert1.2b", 1.316),
        ("polaris-gpt1.5b", 1.44), ("polaris-gpt2.7b", 2.65), ("polaris-gpt6.7b", 6.66),
        ("polaris-gpt13b", 12.85), ("polaris-gpt25b", 29.3), ("polaris-gpt30b", 29.3),
        ("polaris-gpt33b", 36.6),
    ],
)  # fmt: skip
def test_sizes_are_those_the_guides_come_to(name: str, size: float) -> None:
    assert billions(name) == pytest.approx(size, rel=6e-3)


@pytest.mark.parametrize(
    ("name", "n_parameters"),
    [  # of the released weights
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("olmo-2-1b", 1_484_916_736),
        ("olmoe-1b-7b", 6_919_161_856),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-moe-16b", 16_375_728_128),
    ],
)
def test_real_models_have_as_many_parameters(name: str, n_parameters: int) -> None:
    assert resolve(preset(name)).n_parameters == n_parameters


@pytest.mark.parametrize("key", [key for key, *_ in PAPER[:-1]])
def test_modern_ladder_stands_beside_that_of_gpt3(key: str) -> None:
    modern, paper = preset(f"modern-{key}"), preset(f"gpt3-{key}")
    assert billions(f"modern-{key}") == pytest.approx(billions(f"gpt3-{key}"), rel=0.02)
    for field in (
        *("model.n_layers", "model.d_model", "model.sequence_length", "model.vocabulary_size"),
        *("optimizer", "schedule", "train.global_batch_size"),
    ):
        assert field_value(modern, field) == field_value(paper, field), field


@pytest.mark.parametrize(("total", "key"), [("600M", "125m"), ("2B", "350m"), ("8B", "1.3b")])
def test_experts_have_as_many_active_parameters_as_the_modern_ladder(total: str, key: str) -> None:
    name, modern = f"moe-{total.lower()}-a{key}", preset(f"modern-{key}")
    run = preset(name)
    idle = run.model.model_copy(
        update={"n_experts": run.model.n_experts - run.model.n_active_experts}
    )
    of_experts = sum(
        math.prod(layer.weight) for layer in expert_layers(idle) if layer.kind == "experts"
    )
    active = billions(name) - run.model.n_layers * of_experts / 1e9
    assert active == pytest.approx(billions(f"modern-{key}"), rel=0.02)
    size = float(total[:-1]) / (1000 if total.endswith("M") else 1)
    assert billions(name) == pytest.approx(size, rel=0.06)
    for field in ("model.n_layers", "model.d_model", "optimizer", "schedule", "train.length"):
        assert field_value(run, field) == field_value(modern, field), field
    assert find_family(run.model).architecture == "Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("stem", "counts", "sizes"),
    [
        (
            "polaris-gpt145b",
            [2, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 80],
            [4.3, 7.9, 9.7, 11.5, 15.2, 18.8, 22.4, 29.6, 44.1, 58.6, 87.6, 116.6, 145.6],
        ),
        (
            "polaris-gpt1t",
            [1, 2, 4, 8, 16, 24, 30, 32, 60, 64, 120, 128, 256, 512, 1024],
            [9.2, 17.1, 32.8, 64.3, 127.2, 190.1, 237.3, 253.0, 473.2, 504.7, 945.1, 1008, 2015,
             4028, 8055],
        ),
    ],
)  # fmt: skip
def test_polaris_towers(stem: str, counts: list[int], sizes: list[float]) -> None:
    for count, size in zip(counts, sizes, strict=True):
        name = stem if stem.endswith("145b") and count == 80 else f"{stem}-{count}l"
        assert preset(name).model.n_layers == count
        assert billions(name, tensor=8) == pytest.approx(size, abs=0.08 if size < 1000 else 0.6)


MISLEADING = {
    **{"gpt3-1.3b": "16 heads", "gpt3-13b": "5140", "gpt3-175b": "3.2M", "azure-857m": "356M"},
    **{"azure-375m": "64M", "polaris-gpt25b": "29.3B", "polaris-gpt33b": "36.6B"},
    **{"polaris-gpt13b": "64 heads", "polaris-llama-7b": "Llama"},
}


def test_labels_that_mislead_are_put_right_in_words() -> None:
    for name, words in MISLEADING.items():
        assert words in preset(name).description
    assert preset("polaris-gpt25b").model == preset("polaris-gpt30b").model
