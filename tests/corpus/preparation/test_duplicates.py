"""Tests of de-duplication: keys that are stable, masks that are those of a dictionary, recall."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.command import peak_bytes

from trainyard.config.corpus import Deduplicate, NearDeduplicate
from trainyard.corpus.preparation import duplicates
from trainyard.corpus.preparation.duplicates import compared_columns, document_keys, find_repeats

EXACT = Deduplicate(kind="deduplicate")
NEAR = NearDeduplicate(kind="near_deduplicate")
Step = Deduplicate | NearDeduplicate
Keys = npt.NDArray[np.uint64]


def repeats(step: Step, units: Sequence[Keys], folder: Path, memory_bytes: int) -> list[list[bool]]:
    files = [folder / f"{number}.npy" for number in range(len(units))]
    for file, keys in zip(files, units, strict=True):
        np.save(file, keys)
    mask = np.zeros(sum(map(len, units)), np.bool_)
    for columns in compared_columns(step):
        ends = find_repeats(columns, files, folder / "mask", memory_bytes)
        mask |= np.fromfile(folder / "mask", np.bool_)[: len(mask)]
    assert not [entry for entry in folder.iterdir() if entry.is_dir()]
    return [mask[start:end].tolist() for start, end in pairwise(ends)]


def by_dictionary(step: Step, keys: Keys) -> list[bool]:
    """What find_repeats is to find, in memory."""
    seen, mask = set[tuple[int, ...]](), []
    for row in keys.tolist():
        marked = [tuple(row)] if step == EXACT else list(enumerate(row))
        mask.append(any(key in seen for key in marked))
        seen.update(marked)
    return mask


def flat(masks: list[list[bool]]) -> list[bool]:
    return list(chain.from_iterable(masks))


def all_repeats(step: Step, texts: list[str]) -> list[bool]:
    return by_dictionary(step, document_keys(step, texts))


# Few different keys, so that they meet; low and high ones, so that they fall in all partitions.
some_keys = st.sampled_from([0, 1, 2**40, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(some_keys, some_keys), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    memory_bytes=st.sampled_from([1, 200, 1000, 10**6]),
    step=st.sampled_from([EXACT, NearDeduplicate(kind="near_deduplicate", bands=2)]),
)
def test_any_memory_and_any_units_give_what_a_dictionary_gives(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int]],
    cuts: list[int],
    memory_bytes: int,
    step: Step,
) -> None:
    keys = np.array(rows, np.uint64).reshape(-1, 2)
    units = np.split(keys, sorted(min(cut, len(rows)) for cut in cuts))
    masks = repeats(step, units, tmp_path_factory.mktemp("units"), memory_bytes)
    assert [len(mask) for mask in masks] == [len(unit) for unit in units]
    assert flat(masks) == by_dictionary(step, keys)


@pytest.mark.parametrize(("step", "n_columns"), [(EXACT, 2), (NEAR, 14)])
def test_no_document_has_no_key(tmp_path: Path, step: Step, n_columns: int) -> None:
    keys = document_keys(step, [])
    assert keys.shape == (0, n_columns)
    assert repeats(step, [keys, keys], tmp_path, 10**6) == [[], []]


@pytest.mark.parametrize("different", [200_000, 1])
def test_memory_is_bounded_however_many_documents_there_are(tmp_path: Path, different: int) -> None:
    keys = np.random.default_rng(1).integers(0, 2**64, (different, 2), dtype=np.uint64)
    keys = np.asfortranarray(np.resize(keys, (200_000, 2)))
    files = [tmp_path / f"{number}.npy" for number in range(4)]
    for file in files:
        np.save(file, keys)
    memory_bytes = 4 * 2**20
    peak = peak_bytes(lambda: find_repeats([0, 1], files, tmp_path / "mask", memory_bytes))
    assert peak < 1.25 * memory_bytes
    assert int(np.fromfile(tmp_path / "mask", np.bool_).sum()) == 800_000 - different


def test_more_partitions_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_PARTITIONS_PER_PASS", 3)
    keys = np.random.default_rng(1).integers(0, 2**64, (500, 2), dtype=np.uint64)
    keys[100:200] = keys[300:400]
    masks = repeats(EXACT, [keys[:250], keys[250:]], tmp_path, 2000)
    assert flat(masks) == by_dictionary(EXACT, keys)
    assert sum(flat(masks)) == 100


def test_exact_keys_differ_with_every_character() -> None:
    texts = ["", " ", "a", "A", "a ", "a\n", "é", "e\u0301", "a"]
    assert all_repeats(EXACT, texts) == [False] * 8 + [True]


@pytest.mark.parametrize(
    ("first", "second", "like"),
    [
        ("The cat sat on the mat today", "the CAT... sat, on\nthe mat - today!", True),
        ("He said \u201cso\u201d: go there \u2014 now", "he said so go there now", True),
        ("two words", "two  words.", True),
        ("two words", "words two", False),
        ("two words", "two words more", False),
        ("word", "wor d", False),
        ("!!!", "!!!", True),
        ("!!!", "???", False),
        ("", "", True),
        ("", " ", False),
        ("北京是中国的首都", "北京、是中国的首都。", True),
        ("СЪЕШЬ ЖЕ ЕЩЁ ЭТИХ", "съешь же ещё этих", True),
    ],
)
def test_near_keys_look_at_words_alone(first: str, second: str, like: bool) -> None:
    keys = document_keys(NEAR, [first, "something else altogether", second])
    assert (keys[0] == keys[2]).all() == like
    assert (keys[0] == keys[2]).any() == like


def test_a_character_without_spaces_is_a_word() -> None:
    # 300 Chinese characters in one "sentence"; were it one word, one change would change all.
    text = "".join(chr(0x4E00 + 37 * n) for n in range(300))
    changed = text[:150] + "的" + text[151:]
    assert all_repeats(NEAR, [text, changed]) == [False, True]


def test_keys_do_not_depend_on_the_company(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{n % 97}" for n in range(3000)]
    texts = [" ".join(words[start : start + size]) for start, size in enumerate([3, 900, 1, 0, 40])]
    together = document_keys(NEAR, texts)
    assert (np.concatenate([document_keys(NEAR, [text]) for text in texts]) == together).all()
    monkeypatch.setattr(duplicates, "_RUNS_PER_CALL", 500)
    assert (document_keys(NEAR, texts) == together).all()
    assert np.concatenate([together, together]).flags.f_contiguous


def test_keys_depend_on_the_seed() -> None:
    other = NearDeduplicate(kind="near_deduplicate", seed=2)
    assert not (document_keys(NEAR, ["a b"]) == document_keys(other, ["a b"])).any()


KEYS_IN_A_PROCESS = """
import numpy, zlib
from trainyard.config.corpus import Deduplicate, NearDeduplicate
from trainyard.corpus.preparation.duplicates import document_keys
texts = [" ".join(str(n * n % 1009) for n in range(size)) for size in (0, 1, 4, 50, 300, 5000)]
texts.append("naïve Ünïcode, 漢字 and ไทย")
for step in (Deduplicate(kind="deduplicate"), NearDeduplicate(kind="near_deduplicate")):
    print(zlib.crc32(document_keys(step, texts).astype("<u8").tobytes()))
