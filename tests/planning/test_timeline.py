from __future__ import annotations

import itertools

import pytest

from trainyard.config import rules
from trainyard.config.load import load_run
from trainyard.layout.ranks import takes_micro_batches
from trainyard.planning.search import CHUNKS
from trainyard.planning.timeline import bubble_passes, lay_out


@pytest.mark.parametrize(
    ("schedule", "n_ranks", "n_micro_batches", "chunks", "bubble"),
    [
        ("1f1b", 1, 3, 1, 0),
        ("1f1b", 4, 8, 1, 9),  # (p - 1) forward and backward passes, 3 s each
        ("gpipe", 4, 8, 1, 9),
        ("interleaved", 4, 8, 2, 4.5),  # divided by chunks
        ("interleaved", 4, 6, 3, 3),
        ("zero_bubble", 4, 8, 1, 3),  # a third
        ("zero_bubble", 4, 8, 2, 1.5),
    ],
)
def test_bubbles_are_those_of_the_formulas(
    schedule: str, n_ranks: int, n_micro_batches: int, chunks: int, bubble: float
) -> None:
    seconds = [(1 / chunks, 2 / chunks)] * (n_ranks * chunks)
    ranks = lay_out(schedule, n_ranks, n_micro_batches, seconds)
    end = max(passes[-1].end for passes in ranks)
    assert end == pytest.approx(3 * n_micro_batches + bubble)
    for passes in ranks:
        assert sum(each.end - each.start for each in passes) == pytest.approx(3 * n_micro_batches)
        for before, after in itertools.pairwise(passes):
            assert before.end <= after.start + 1e-9


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        *(("gpipe", 1), ("1f1b", 1)),
        *(("interleaved", chunks) for chunks in (*CHUNKS, 5)),
        *(("zero_bubble", chunks) for chunks in (1, 2, 3, 8)),
    ],
)
def test_bubbles_are_those_of_the_timeline(schedule: str, chunks: int, n_ranks: int) -> None:
    run = load_run("tiny").run
    changes: rules.Changes = {
        "parallel.schedule": schedule,
        "parallel.pipeline": n_ranks,
        "parallel.chunks": chunks,
    }
    run = rules.change(run, changes)
    counts = [n for n in range(1, 2 * n_ranks + 2) if takes_micro_batches(run, n)]
    assert schedule == "1f1b" or min(counts) == 1
    seconds = [(1 / chunks, 2 / chunks)] * (n_ranks * chunks)
    for n in counts:
        end = max(passes[-1].end for passes in lay_out(schedule, n_ranks, n, seconds))
        assert end == pytest.approx(3 * (n + bubble_passes(run.parallel, n))), n


def test_passes_wait_for_what_they_need() -> None:
    ranks = lay_out("interleaved", 2, 4, [(1.0, 2.0), (1.5, 2.5), (1.0, 2.0), (2.0, 3.0)])
    at = {(e.kind, e.stage, e.micro_batch): e for passes in ranks for e in passes}
    assert len(at) == 4 * 4 * 2
    for (kind, stage, micro), each in at.items():
        if kind == "F" and stage > 0:
            assert each.start >= at["F", stage - 1, micro].end
        if kind == "B":
            needs = at["B", stage + 1, micro] if stage < 3 else at["F", 3, micro]
            assert each.start >= needs.end
