"""The groups of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainyard.parallel.mesh import build_mesh
from trainyard.simulate.fake_world import fake_world
from trainyard.topology import AXES, Topology


@pytest.mark.parametrize(("n_stages", "rank"), [(3, 5), (3, 37), (3, 17), (2, 5)])
def test_a_rank_creates_only_its_own_groups(
    n_stages: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(n_stages, 2, 2, 2, 2)
    created: list[list[int]] = []
    # Undone before the fake world is, which else would come back.
    with fake_world(rank, topology.n_ranks), monkeypatch.context() as patch:
        new_group = dist.new_group

        def note(ranks: Any = None, **options: Any) -> Any:
            created.append(ranks or [*range(topology.n_ranks)])
            return new_group(ranks, **options)

        patch.setattr(dist, "new_group", note)
        mesh = build_mesh(topology, rank, torch.device("cpu"))
        assert all(rank in ranks for ranks in created)
        assert mesh.data is not None
        axes = {
            ("pipeline",): mesh.pipeline,
            ("tensor",): mesh.tensor,
            ("context",): mesh.context,
            ("replicate",): mesh.data.get_group("replicate"),
            ("shard", "context"): mesh.data.get_group("shard"),
        }
        for names, group in axes.items():
            assert dist.get_process_group_ranks(group) == topology.group(rank, names)
        ends, is_at_an_end = mesh.first_and_last_stage, rank // 16 in (0, n_stages - 1)
        assert (ends is not None) is is_at_an_end
        assert (ends is mesh.pipeline) is (n_stages == 2)
        has_ends = is_at_an_end and n_stages > 2
        assert len(created) == len(axes) + 1 + has_ends  # and that for saves
        stage = mesh.stage
        assert stage is not None and stage is mesh.stage
        assert created[-1] == topology.group(rank, AXES[1:])
        assert len(created) == len(axes) + 2 + has_ends, "that of a stage when asked for"
