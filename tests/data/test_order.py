"""The order of a run: Megatron-LM's own arrays and sequences, and every refusal."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.data import order as subject
from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import IndexedWriter
from trainyard.data.order import Blend, SequenceOrder, SequenceSettings, parse_split, repeats_alike
from trainyard.errors import DataError

CASES = ("949_50_1", "949_50_1_seq128", "969_30_1", "no_weights", "per_split", "single")
CUT = SequenceSettings(8, 1234)


def build_order(*arguments: Any) -> dict[Any, SequenceOrder | None]:
    """Builds the orders of a run, in a cache of their own if none is given."""
    if isinstance(arguments[-1], IndexCache):
        return {**subject.build_order(*arguments)}
    with tempfile.TemporaryDirectory() as folder:
        return {**subject.build_order(*arguments, IndexCache(Path(folder)))}


@pytest.mark.parametrize("weights", [(), (0.3, 0.7)])
def test_passes_are_counted_without_the_order(tmp_path: Path, weights: tuple[float, ...]) -> None:
    prefixes = tuple(
        write_corpus(tmp_path / name, [5 + length + number for length in range(120)])
        for number, name in enumerate("ab")
    )
    blend = Blend(prefixes=prefixes if weights else prefixes[:1], weights=weights)
    sizes = (200, 500, 900, 1000, 1900, 5000)
    orders = [build_order(blend, None, (size, 0, 0), CUT)["train"] for size in sizes]
    n_alike = 0
    for one in filter(None, orders):
        for size, other in zip(sizes, filter(None, orders), strict=True):
            plans = [[corpus.plan for corpus in order.corpora] for order in (one, other)]
            assert repeats_alike(one, blend, size) == (plans[0] == plans[1])
            n_alike += plans[0] == plans[1]
    assert len(sizes) < n_alike < len(sizes) ** 2


def sha256(array: np.ndarray, dtype: str) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, dtype).tobytes()).hexdigest()


def golden_orders(case: dict[str, Any], folder: Path) -> dict[Any, SequenceOrder | None]:
    def blend(given: Any) -> Blend:
        prefixes, weights = given
        paths = tuple(str(folder / "data" / prefix) for prefix in prefixes)
        return Blend(prefixes=paths, weights=tuple(weights or ()))

    blends = blend(case["blend"]) if case["blend"] else tuple(map(blend, case["blend_per_split"]))
    cut = SequenceSettings(case["seq"], case["seed"])
    sizes = [size or 0 for size in case["sizes"]]  # a split of one pass, None, is not built here
    return build_order(blends, case["split"], tuple(sizes), cut)


@pytest.mark.parametrize("name", CASES)
def test_megatrons_order(shared_data: Path, name: str) -> None:
    folder = shared_data / "golden"
    case = json.loads((folder / f"synth_{name}.json").read_text())
    with np.load(folder / f"synth_{name}.npz", allow_pickle=False) as npz:
        arrays = dict(npz)
    orders = golden_orders(case, folder)
    if case["split"]:
        assert list(map(list, parse_split(case["split"]))) == case["split_matrix"]
    assert set(orders) == set(case["splits"])
    for (split, facts), size in zip(case["splits"].items(), case["sizes"], strict=True):
        order = orders[split]
        assert (order is None) == (size is None)
        if order is not None:
            assert len(order) == facts["length"]
            check_arrays(order, facts)
            check_sequences(order, split, arrays)


def check_arrays(order: SequenceOrder, facts: dict[str, Any]) -> None:
    for corpus, expected in zip(order.corpora, facts["mid"], strict=True):
        assert len(corpus) == expected["num_samples_built"]
        assert corpus.plan.n_epochs == expected["num_epochs"]
        assert corpus.plan.shuffle_last_epoch_apart == expected["separate_final_epoch"]
        for array, kind, name, key in (
            (corpus.document_index, "<i4", "document_index", "sha256"),
            (corpus.sequence_index, "<i8", "sample_index", "sha256_as_i8"),
            (corpus.shuffle_index, "<u4", "shuffle_index", "sha256_as_u4"),
        ):
            assert list(array.shape) == expected[name]["shape"]
            assert array.dtype.name == expected[name]["dtype"]
            assert sha256(array, kind) == expected[name][key], name
    if "weights" not in facts:
        assert order.dataset_index is None
        return
    assert order.dataset_index is not None
    assert order.dataset_sample_index is not None
    assert sha256(order.dataset_index, "<i2") == facts["dataset_index_full_sha256"]
    assert sha256(order.dataset_sample_index, "<i8") == facts["dataset_sample_index_full_sha256"]


def check_sequences(order: SequenceOrder, split: str, arrays: dict[str, np.ndarray]) -> None:
    rows = order.sequences(0, len(arrays[f"{split}_tokens_sha256_16"]))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    for kind, values in (("tokens", tokens), ("labels", labels)):
        digests = [hashlib.sha256(row.tobytes()).digest()[:16] for row in values]
        assert digests == [row.tobytes() for row in arrays[f"{split}_{kind}_sha256_16"]]
    first = arrays[f"{split}_first16_tokens_labels"]
    assert (np.stack([tokens, labels], 1)[: len(first)] == first).all()


def test_one_sequence_is_a_row_of_many(shared_data: Path) -> None:
    folder = shared_data / "golden"
    case = json.loads((folder / "synth_949_50_1.json").read_text())
    order = golden_orders(case, folder)["valid"]
    assert order is not None
    rows = order.sequences(100, 700)
    for index in (100, 350, 799):
        assert (order.sequences(index, 1) == rows[index - 100]).all()
    assert order.sequences(2000, 0).shape == (0, 1025)
    for start, count in ((-1, 1), (1999, 2), (0, 2001)):
        with pytest.raises(IndexError, match=f"sequences {start} to {start + count} of 2000"):
            order.sequences(start, count)


def write_corpus(prefix: Path, lengths: list[int]) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(1, sum(lengths) + 1), np.array(lengths))
    return str(prefix)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str]:
    return write_corpus(tmp_path / "a", [20] * 30), write_corpus(tmp_path / "b", [30] * 30)


def everything(orders: dict[Any, SequenceOrder | None]) -> list[Any]:
    return [order and order.sequences(0, len(order)).tolist() for order in orders.values()]


def test_a_second_start_reads_the_first_ones_arrays(
    tmp_path: Path, corpora: tuple[str, str]
) -> None:
    cache = tmp_path / "cache"
    blend = Blend(prefixes=corpora, weights=(1.0, 3.0))
    arguments = (blend, "8,1,1", (90, 10, 5), CUT, IndexCache(cache))
    first = everything(build_order(*arguments))
    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(files) == 2 * 3 * 3 + 3 * 2 + 2  # arrays, blends, remembered contents
    assert everything(build_order(*arguments)) == first
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
    assert everything(build_order(*arguments[:-1])) == first


def test_replaced_data_gets_a_new_order(tmp_path: Path, corpora: tuple[str, str]) -> None:
    arguments = (Blend(prefixes=corpora), "8,1,1", (90, 10, 5), CUT)
    build_order(*arguments, IndexCache(tmp_path / "cache"))
    write_corpus(Path(corpora[0]), [10, 30] * 15)  # the same size, other documents
    cached = everything(build_order(*arguments, IndexCache(tmp_path / "cache")))
    assert cached == everything(build_order(*arguments))


def _flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


DAMAGES = {
    "cut": lambda content: content[:-2],
    # As after a power loss: the header and the size are right.
    "zeros": lambda content: content[:128] + bytes(len(content) - 128),
    "first bit": lambda content: _flipped(content, 128 * 8),
    "last bit": lambda content: _flipped(content, len(content) * 8 - 1),
    "header": lambda content: _flipped(content, 20 * 8),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_arrays_are_built_again(
    tmp_path: Path, corpora: tuple[str, str], damage: str
) -> None:
    folder = tmp_path / "cache"
    arguments = (Blend(prefixes=corpora, weights=(1.0, 3.0)), "8,1,1", (90, 10, 5), CUT)
    first = everything(build_order(*arguments, IndexCache(folder)))
    for path in sorted(folder.glob("*_index.npy")):
        intact = path.read_bytes()
        path.write_bytes(DAMAGES[damage](intact))
        assert everything(build_order(*arguments, IndexCache(folder))) == first
        assert path.read_bytes() == intact


@pytest.mark.parametrize("change", [{"seed": 5}, {"sequence_length": 9}, {"split": "7,2,1"}])
def test_other_settings_get_another_order(
    tmp_path: Path, corpora: tuple[str, str], change: dict[str, Any]
) -> None:
    def build(split: str = "8,1,1", seed: int = 1, sequence_length: int = 8) -> list[Any]:
        cut = SequenceSettings(sequence_length, seed)
        blend, cache = Blend(prefixes=corpora, weights=(1, 3)), IndexCache(tmp_path / "cache")
        orders = build_order(blend, split, (90, 10, 5), cut, cache)
        return everything(orders)

    build()
    assert build(**change) != build()


@pytest.mark.parametrize(
    ("n_corpora", "weights", "too_long"), [(1, (), 50), (2, (0.3, 0.7), 70), (2, (), None)]
)
def test_within_one_pass_the_order_does_not_depend_on_the_size(
    tmp_path: Path, n_corpora: int, weights: tuple[float, ...], too_long: int | None
) -> None:
    """A run that is extended reads on as one begun with the greater length; see docs."""
    # 47 sequences each
    prefixes = [write_corpus(tmp_path / f"{n}", [20, 5, 11, 2, 9] * 8) for n in range(n_corpora)]
    blend = Blend(prefixes=tuple(prefixes), weights=weights)

    def first(size: int) -> np.ndarray:
        order = build_order(blend, "1", (size, 0, 0), CUT)["train"]
        assert order is not None
        return order.sequences(0, 30)

    assert np.array_equal(first(30), first(45))
    # A blend without weights starts over after its one pass.
    assert np.array_equal(first(30), first(too_long or 450)) == (too_long is None)


def test_few_documents_are_split_by_tokens() -> None:
    by_tokens = [(1, "949,50,1"), (99, "8,1,1")]
    by_tokens += [(100, "999,1,0")]  # none to validate on
    by_documents = [(100, "8,1,1"), (500, "949,50,0"), (1, "1"), (1, "0,0,5")]
    by_documents += [(500, "949,50,1")]  # none for the test split alone
    for cases, expected in ((by_tokens, True), (by_documents, False)):
        for n_documents, split in cases:
            assert subject.splits_by_tokens(n_documents, parse_split(split)) == expected


@pytest.mark.parametrize("lengths", [[1000], [3, 900, 97], [50] * 20, [840, 120, 40]])
def test_a_split_by_tokens_gives_each_token_to_one_split(
    tmp_path: Path, lengths: list[int]
) -> None:
    """Sequences of one token and its label, so none is left over: token j of the file is j + 1."""
    blend = Blend(prefixes=(write_corpus(tmp_path / "corpus", lengths),))
    cut = SequenceSettings(1, 1)
    arguments = (blend, "8,1,1", (799, 99, 99), cut, IndexCache(tmp_path / "cache"))
    for _ in range(2):  # built, and read from the cache
        train, valid, test = map(np.array, everything(build_order(*arguments)))
        spans = range(1, 801), range(801, 901), range(901, 1001)
        for rows, tokens in zip((train, valid, test), spans, strict=True):
            assert len(np.unique(rows[:, 0])) == len(rows) == len(tokens) - 1
            assert np.unique(rows).tolist() == list(tokens)


def test_a_blend_may_split_one_file_by_tokens(tmp_path: Path) -> None:
    """Each file follows its own rule, so a second one changes nothing in the first."""
    many = write_corpus(tmp_path / "many", [9] * 200)
    few = write_corpus(tmp_path / "few", [900])
    blends = Blend(prefixes=(many, few), weights=(1, 1)), Blend(prefixes=(many,), weights=(1,))
    together = build_order(blends[0], "9,1,0", (40, 8, 0), CUT)["valid"]
    alone = build_order(blends[1], "9,1,0", (20, 4, 0), CUT)["valid"]
    assert together is not None and alone is not None
    assert sorted({len(corpus.dataset) for corpus in together.corpora}) == [1, 200]
    assert (together.corpora[0].document_index == alone.corpora[0].document_index).all()


def test_splits() -> None:
    assert parse_split("98, 2, 0") == ((0.0, 0.98), (0.98, 1.0), None)
    assert parse_split("1") == ((0.0, 1.0), None, None)
    assert parse_split("0,.5,.5") == (None, (0.0, 0.5), (0.5, 1.0))


def test_an_empty_part_that_is_wanted_is_refused(corpora: tuple[str, str]) -> None:
    problem = "7 test sequences requested, but split '9,1,0' leaves test empty"
    with pytest.raises(DataError, match=problem):
        build_order(Blend(prefixes=corpora), "9,1,0", (50, 5, 7), CUT)
    with pytest.raises(DataError, match="b: the test split gets none of its 900 tokens"):
        build_order(Blend(prefixes=corpora[1:]), "9999,0.5,0.5", (50, 0, 7), CUT)


def test_a_corpus_drawn_too_often_is_refused(tmp_path: Path) -> None:
    """Two sequences become eleven, one from each at least, and so more than one from the heavy."""
    prefixes = tuple(write_corpus(tmp_path / name, [80]) for name in "abcdefghijk")
    blend = Blend(prefixes=prefixes, weights=(10.0, *[1.0] * 10))
    arguments = (blend, "1", (2, 0, 0), CUT, IndexCache(tmp_path / "cache"))
    assert build_order(*arguments)["train"] is not None
    write_corpus(tmp_path / "a", [8])
    problem = r"the blend draws 5 sequences from .*a, which has 2"
    with pytest.raises(DataError, match=problem) as caught:
        build_order(*arguments)
    assert "request more than 2: too few for 11 corpora" in caught.value.hint


def follow_the_rule(weights: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """One draw after another in Python's floats, which are C's doubles."""
    counts = [0] * len(weights)
    corpus, position = [], []
    for draw in range(size):
        best, largest = -1, -math.inf
        for number, weight in enumerate(weights.tolist()):
            lag = weight * float(max(draw, 1)) - counts[number]
            if lag > largest:
                best, largest = number, lag
        corpus.append(best)
        position.append(counts[best])
        counts[best] += 1
    return corpus, position


def check(weights: np.ndarray, size: int) -> None:
    corpus, position = subject.build_blend_index(weights, size)
    expected_corpus, expected_position = follow_the_rule(weights, size)
    assert (corpus.dtype, position.dtype) == (np.int16, np.int64)
    assert corpus.tolist() == expected_corpus
    assert position.tolist() == expected_position


positive = st.one_of(st.floats(1e-6, 1e6), st.integers(1, 9).map(float))


@given(weights=st.lists(positive, min_size=1, max_size=12), size=st.integers(1, 5000))
@settings(max_examples=20)
def test_any_weights(weights: list[float], size: int) -> None:
    check(np.array(weights) / np.sum(weights), size)


@pytest.mark.parametrize("weights", [(0.35, 0.65), (0.5, 0.5), (1 / 3, 2 / 3), (0.1, 0.7, 0.2)])
def test_rounding_decides_ties_as_it_does_one_by_one(weights: tuple[float, ...]) -> None:
    check(np.array(weights), 60_000)