"""


@pytest.mark.parametrize("kernel", ["scalar", "avx2", ""])
def test_keys_are_the_same_in_every_process_and_on_every_machine(kernel: str) -> None:
    # A change of these numbers means that keys made by another version are worth nothing.
    environment = {**os.environ, "PYTHONHASHSEED": str(len(kernel)), "RENSA_FORCE_KERNEL": kernel}
    command = [sys.executable, "-c", KEYS_IN_A_PROCESS]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["3066076312", "273949803"]


def test_recall_follows_the_formula_in_the_manual() -> None:
    draw, n_pairs = np.random.default_rng(1), 500
    texts = []
    for _ in range(n_pairs):  # 280 of 360 different words in common: a similarity of 0.778
        words = [f"w{n}" for n in draw.integers(0, 2**60, 360)]
        texts += [" ".join(words[:320]), " ".join(words[40:])]
    step = NearDeduplicate(kind="near_deduplicate", words=1)
    keys = document_keys(step, texts)
    hits = int((keys[::2] == keys[1::2]).any(axis=1).sum())
    expected = 1 - (1 - (280 / 360) ** step.rows) ** step.bands
    assert hits / n_pairs == pytest.approx(expected, abs=0.04)  # two standard deviations


def test_planted_copies_are_found_among_novels(shared_data: Path, tmp_path: Path) -> None:
    with (shared_data / "corpora" / "novels.jsonl").open("rb") as file:
        novels = [json.loads(line)["text"] for line, _ in zip(file, range(1000), strict=False)]
    draw = random.Random(1)
    texts = novels + draw.sample(novels, 50)
    for share in (0.01, 0.3):
        texts += [change_words(text, share, draw) for text in draw.sample(novels, 200)]
    exact, alike = (
        flat(repeats(step, [document_keys(step, texts)], tmp_path, 10**5)) for step in (EXACT, NEAR)
    )
    assert exact == [False] * 1000 + [True] * 50 + [False] * 400
    # A run of five words survives with probability 0.99^5 or 0.7^5: similarities of 0.91 and 0.09.
    assert alike == [False] * 1000 + [True] * 250 + [False] * 200


def change_words(text: str, share: float, draw: random.Random) -> str:
    """Replaces a share of the words by others, anywhere in a document."""
    words = re.split(r"(\W+)", text)
    places = range(0, len(words), 2)
    for place in draw.sample(places, round(share * len(places))):
        words[place] = f"changed{place}"
    return "".join(words)
