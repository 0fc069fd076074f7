"""Saved under one layout, loaded under another: ranks are threads, tensors are cut by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.conftest import flip_bit
from tests.circles import everyday
from tests.layouts import Layout, read_layout
from tests.ranks import Agreement
from torch import Tensor

from trainyard.architecture import (
    padded_vocabulary_size,
    parameter_shapes,
    parameters_of,
    stage_layers,
)
from trainyard.checkpoint import load
from trainyard.checkpoint.format import MANIFEST, load_manifest, read_manifest
from trainyard.checkpoint.load import (
    build_model_from_checkpoint,
    load_into,
    load_tensors,
)
from trainyard.checkpoint.save import SavingRank, save_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import CheckpointError, MachineError
from trainyard.parallel.placement import Placement, whole

VOCABULARY, MOST_ROWS = 300, 512
MOMENTS = ("exp_avg", "exp_avg_sq")


# Widths 12, 20, 36 and 5: most data ranks get uneven parts, the last ones none.
LAYOUTS = {
    name: read_layout(name)
    for name in (
        *("dp1", "dp3", "dp5 zero1", "dp8 zero3", "dp6 hsdp2 zero2", "dp2 cp2 zero3"),
        *("tp2", "tp4", "dp3 tp4 zero1"),
        *("pp3", "dp3 pp2 interleaved zero1", "dp4 hsdp2 pp2 tp2 zero1"),
    )
}


@dataclass(frozen=True)
class Held:
    """What a rank holds of one tensor."""

    values: Tensor
    placement: Placement
    writes: bool


@pytest.fixture(scope="module")
def run() -> Run:
    sizes = ("n_layers=4", "d_model=12", "n_heads=4", "d_ff=20", "sequence_length=5")
    overrides = [f"model.{size}" for size in (*sizes, f"vocabulary_size={VOCABULARY}")]
    return load_run("tiny", [*overrides, "tokenizer.path="]).run


@pytest.fixture(scope="module")
def wholes(run: Run) -> dict[str, Tensor]:
    """Weights and moments by global name, with as many rows as the largest padding."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in parameter_shapes(run.model, MOST_ROWS).items():
        for whole_name in (f"model.{name}", *(f"optimizer.{name}.{m}" for m in MOMENTS)):
            tensors[whole_name] = torch.randn(shape, generator=generator)
    return tensors


def n_rows(run: Run, layout: Layout) -> int:
    return padded_vocabulary_size(run.model, layout.topology.tensor)


