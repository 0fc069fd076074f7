"""Damage of every kind to a checkpoint of four ranks, the manifest included: all of it is found."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.conftest import flip_bit
from tests.ranks import Agreement
from torch import Tensor

from trainyard.checkpoint.format import MANIFEST, Facts
from trainyard.checkpoint.save import SavingRank, save_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import CheckpointError
from trainyard.parallel.placement import whole

N_RANKS = 4
N_FLIPS = 50

Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


def save_with_ranks(
    folder: Path, facts: Facts, tensors: dict[str, Tensor], vocabulary: Vocabulary
) -> Path:
    """Saves as four ranks do that each hold a quarter of the rows, or one of them the whole."""
    agreement = Agreement(N_RANKS)

    def save(rank: int) -> Path:
        held, places = {}, {}
        for index, (name, tensor) in enumerate(tensors.items()):
            n_rows = len(tensor) // N_RANKS
            if n_rows * N_RANKS == len(tensor):
                held[name] = tensor[n_rows * rank : n_rows * (rank + 1)]
                places[name] = whole(tuple(tensor.shape)).cut(0, rank, N_RANKS)
            elif index % N_RANKS == rank:
                held[name] = tensor
        ranks = SavingRank(rank, N_RANKS, partial(agreement.agree, rank))
        return save_checkpoint(folder, facts, held, places, ranks, None, vocabulary)

    with ThreadPoolExecutor(N_RANKS) as pool:
        return next(iter(pool.map(save, range(N_RANKS))))


@pytest.fixture
def saved(
    tmp_path: Path,
    make_facts: Callable[[int], Facts],
    tensors: dict[str, Tensor],
    vocabulary: Vocabulary,
) -> Path:
    # A block, both norms and their moments: files of some kB, so that checks are quick.
    small = {name: tensor for name, tensor in tensors.items() if ".1." in name or "norm" in name}
    return save_with_ranks(tmp_path / "checkpoints", make_facts(7), small, vocabulary)


def test_an_unharmed_checkpoint_is_read_whole(saved: Path) -> None:
    told: list[tuple[int, int]] = []
    report = check_checkpoint(saved, lambda done, total: told.append((done, total)))
    sizes = {path.name: path.stat().st_size for path in saved.iterdir()}
    assert len(sizes) == 2 * N_RANKS + 2
    assert report.n_bytes == sum(sizes.values())
    in_files = report.n_bytes - sizes[MANIFEST]
    assert told[-1] == (in_files, in_files)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert report.manifest.step == 7


def test_every_flipped_bit_is_found(saved: Path) -> None:
    files = sorted(saved.iterdir())
    sizes = [path.stat().st_size for path in files]
    draw = random.Random(0)
    found = 0
    for _ in range(N_FLIPS):
        # Files by their size, and the manifest among them: each bit of the folder is as likely.
        (path,) = draw.choices(files, sizes)
        position, mask = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        flip_bit(path, position, mask)
        with pytest.raises(CheckpointError) as caught:
            check_checkpoint(saved)
        found += path.name in caught.value.problem
        flip_bit(path, position, mask)
    assert found == N_FLIPS
    check_checkpoint(saved)


def test_all_bits_of_what_holds_the_rest_together(saved: Path) -> None:
    """The seal of the manifest, and the length in front of a header, bit by bit."""
    shard = next(path for path in sorted(saved.iterdir()) if path.suffix == ".safetensors")
    for path, n_bytes in ((saved / MANIFEST, 80), (shard, 12)):
        for bit in range(8 * n_bytes):
            flip_bit(path, bit // 8, 1 << bit % 8)
            with pytest.raises(CheckpointError, match=path.name):
                check_checkpoint(saved)
            flip_bit(path, bit // 8, 1 << bit % 8)
    check_checkpoint(saved)


def test_every_truncation_and_every_growth_is_found(saved: Path) -> None:
    for path in sorted(saved.iterdir()):
        content = path.read_bytes()
        for n_bytes in (0, 1, 7, 8, 79, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:n_bytes])
            with pytest.raises(CheckpointError, match=path.name):
                check_checkpoint(saved)
        path.write_bytes(content + b"\0")
        with pytest.raises(CheckpointError, match=path.name):
            check_checkpoint(saved)
        path.write_bytes(content)
    check_checkpoint(saved)


def test_all_problems_of_all_files_are_listed(saved: Path) -> None:
    shards = sorted(path for path in saved.iterdir() if path.suffix == ".safetensors")
    flip_bit(shards[0], -1)
    flip_bit(shards[1], 20)
    shards[2].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-1])
    shards[4].unlink()
    shards[4].mkdir()
    (saved / "notes.txt").write_text("mine")
    flip_bit(shards[5], 8 + int.from_bytes(shards[5].read_bytes()[:8], "little"), 128)
    flip_bit(shards[5], -1, 128)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(saved)
    title, *lines = caught.value.problem.splitlines()
    assert title == f"{saved}: 7 problems"
    n_bytes = shards[3].stat().st_size
    expected = [
        "'notes.txt' is not part of this checkpoint: the manifest does not list it",
        f"{shards[0].name} is damaged: the checksum of '",
        f"{shards[1].name} is damaged: the sha256 of its header is ",
        f"{shards[2].name} is missing or not a regular file",
        f"{shards[3].name} has {n_bytes} bytes instead of {n_bytes + 1}",
        f"{shards[4].name} is missing or not a regular file",
        f"{shards[5].name} is damaged: the checksum of '",
    ]
    assert all(line.startswith(f"  {text}") for line, text in zip(lines, expected, strict=True))
    assert "; so are 1 more of its " in lines[6]
    assert "restore its files from a copy" in caught.value.hint


def test_files_that_changed_places_are_found(saved: Path, tmp_path: Path) -> None:
    first, second = sorted(saved.glob("optimizer-*"))[:2]
    assert first.stat().st_size == second.stat().st_size, "the sizes would tell"
    contents = first.read_bytes(), second.read_bytes()
    for path, content in zip((second, first), contents, strict=True):
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{first.name}.*\n.*{second.name}"):
        check_checkpoint(saved)


def test_a_manifest_of_another_step_is_found(saved: Path) -> None:
    moved = saved.with_name("step-00000008")
    shutil.copytree(saved, moved)
    with pytest.raises(CheckpointError, match="is for step 7, the folder name for 8"):
        check_checkpoint(moved)


def _drop_tensor(content: dict[str, Any]) -> None:
    content["grids"][0]["names"].pop()


def _other_type(content: dict[str, Any]) -> None:
    content["grids"][0]["dtype"] = "int32"


def _other_files(content: dict[str, Any]) -> None:
    """The chunks of tensors are said to lie where those of others do."""
    numbers = range(len(content["files"]))
    for grid in content["grids"]:
        grid["files"] = [numbers[file - 1] for file in grid["files"]]


@pytest.mark.parametrize("change", [_drop_tensor, _other_type, _other_files])
def test_a_manifest_that_was_sealed_again_must_still_fit_the_files(
    saved: Path, edit_manifest: Edit, change: Callable[[dict[str, Any]], None]
) -> None:
    edit_manifest(saved, change)
    with pytest.raises(CheckpointError, match=r"manifest says|not match"):
        check_checkpoint(saved)
