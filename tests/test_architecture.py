from __future__ import annotations

import math
import re

import pytest
import torch
from tests.circles import everyday

from trainyard import architecture as subject
from trainyard.architecture import (
    count_idle,
    padded_vocabulary_size,
    parameter_count,
    parameter_counts,
    parameter_shapes,
)
from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Model
from trainyard.model.gpt import GPT


def test_vocabulary_is_padded_as_in_megatron() -> None:
    padded = [padded_vocabulary_size(Model(), tensor) for tensor in (1, 2, 4, 8, 16)]
    assert padded == [50304, 50432, 50688, 51200, 51200]
    assert padded_vocabulary_size(Model(vocabulary_size=1024, vocabulary_multiple=128), 8) == 1024
    assert padded_vocabulary_size(Model(vocabulary_size=1025, vocabulary_multiple=128), 8) == 2048
    assert padded_vocabulary_size(Model(vocabulary_size=7, vocabulary_multiple=1)) == 7


FAMILIES = (
    "gpt3-125m",
    "llama-3.2-1b",
    "qwen3-0.6b",
    "olmo-2-1b",
    "demo",
    "modern-350m",
    "olmoe-1b-7b",
    "deepseek-moe-16b",
)


def real_shapes(model: Model, padded: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        gpt = GPT(model, padded)
    return {name: tuple(tensor.shape) for name, tensor in gpt.state_dict().items()}


@pytest.mark.parametrize(
    "preset", everyday([name for name in preset_names() if "1t-" not in name], FAMILIES)
)
def test_shapes_are_those_of_the_real_model(preset: str) -> None:
    model = load_run(preset).run.model
    assert model.mlp == "swiglu" or model.d_ff == 4 * model.d_model
    padded = padded_vocabulary_size(model)
    expected = real_shapes(model, padded)
    assert parameter_shapes(model, padded) == expected
    assert list(parameter_shapes(model, padded)) == list(expected)
    total = sum(math.prod(shape) for shape in expected.values())
    assert subject.parameter_count(model, padded) == total


@pytest.mark.parametrize("n_layers", [1, 128])
def test_shapes_of_the_widest_presets(n_layers: int) -> None:
    """Thousand blocks of one kind prove no more than a few do, and building them takes seconds."""
    model = load_run(f"polaris-gpt1t-{n_layers}l").run.model
    padded = padded_vocabulary_size(model, 8)
    assert parameter_shapes(model, padded) == real_shapes(model, padded)


MIXTRAL = {"n_layers": 32, "d_model": 4096, "d_ff": 14336, "n_heads": 32, "n_key_value_heads": 8}
PARTS = {"mlp": "swiglu", "norm": "rms", "positions": "rotary", "bias": False}


def test_parameters_that_a_token_uses() -> None:
    """Mixtral 8x7B has 46.7 billion and uses 12.9 billion (arXiv:2401.04088: 47B, 13B)."""
    fields = {**MIXTRAL, **PARTS, "n_experts": 8, "tied_embeddings": False, "dropout": 0}
    model = Model(vocabulary_size=32000, **fields)
    n_parameters = parameter_count(model, 32000)
    assert (n_parameters, n_parameters - count_idle(model)) == (46_702_792_704, 12_879_925_248)
    first_dense = model.model_copy(update={"n_dense_blocks": 8, "n_shared_experts": 1})
    assert count_idle(first_dense) == count_idle(model) * 24 // 32
    assert count_idle(model.model_copy(update={"n_experts": 0})) == 0


DIMENSIONS = {
    **dict.fromkeys(("embedding.weight", "head.weight", "attention.qkv.weight"), 0),
    **dict.fromkeys(("attention.qkv.bias", "mlp.up.weight", "mlp.up.bias"), 0),
    **dict.fromkeys(("attention.out.weight", "mlp.down.weight"), 1),
}
"""The dimension that tensor ranks shard; they replicate all other parameters."""


def test_tensor_ranks_shard_one_dimension_of_a_parameter() -> None:
    model = Model(n_layers=18, tied_embeddings=False)
    whole = subject.parameters_of(subject.stage_layers(model, 50688))
    sharded = subject.shapes_of(subject.stage_layers(model, 50688, tensor=4))
    for name, parameter in whole.items():
        dimension = DIMENSIONS.get(re.sub(r"blocks\.\d+\.", "", name))
        assert parameter.dimension == dimension, name
        assert subject.find_layer(model, name).parameters[name].dimension == dimension
        expected = list(parameter.shape)
        if dimension is not None:
            expected[dimension] //= 4
        assert sharded[name] == tuple(expected)


def test_stages_have_the_layers_of_the_whole_and_a_copy_of_a_tied_head() -> None:
    model = Model(n_layers=3)
    stages = (subject.stage_layers(model, 128, blocks) for blocks in ((0, 1), (1, 3)))
    first, last = map(subject.shapes_of, stages)
    assert first | last == parameter_shapes(model, 128)
    assert first.keys() & last.keys() == {"embedding.weight"}
    untied = model.model_copy(update={"tied_embeddings": False})
    assert list(subject.rest_layers(untied, 128, (1, 3))) == ["final_norm", "head"]


def test_untied_head_and_odd_widths_count() -> None:
    model = Model(n_layers=3, d_model=24, n_heads=2, d_ff=50, tied_embeddings=False)
    expected = real_shapes(model, 50304)
    counts = parameter_counts(model, 50304)
    assert parameter_shapes(model, 50304) == expected
    assert counts["head"] == counts["embedding"] == 50304 * 24
    assert sum(counts.values()) == sum(math.prod(shape) for shape in expected.values())


def test_parts_are_what_they_say() -> None:
    model = Model(n_layers=2, d_model=8, n_heads=2, d_ff=32, sequence_length=16)
    counts = dict.fromkeys(("embedding", "positions", "blocks", "final_norm"), 0)
    for name, shape in parameter_shapes(model, 128).items():
        counts[name.split(".")[0]] += math.prod(shape)
    assert list(parameter_counts(model, 128).items()) == list(counts.items())
