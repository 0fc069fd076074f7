from __future__ import annotations

import math

import pytest
import torch

from trainyard.architecture import (
    find_layer,
    padded_vocabulary_size,
    parameter_count,
    parameter_counts,
    parameter_shapes,
    parameters_of,
    rest_layers,
    shapes_of,
    stage_layers,
)
from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Model
from trainyard.model.gpt import GPT


@pytest.mark.parametrize(
    ("tensor", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200), (16, 51200)]
)
def test_vocabulary_is_padded_as_in_megatron(tensor: int, padded: int) -> None:
    assert padded_vocabulary_size(Model(), tensor) == padded


def test_vocabulary_that_fits_is_not_padded() -> None:
    assert padded_vocabulary_size(Model(vocabulary_size=1024, vocabulary_multiple=128), 8) == 1024
    assert padded_vocabulary_size(Model(vocabulary_size=1025, vocabulary_multiple=128), 8) == 2048
    assert padded_vocabulary_size(Model(vocabulary_size=7, vocabulary_multiple=1)) == 7


def real_shapes(model: Model, padded: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        gpt = GPT(model, padded)
    return {name: tuple(tensor.shape) for name, tensor in gpt.state_dict().items()}


@pytest.mark.parametrize("preset", [n for n in preset_names() if "1t-" not in n])
def test_shapes_are_those_of_the_real_model(preset: str) -> None:
    model = load_run(preset).run.model
    assert model.mlp == "swiglu" or model.d_ff == 4 * model.d_model
    padded = padded_vocabulary_size(model)
    expected = real_shapes(model, padded)
    assert parameter_shapes(model, padded) == expected
    assert list(parameter_shapes(model, padded)) == list(expected)
    total = sum(math.prod(shape) for shape in expected.values())
    assert parameter_count(model, padded) == total


@pytest.mark.parametrize("n_layers", [1, 128])
def test_shapes_of_the_widest_presets(n_layers: int) -> None:
    """Thousand blocks of one kind prove no more than a few do, and building them takes seconds."""
    model = load_run(f"polaris-gpt1t-{n_layers}l").run.model
    padded = padded_vocabulary_size(model, 8)
    assert parameter_shapes(model, padded) == real_shapes(model, padded)


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("embedding.weight", 0),
        ("head.weight", 0),
        ("positions.weight", None),
        ("blocks.17.attention.qkv.weight", 0),
        ("blocks.17.attention.qkv.bias", 0),
        ("blocks.17.attention.out.weight", 1),
        ("blocks.17.attention.out.bias", None),
        ("blocks.17.mlp.up.bias", 0),
        ("blocks.17.mlp.down.weight", 1),
        ("blocks.17.mlp.down.bias", None),
        ("blocks.17.mlp_norm.weight", None),
        ("final_norm.bias", None),
    ],
)
def test_tensor_ranks_shard_one_dimension_of_a_parameter(name: str, dimension: int | None) -> None:
    model = Model(n_layers=18, tied_embeddings=False)
    whole = parameters_of(stage_layers(model, 50688))
    assert find_layer(model, name).parameters[name].dimension == dimension
    assert whole[name].dimension == dimension
    expected = list(whole[name].shape)
    if dimension is not None:
        expected[dimension] //= 4
    assert shapes_of(stage_layers(model, 50688, tensor=4))[name] == tuple(expected)


def test_stages_have_the_layers_of_the_whole_and_a_copy_of_a_tied_head() -> None:
    model = Model(n_layers=3)
    first, last = (shapes_of(stage_layers(model, 128, blocks)) for blocks in ((0, 1), (1, 3)))
    assert first | last == parameter_shapes(model, 128)
    assert first.keys() & last.keys() == {"embedding.weight"}
    untied = model.model_copy(update={"tied_embeddings": False})
    assert list(rest_layers(untied, 128, (1, 3))) == ["final_norm", "head"]


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
