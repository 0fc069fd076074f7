from __future__ import annotations

import pytest
import torch

from trainyard.checkpoint.format import list_checkpoints
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.checkpoint.shard import (
    THREADS,
    limit_of_shards,
    split_in_shards,
)
from trainyard.checkpoint.verify import check_checkpoint


def test_shards_keep_the_order_and_the_limit():
    sizes = [3, 3, 3, 20, 1, 9, 1]
    tensors = {f"t{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    shards = split_in_shards(tensors, limit_bytes=10)
    assert [[t.nbytes for t in shard.values()] for shard in shards] == [
        [3, 3, 3],
        [20],
        [1, 9],
        [1],
    ]
    assert [name for shard in shards for name in shard] == list(tensors)


@pytest.mark.parametrize("gigabytes", [0.6, 1.5, 4.0, 12.0])
def test_the_threads_that_write_end_together(gigabytes):
    n_bytes = int(gigabytes * 1e9)
    sizes = [n_bytes // 200] * 200
    tensors = {
        f"t{i}": torch.empty(size, dtype=torch.uint8, device="meta") for i, size in enumerate(sizes)
    }
    shards = split_in_shards(tensors, limit_of_shards(n_bytes))
    threads = [0] * THREADS
    for shard in shards:  # to the thread that is free first
        threads[threads.index(min(threads))] += sum(t.nbytes for t in shard.values())
    assert max(threads) < 1.25 * n_bytes / THREADS
    assert len(shards) <= 2 * THREADS + 2 or gigabytes > 8


def test_a_second_checkpoint_of_a_step_replaces_the_first(tmp_path, make_facts):
    save_checkpoint(tmp_path, make_facts(1), {"model.a": torch.zeros(3)})
    path = save_checkpoint(tmp_path, make_facts(1), {"model.a": torch.ones(3)})
    assert torch.equal(load_tensors(path)["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path, make_facts):
    left = tmp_path / ".step-00000001.partial"
    left.mkdir()
    (left / "model-00000-of-00001.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, make_facts(2), {"model.a": torch.zeros(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_steps_are_ordered_by_number(tmp_path, make_facts):
    for step in (99_999_999, 100_000_000, 5):
        save_checkpoint(tmp_path, make_facts(step), {"model.a": torch.zeros(1)})
    (tmp_path / "step-five").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    steps = [check_checkpoint(path).manifest.step for path in list_checkpoints(tmp_path)]
    assert steps == [100_000_000, 99_999_999, 5]
