"""Saving while training goes on: what is saved, what is kept, and what is told."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.ranks import Agreement
from tests.waiting import WATCHDOG_SECONDS

from trainyard.checkpoint.background import AsyncCheckpointer, Retention, check_saving, remove_old
from trainyard.checkpoint.format import list_checkpoints, read_manifest
from trainyard.checkpoint.load import load_into, load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.checkpoint.save import ALONE, SavingRank, save_checkpoint
from trainyard.errors import MachineError
from trainyard.parallel.placement import whole


@pytest.fixture
def save(tmp_path, make_facts) -> Callable[..., Path]:
    """Writes a small checkpoint of a step, with the held-out loss that it shall have."""

    def write(step: int, loss: object = None) -> Path:
        training = {} if loss is None else {"held_out_loss": loss}
        facts = make_facts(step).model_copy(update={"training": training})
        return save_checkpoint(tmp_path, facts, {"model.a": torch.full((3,), float(step))})

    return write


def steps_in(folder: Path) -> list[int]:
    return [read_manifest(path).step for path in list_checkpoints(folder)]


class Gate:
    """What one rank agrees on, which holds the writer back until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, text: str | None) -> str | None:
        self.reached.set()
        assert self.opened.wait(WATCHDOG_SECONDS)
        return text


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path, make_facts):
    gate = Gate()
    saver = AsyncCheckpointer(tmp_path, SavingRank(0, 1, gate), Retention(1), background=True)
    bits = torch.randint(-(2**63), 2**63 - 1, (257,), generator=torch.Generator().manual_seed(0))
    tensors = {
        "model.fp32": bits.view(torch.float32).reshape(2, 257),  # with nan, inf and subnormals
        "model.turned": bits.view(torch.int32).reshape(2, 257).clone().t(),
        "model.bf16": bits.view(torch.bfloat16).clone(),
        "model.flag": torch.tensor(True),
        "model.empty": torch.empty(0, 3),
        "optimizer.learned": torch.ones(5, requires_grad=True),
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    saver.reserve(100, torch.device("cpu"))  # less than it takes
    saver.save(make_facts(1), tensors, {}, 1000)
    assert gate.reached.wait(WATCHDOG_SECONDS)
    for tensor in tensors.values():
        tensor.detach().zero_()
    gate.opened.set()
    saver.wait()
    found = load_tensors(tmp_path / "step-00000001", "")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (found[name], tensor))
        assert torch.equal(one, other), name


def test_training_goes_on_while_the_writer_is_held_and_the_next_save_waits(tmp_path, make_facts):
    gate = Gate()
    saver = AsyncCheckpointer(tmp_path, SavingRank(0, 1, gate), Retention(2), background=True)
    value = torch.ones(3)
    saver.save(make_facts(1), {"model.a": value}, {}, 12)
    assert newest_checkpoint(tmp_path) is None
    assert saver.last is None
    value += 1
    threading.Timer(0.2, gate.opened.set).start()
    saver.save(make_facts(2), {"model.a": value}, {}, 12)
    assert gate.opened.is_set()
    assert saver.last is not None
    assert saver.last.step == 1
    assert saver.last.n_bytes == 12
    assert 0 < saver.last.stall_seconds < saver.last.seconds
    saver.wait()
    assert saver.last.step == 2
    for step in (1, 2):
        found = load_tensors(tmp_path / f"step-0000000{step}")
        assert torch.equal(found["a"], torch.full((3,), float(step)))


@pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])
def test_failures_are_told_once_and_the_next_save_works(tmp_path, make_facts, background):
    def block(text: str | None) -> str | None:
        """Lies in the way of the removal of an old checkpoint."""
        in_the_way = tmp_path / ".step-00000001.old.partial" / "file"
        in_the_way.parent.mkdir(exist_ok=True)
        in_the_way.touch()
        return text

    ranks = SavingRank(0, 1, block)
    saver = AsyncCheckpointer(tmp_path, ranks, Retention(1), background=background)
    tensors = {"model.a": torch.ones(3)}
    saver.save(make_facts(1), tensors, {}, 12)
    saver.save(make_facts(2), tensors, {}, 2**60)  # which no disk has room for
    for _ in range(2):  # also on the ranks that nobody asked
        with pytest.raises(MachineError, match="does not fit in"):
            saver.wait()
    saver.save(make_facts(3), tensors, {}, 12)
    saver.wait()
    assert steps_in(tmp_path) == [3, 1]
    assert saver.last is not None
    assert saver.last.step == 3
    problems = [getattr(saver.take_failure(), "problem", None) for _ in range(3)]
    assert problems[0].startswith(f"cannot write the checkpoint {tmp_path}/step-00000002: ")
    assert problems[1].startswith("cannot remove an old checkpoint: ")
    assert problems[2] is None


def test_a_bug_in_the_writer_is_raised(tmp_path, make_facts):
    def lost(_text: str | None) -> None:
        raise RuntimeError("Connection closed by peer")

    saver = AsyncCheckpointer(tmp_path, SavingRank(0, 1, lost), Retention(1), background=True)
    saver.save(make_facts(1), {"model.a": torch.ones(3)}, {}, 12)
    for call in (saver.wait, saver.take_failure):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            call()


