from __future__ import annotations

import torch

from trainyard.checkpoint.format import list_checkpoints
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.checkpoint.shard import split_in_shards
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
