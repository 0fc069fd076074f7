from __future__ import annotations

import pytest

from trainyard.config.run import Model
from trainyard.model.gpt import GPT
from trainyard.model.sharding import WHOLE, kind_of_cut, sharded_dimension

SHAPE = Model(
    n_layers=2,
    d_model=32,
    n_heads=4,
    d_ff=128,
    sequence_length=16,
    vocabulary_size=61,
    tied_embeddings=False,
)


def test_the_table_is_about_layers_that_exist() -> None:
    names = [name for name, _ in GPT(SHAPE, 64).named_modules()]
    kinds = {name: kind_of_cut(name) for name in names if kind_of_cut(name)}
    assert kinds == {
        "embedding": "vocabulary",
        "head": "vocabulary",
        "blocks.0.attention.qkv": "columns",
        "blocks.0.attention.out": "rows",
        "blocks.0.mlp.up": "columns",
        "blocks.0.mlp.down": "rows",
        "blocks.1.attention.qkv": "columns",
        "blocks.1.attention.out": "rows",
        "blocks.1.mlp.up": "columns",
        "blocks.1.mlp.down": "rows",
    }


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
def test_dimension_of_a_parameter(name: str, dimension: int | None) -> None:
    assert sharded_dimension(name) == dimension


def test_the_whole_has_every_block() -> None:
    assert 0 in WHOLE.blocks
    assert 10**6 in WHOLE.blocks
    assert list(GPT(SHAPE, 64).blocks) == ["0", "1"]