def test_ranks_save_together_and_fail_together(tmp_path, make_facts):
    agreement = Agreement(2)
    outcomes: dict[int, list[object]] = {0: [], 1: []}

    def one(rank: int) -> None:
        saver = AsyncCheckpointer(
            tmp_path,
            SavingRank(rank, 2, partial(agreement.agree, rank)),
            Retention(1),
            background=True,
        )
        place = {"model.a": whole((8,)).cut(0, rank, 2)}
        for step, n_bytes in ((1, 32), (2, 2**60), (3, 32)):
            saver.save(make_facts(step), {"model.a": torch.full((4,), float(step))}, place, n_bytes)
            try:
                saver.wait()
                outcomes[rank].append(step)
            except MachineError as error:
                outcomes[rank].append(error.problem.partition(": ")[2][:32])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0] == outcomes[1] == [1, "rank 0: a checkpoint of 1049624.", 3]
    assert steps_in(tmp_path) == [3]
    assert torch.equal(load_tensors(tmp_path / "step-00000003")["a"], torch.full((8,), 3.0))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "not UTF-8": lambda path: path.write_bytes(path.read_bytes().replace(b"model", b"m\xffdel")),
    "another file": lambda path: path.write_text("{}"),
    "nested": lambda path: path.write_text('{"x": ' + "[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_list_of_a_rank_fails_one_save_only(tmp_path, make_facts, damage):
    agreement, lists = Agreement(2), tmp_path / ".step-00000001.partial" / "parts-00001.json"
    undamaged = {1}

    def agree(rank: int, text: str | None) -> str | None:
        if rank in undamaged and lists.exists():  # its own, before rank 0 reads it
            undamaged.remove(rank)
            damage(lists)
        return agreement.agree(rank, text)

    savers = [
        AsyncCheckpointer(
            tmp_path, SavingRank(rank, 2, partial(agree, rank)), Retention(1), background=False
        )
        for rank in range(2)
    ]

    def save(step: int, rank: int) -> MachineError | None:
        places = {"model.a": whole((8,)).cut(0, rank, 2)}
        tensors = {"model.a": torch.full((4,), float(step))}
        savers[rank].save(make_facts(step), tensors, places, 32)
        return savers[rank].take_failure()

    with ThreadPoolExecutor(2) as pool:
        for failure in list(pool.map(partial(save, 1), range(2))):
            assert failure is not None
            assert "step-00000001: rank 0: cannot read what rank 1 wrote: " in failure.problem
            assert failure.hint.startswith("check the disk or file server")
        assert list(pool.map(partial(save, 2), range(2))) == [None, None]
    assert steps_in(tmp_path) == [2]
    assert torch.equal(load_tensors(tmp_path / "step-00000002")["a"], torch.full((8,), 2.0))


def test_a_writer_that_waits_for_a_dead_rank_does_not_keep_the_process(tmp_path):
    code = (
        "import sys, threading, torch; from pathlib import Path\n"
        "from trainyard.checkpoint.background import Retention, AsyncCheckpointer\n"
        "from trainyard.checkpoint.format import Facts\n"
        "from trainyard.checkpoint.save import SavingRank\n"
        "ranks = SavingRank(0, 2, threading.Event().wait)\n"
        "saver = AsyncCheckpointer(Path(sys.argv[1]), ranks, Retention(1), background=True)\n"
        "facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})\n"
        "saver.save(facts, {'model.a': torch.ones(3)}, {}, 12)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_and_best_stay_as_the_module_says(tmp_path, save):
    losses = (3.10, 2.95, 2.91, 2.80, 2.85, 2.88, 2.86, 2.87)
    keep = Retention(last=2, every=100, best=1)
    seen = []
    for step, loss in zip(range(100, 260, 20), losses, strict=True):
        save(step, loss)
        remove_old(tmp_path, keep)
        seen.append(steps_in(tmp_path))
    assert seen[:4] == [[100], [120, 100], [140, 120, 100], [160, 140, 100]]
    assert seen[-1] == [240, 220, 200, 160, 100]


def test_the_best_is_of_those_with_a_finite_loss_and_of_equal_ones_the_newest(tmp_path, save):
    losses = (2.0, float("nan"), None, 1.5, 1.5, float("-inf"), "1.0", 3.0)
    for step, loss in enumerate(losses, start=1):
        save(step, loss)
    remove_old(tmp_path, Retention(last=1, best=2))
    assert steps_in(tmp_path) == [8, 5, 4]
    save(4, 0.5)  # again, better than any
    removed = remove_old(tmp_path, Retention(last=1, best=1))
    assert [path.name for path in removed] == ["step-00000005"]


def test_only_complete_ones_count(tmp_path, save):
    for step in (1, 2, 3, 4):
        save(step)
    for step in (1, 3, 4):
        (tmp_path / f"step-0000000{step}" / "manifest.json").unlink()
    assert remove_old(tmp_path, Retention(2, every=1)) == []
    remove_old(tmp_path, Retention(1, every=1))
    left = [path.name for path in list_checkpoints(tmp_path)]
    assert left == ["step-00000004", "step-00000003", "step-00000002"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert remove_old(folder, Retention(1)) == []


def test_a_folder_is_probed_without_a_trace(tmp_path):
    check_saving(tmp_path / "run" / "checkpoints", 1000)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    with pytest.raises(MachineError, match=r"a checkpoint of 1049624\.6 TiB does not fit in .*run"):
        check_saving(tmp_path / "run" / "checkpoints", 2**60)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write checkpoints to .*file: .*File exists"):
        check_saving(tmp_path / "file", 1000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_copied_through_page_locked_memory(tmp_path, make_facts):
    saver = AsyncCheckpointer(tmp_path, ALONE, Retention(1), background=True)
    value = torch.arange(3_000_000, dtype=torch.float32, device="cuda")
    turned = torch.rand(1000, 300, device="cuda").t()
    expected = value.cpu(), turned.cpu()
    saver.save(make_facts(1), {"model.a": value, "model.b": turned}, {}, 14_000_000)
    value.zero_()
    turned.zero_()
    assert saver._host is not None
    assert saver._host._room.is_pinned()
    saver.wait()
    found = load_tensors(tmp_path / "step-00000001")
    assert torch.equal(found["a"], expected[0])
    assert torch.equal(found["b"], expected[1])
    filled = {"model.a": torch.empty_like(value)}
    load_into(tmp_path / "step-00000001", filled, 1)
    assert torch.equal(filled["model.a"].cpu(), expected[0])


def test_what_an_end_between_save_and_removal_left_goes_at_the_next_start(tmp_path, save):
    for step in (1, 2, 3):
        save(step)
    (tmp_path / ".step-00000000.old.partial").mkdir()
    AsyncCheckpointer(tmp_path, SavingRank(1, 2, Gate()), Retention(2), background=True)
    assert steps_in(tmp_path) == [3, 2, 1], "another rank than the first removes nothing"
    AsyncCheckpointer(tmp_path, ALONE, Retention(2), background=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
