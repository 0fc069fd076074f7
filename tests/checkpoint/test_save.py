from __future__ import annotations

import pytest
import torch

from trainyard.checkpoint.format import list_checkpoints
from trainyard.checkpoint.load import load_tensors, newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint, split_in_shards
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.errors import MachineError


def test_tensors_come_back_bit_for_bit(tmp_path, make_facts):
    bits = torch.randint(-(2**63), 2**63 - 1, (257,), generator=torch.Generator().manual_seed(0))
    tensors = {
        "model.fp32": bits.view(torch.float32).reshape(2, 257),  # with nan, inf and subnormals
        "model.bf16": bits.view(torch.bfloat16).clone(),
        "model.int64": bits.clone(),
        "model.bool": bits > 0,
        "model.scalar": torch.tensor(-0.0),
        "model.empty": torch.empty(0, 3),
        "model.turned": bits.view(torch.int32).reshape(2, 257).t(),
        "optimizer.fp32": torch.ones(1),
    }
    path = save_checkpoint(tmp_path, make_facts(1), tensors)
    found = load_tensors(path, "")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        before = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), before), name
    assert load_tensors(path, "optimizer.").keys() == {"fp32"}


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


def test_too_little_room_is_found_before_writing(tmp_path, make_facts):
    first = save_checkpoint(tmp_path, make_facts(1), {"model.a": torch.zeros(3)})
    huge = {"model.a": torch.empty(2**58, device="meta")}
    with pytest.raises(MachineError) as raised:
        save_checkpoint(tmp_path, make_facts(2), huge)
    assert f"does not fit in {tmp_path}: " in raised.value.problem
    assert "a checkpoint of 1049624.6 TiB" in raised.value.problem
    assert raised.value.problem.endswith("iB free")
    assert "checkpoint.keep_last); nothing was removed" in raised.value.hint
    assert list(tmp_path.iterdir()) == [first]


def test_steps_are_ordered_by_number(tmp_path, make_facts):
    for step in (99_999_999, 100_000_000, 5):
        save_checkpoint(tmp_path, make_facts(step), {"model.a": torch.zeros(1)})
    (tmp_path / "step-five").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    steps = [check_checkpoint(path).manifest.step for path in list_checkpoints(tmp_path)]
    assert steps == [100_000_000, 99_999_999, 5]