def names_of_stage(run: Run, stage: int, n_stages: int) -> list[str]:
    """Parameters of one stage; the last has a copy of the tied embedding."""
    bounds = [run.model.n_layers * i // n_stages for i in range(n_stages + 1)]
    prefixes = tuple(f"blocks.{i}." for i in range(bounds[stage], bounds[stage + 1]))
    prefixes += ("embedding.", "positions.") if stage == 0 else ()
    prefixes += ("embedding.", "final_norm.") if stage == n_stages - 1 else ()
    return [name for name in parameter_shapes(run.model, 1) if name.startswith(prefixes)]


def hold(run: Run, layout: Layout, wholes: Mapping[str, Tensor], rank: int) -> dict[str, Held]:
    """What a rank of a layout holds of whole tensors."""
    topology = layout.topology
    at = topology.coordinates(rank)
    zero = layout.parallel.get("zero_stage", 0)
    n_stages = topology.pipeline * layout.parallel.get("chunks", 1)
    held = {}
    dimensions = parameters_of(stage_layers(run.model, MOST_ROWS))
    for stage in range(at.pipeline, n_stages, topology.pipeline):
        for parameter in names_of_stage(run, stage, n_stages):
            dimension = dimensions[parameter].dimension
            is_copy = parameter == "embedding.weight" and stage > 0
            writes = at.replicate == 0 and not is_copy
            writes &= dimension is not None or at.tensor == 0
            writes &= zero > 0 or (at.shard, at.context) == (0, 0)
            for name in (f"model.{parameter}", *(f"optimizer.{parameter}.{m}" for m in MOMENTS)):
                value = wholes[name]
                if parameter == "embedding.weight":
                    value = value[: n_rows(run, layout)]
                place = whole(value.shape)
                if dimension is not None:
                    place = place.cut(dimension, at.tensor, topology.tensor)
                if zero > 0:
                    index = at.shard * topology.context + at.context
                    place = place.cut(0, index, topology.shard * topology.context)
                held[name] = Held(place.of(value), place, writes)
    return held


def call_ranks(n: int, call: Callable[[SavingRank], Any]) -> list[Any]:
    """Calls a function for each rank at once; gives results, or errors in their place."""
    agreement = Agreement(n)

    def one(rank: int) -> Any:
        try:
            return call(SavingRank(rank, n, partial(agreement.agree, rank)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


def save(
    folder: Path, facts: Any, run: Run, layout: Layout, wholes: Mapping[str, Tensor]
) -> list[Any]:
    def one(ranks: SavingRank) -> Path:
        held = {n: h for n, h in hold(run, layout, wholes, ranks.rank).items() if h.writes}
        tensors = {name: h.values for name, h in held.items()}
        places = {name: h.placement for name, h in held.items()}
        return save_checkpoint(folder, facts(ranks.rank), tensors, places, ranks)

    return call_ranks(layout.topology.n_ranks, one)


@pytest.fixture(scope="module")
def saved(run, wholes, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each layout, of the same tensors."""

    def facts(rank: int) -> Any:
        from trainyard.checkpoint.format import Facts

        dumped = run.model_dump(mode="json")
        return Facts(step=7, consumed_sequences=rank, consumed_tokens=0, run=dumped)

    paths = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("checkpoints")
        results = save(folder, facts, run, layout, wholes)
        assert results == [folder / "step-00000007"] * layout.topology.n_ranks
        paths[name] = results[0]
    return paths


@pytest.mark.parametrize("wanted", LAYOUTS)
@pytest.mark.parametrize("layout", everyday(LAYOUTS, ("dp8 zero3", "tp4", "pp3")))
def test_any_layout_loads_any_layout_bit_for_bit(saved, run, wholes, layout, wanted):
    rows = n_rows(run, LAYOUTS[layout])
    expected = {name: value.clone() for name, value in wholes.items()}
    for name, value in expected.items():
        if "embedding" in name:
            value[rows:] = -7.0  # stays as it was
    for rank in range(LAYOUTS[wanted].topology.n_ranks):
        held = hold(run, LAYOUTS[wanted], expected, rank)
        filled = {name: torch.full_like(h.values, -7.0) for name, h in held.items()}
        places = {name: h.placement for name, h in held.items()}
        load_into(saved[layout], filled, VOCABULARY, places)
        wrong = [name for name, h in held.items() if not torch.equal(filled[name], h.values)]
        assert not wrong, (rank, wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_layout_is_whole_and_nothing_in_it_is_twice(saved, run, wholes, layout):
    checkpoint = saved[layout]
    manifest = check_checkpoint(checkpoint).manifest
    assert manifest.consumed_sequences == 0, "the facts are not those of rank 0"
    assert manifest.tensors.keys() == wholes.keys()
    n_bytes = sum(
        value[: n_rows(run, LAYOUTS[layout])].nbytes if "embedding" in name else value.nbytes
        for name, value in wholes.items()
    )
    headers = sum(
        8 + int.from_bytes((checkpoint / name).read_bytes()[:8], "little")
        for name in manifest.files
    )
    assert sum(file.n_bytes for file in manifest.files.values()) == n_bytes + headers
    n_ranks = LAYOUTS[layout].topology.n_ranks
    assert f"model-00000-of-{n_ranks:05d}.safetensors" in manifest.files
    assert len(list(checkpoint.parent.iterdir())) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_reads_any_layout(saved, run, wholes, layout):
    model, loaded_run, manifest = build_model_from_checkpoint(saved[layout])
    assert (loaded_run, manifest.step, model.training) == (run, 7, False)
    whole_tensors = load_tensors(saved[layout])
    for name, parameter in model.named_parameters():
        assert torch.equal(whole_tensors[name], parameter), name
        assert torch.equal(wholes[f"model.{name}"][: len(parameter)], parameter), name


@pytest.fixture
def thirds(tmp_path, make_facts) -> Path:
    """A tensor of 12 rows, four of each of three ranks."""
    rows = torch.arange(24.0).reshape(12, 2)

    def one(ranks: SavingRank) -> Path:
        place = whole(rows.shape).cut(0, ranks.rank, 3)
        tensors = {"model.a": rows.chunk(3)[ranks.rank]}
        return save_checkpoint(tmp_path, make_facts(1), tensors, {"model.a": place}, ranks)

    return call_ranks(3, one)[0]


def load_half(checkpoint: Path, half: int) -> Tensor:
    place = whole((12, 2)).cut(0, half, 2)
    filled = torch.zeros(place.local_shape)
    load_into(checkpoint, {"model.a": filled}, 1, {"model.a": place})
    return filled


def test_damage_is_named_by_those_who_read_it(thirds):
    last = thirds / "model-00002-of-00003.safetensors"
    flip_bit(last, -1)
    assert load_half(thirds, 0)[-1].tolist() == [10.0, 11.0]
    for read in (lambda path: load_half(path, 1), load_tensors, check_checkpoint):
        with pytest.raises(
            CheckpointError, match=r"model-00002-.* is damaged: the checksum of 'mod"
        ):
            read(thirds)
    flip_bit(last, -1)
    flip_bit(last, 12)
    with pytest.raises(CheckpointError, match=r"model-00002-.*the sha256 of its header is"):
        check_checkpoint(thirds)


Change = Callable[[int, dict[str, Tensor], dict[str, Placement]], None]


def save_changed(folder: Path, make_facts: Any, change: Change) -> list[Any]:
    """Saves a tensor in halves of two ranks, after a change to what one of them gives."""

    def one(ranks: SavingRank) -> Path:
        place = whole((8,)).cut(0, ranks.rank, 2)
        tensors, places = {"model.a": torch.zeros(4)}, {"model.a": place}
        change(ranks.rank, tensors, places)
        return save_checkpoint(folder, make_facts(2), tensors, places, ranks)

    return call_ranks(2, one)


@pytest.fixture
def before(tmp_path, make_facts) -> Iterator[Path]:
    """An older checkpoint, which must be all there is in the end."""
    path = save_checkpoint(tmp_path, make_facts(1), {"model.a": torch.zeros(8)})
    yield path
    assert list(tmp_path.iterdir()) == [path]
    check_checkpoint(path)


def test_no_room_for_all_ranks_together_fails_all_before_anything_is_written(before, make_facts):
    def one(ranks: SavingRank) -> Path:
        tensors = {"model.a": torch.empty(2**58, device="meta")}
        return save_checkpoint(before.parent, make_facts(2), tensors, ranks=ranks)

    first, second = call_ranks(2, one)
    cannot = f"cannot write the checkpoint {before.parent}/step-00000002: "
    assert first.problem.startswith(f"{cannot}rank 0: a checkpoint of 1049624.6 TiB does not fit")
    assert (second.problem, second.hint) == (first.problem, first.hint)


def test_all_ranks_give_the_reason_of_a_folder_whose_name_is_not_utf8(tmp_path, make_facts):
    folder = tmp_path / "\udcff"

    def one(ranks: SavingRank) -> Path:
        tensors = {"model.a": torch.empty(2**58, device="meta")}
        return save_checkpoint(folder, make_facts(2), tensors, ranks=ranks)

    first, second = call_ranks(2, one)
    for failed in (first, second):
        with pytest.raises(MachineError, match=rf"rank 0: a checkpoint .* not fit in {folder}: "):
            raise failed
    assert list(folder.iterdir()) == []


def test_a_bug_on_one_rank_fails_all_and_stays_a_bug_there(before, make_facts):
    def change(rank, _tensors, places):
        if rank == 1:
            places["model.a"] = whole((9,))

    first, second = save_changed(before.parent, make_facts, change)
    assert isinstance(second, AssertionError)
    assert "step-00000002: rank 1: AssertionError" in first.problem
    assert first.hint.startswith("a bug in Trainyard: see the traceback of that rank")


def _set(
    wanted: int | None, tensor: Tensor | None = None, place: Placement | None = None
) -> Change:
    """Changes what one rank gives, or each."""

    def change(rank: int, tensors: dict[str, Tensor], places: dict[str, Placement]) -> None:
        if wanted in (None, rank):
            tensors |= {} if tensor is None else {"model.a": tensor}
            places |= {} if place is None else {"model.a": place}

    return change


BROKEN: dict[str, tuple[Change, str]] = {
    "a rank forgets its part": (
        lambda rank, tensors, places: tensors.clear() if rank == 1 else None,
        r"at \[0\] is a chunk of \[4\], not \[8\]",
    ),
    "two ranks write one part": (
        _set(None, torch.zeros(8), whole((8,))),
        r"tensor 'model\.a' of shape \[8\]: 2 chunks overlap, or leave a hole",
    ),
    "ranks disagree on the shape": (
        _set(1, None, Placement((9,), (5,), (4,))),
        r"'model\.a' is float32 \[8\] on one rank, float32 \[9\] on another",
    ),
    "ranks disagree on the type": (
        _set(1, torch.zeros(4).half()),
        r"'model\.a' is float32 \[8\] on one rank, float16 \[8\] on another",
    ),
}


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_fit_together_are_refused(before, make_facts, change, message):
    first, second = save_changed(before.parent, make_facts, change)
    with pytest.raises(ValueError, match=message):  # on the rank that joins them: a bug
        raise first
    with pytest.raises(MachineError, match=message):
        raise second


def test_large_parts_are_spread_over_files(tmp_path, make_facts, monkeypatch):
    monkeypatch.setattr("trainyard.checkpoint.save.limit_of_shards", lambda _n_bytes: 20)

    def one(ranks: SavingRank) -> Path:
        tensors = {f"model.{name}": torch.full((4,), float(ranks.rank)) for name in "ab"}
        places = dict.fromkeys(tensors, whole((8,)).cut(0, ranks.rank, 2))
        return save_checkpoint(tmp_path, make_facts(1), tensors, places, ranks)

    path, _ = call_ranks(2, one)
    assert list(read_manifest(path).files) == [
        f"model-0000{rank}-of-00002-0000{file}-of-00002.safetensors"
        for rank in range(2)
        for file in range(2)
    ]
    assert load_tensors(path)["b"].tolist() == [0.0] * 4 + [1.0] * 4


def test_a_rank_opens_only_the_files_of_its_chunks(tmp_path, make_facts, monkeypatch):
    """However many ranks saved; and it keeps no record of the chunks of others."""
    opened: list[str] = []
    read_header = load.read_header

    def count(path: Path, sha256: str) -> Any:
        opened.append(path.name)
        return read_header(path, sha256)

    monkeypatch.setattr(load, "read_header", count)
    names = [f"model.{n}" for n in range(8)]
    for n_ranks in (4, 16, 64):

        def one(ranks: SavingRank) -> Path:
            place = whole((2 * ranks.n_ranks, 3)).cut(0, ranks.rank, ranks.n_ranks)
            tensors = dict.fromkeys(names, torch.full((2, 3), float(ranks.rank)))
            places = dict.fromkeys(names, place)
            return save_checkpoint(tmp_path, make_facts(ranks.n_ranks), tensors, places, ranks)

        path = call_ranks(n_ranks, one)[0]
        manifest = load_manifest(path)
        # Eight tensors in as many chunks as ranks: one entry.
        assert [len(grid.files) for grid in manifest.grids] == [n_ranks]
        place = Placement((2 * n_ranks, 3), (3, 1), (2, 2))
        found = load.find_chunks(manifest, {"model.5": place})
        assert sum(map(len, found.values())) == 2
        filled = torch.zeros(2, 2)
        load_into(path, {"model.5": filled}, 1, {"model.5": place}, manifest)
        assert filled.tolist() == [[1.0, 1.0], [2.0, 2.0]]
        assert opened == [f"model-{rank:05d}-of-{n_ranks:05d}.safetensors" for rank in (1, 2)]
        opened.clear()


def test_the_manifest_grows_with_ranks_and_not_with_tensors(tmp_path, make_facts):
    """Of tensors held alike it has one entry, and of each only the name."""
    sizes = {}
    for n_tensors in (100, 200):

        def one(ranks: SavingRank, n: int = n_tensors) -> Path:
            place = whole((8, 2)).cut(0, ranks.rank, 4)
            tensors = {f"model.{i:03}": torch.zeros(2, 2) for i in range(n)}
            places = dict.fromkeys(tensors, place)
            return save_checkpoint(tmp_path, make_facts(n), tensors, places, ranks)

        path = call_ranks(4, one)[0]
        sizes[n_tensors] = (path / MANIFEST).stat().st_size
        check_checkpoint(path)
    assert 0 < sizes[200] - sizes[100] < 100 * len('"model.000",') + 100
