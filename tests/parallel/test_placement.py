from __future__ import annotations

import pytest
import torch
from torch import nn

from trainyard.parallel.placement import Placement, Shard, is_first_holder, local_part, place, whole


@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("n_ranks", range(1, 10))
def test_parts_are_those_of_torch_chunk(length, n_ranks):
    values = torch.arange(3 * length).reshape(3, length)
    chunks = values.chunk(n_ranks, 1)
    for rank in range(n_ranks):
        placement = whole((3, length)).cut(1, rank, n_ranks)
        expected = chunks[rank] if rank < len(chunks) else values[:, :0]
        assert placement.local_shape == expected.shape
        assert placement.shape == (3, length)
        start, size = placement.offsets[1], placement.local_shape[1]
        assert torch.equal(values[:, start : start + size], expected)


def test_a_part_of_a_part_lies_in_the_whole():
    part = whole((10, 8)).cut(1, 1, 2).cut(0, 3, 4)
    assert part == Placement((10, 8), (9, 4), (1, 4))
    assert whole((10, 8)).cut(1, 1, 2).cut(0, 4, 5) == Placement((10, 8), (8, 4), (2, 4))
    assert whole(()) == Placement((), (), ())


def test_a_plain_parameter_is_cut_over_tensor_ranks_alone():
    parameter = nn.Parameter(torch.zeros(5, 7))
    assert place(parameter) == whole((5, 7))
    assert place(parameter, [Shard(1, 1, 2)]) == Placement((5, 14), (0, 7), (5, 7))
    assert place(parameter, [Shard(0, 3, 4)]) == Placement((20, 7), (15, 0), (5, 7))
    both = [Shard(1, 1, 2), Shard(0, 2, 3)]
    assert place(parameter, both) == Placement((15, 14), (10, 7), (5, 7))
    assert is_first_holder(parameter)
    part = local_part(parameter)
    assert part.data_ptr() == parameter.data_ptr()
    assert not part.requires_grad
