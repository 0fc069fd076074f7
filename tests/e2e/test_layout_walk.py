"""One run that changes its layout at every checkpoint, until each layout has followed each other.

    pytest tests/e2e/test_layout_walk.py --layouts 9

walks over nine layouts, 72 changes; three of them are enough for every day. Each change saves under
one layout and loads under another, on another number of ranks, and trains a step from there.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.e2e.test_layouts import (
    CLOSE,
    LAYOUTS,
    corpus,
    lines,
    losses,
    run_of,
    said,
    stop_at,
    train,
)

from trainyard.checkpoint.format import read_manifest

__all__ = ["corpus"]  # a fixture
WALKED: dict[str, tuple[int, list[str]]] = {
    "one device": (1, []),
    **{
        name: LAYOUTS[name]
        for name in (
            *("data 2, ZeRO 3", "tensor 2 x pipeline 2", "interleaved", "data 2 x tensor 2"),
            *("context 2", "data 2, ZeRO 0", "data 2, ZeRO 1", "data 2, ZeRO 2"),
        )
    },
}
CLOSE_ON_LONG_WALKS = 10 * CLOSE  # differences grow with the steps, tenfold in a hundred


def walk(n_places: int) -> list[int]:
    """Gives a walk that goes from each place to each other exactly once.

    >>> walk(3)
    [0, 1, 2, 0, 2, 1, 0]
    """
    left = {start: [end for end in range(n_places) if end != start] for start in range(n_places)}
    path, found = [0], []
    while path:  # Hierholzer's algorithm
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            found.append(path.pop())
    return found[::-1]


def test_a_walk_visits_every_pair_once() -> None:
    for n_places in (2, 3, 4, 9):
        steps = walk(n_places)
        pairs = list(itertools.pairwise(steps))
        assert len(set(pairs)) == len(pairs) == n_places * (n_places - 1)


@pytest.mark.dist
@pytest.mark.slow
def test_every_layout_goes_on_from_every_other(
    corpus: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    names = list(WALKED)[: request.config.getoption("--layouts")]
    path = [names[place] for place in walk(len(names))]
    n_steps = len(path)
    length = [f"train.length='{n_steps} steps'", f"schedule.decay='{n_steps} steps'"]
    length += ["evaluate.interval=0", "evaluate.sample_interval=0", "checkpoint.keep_last=1"]
    alone = tmp_path / "alone"
    alone.mkdir()
    assert train(alone, run_of(corpus, *length)) == [0], said(alone, 0)

    folder = tmp_path / "walk"
    folder.mkdir()
    for name in path:
        n_ranks, overrides = WALKED[name]
        run = run_of(corpus, *length, *overrides)
        codes = train(folder, run, n_ranks, stop_at(1, rank=n_ranks - 1))
        assert codes == [0] * n_ranks, (name, said(folder, 0))
    assert [line["step"] for line in lines(folder, "train")] == list(range(1, n_steps + 1))
    bound = CLOSE if n_steps < 20 else CLOSE_ON_LONG_WALKS
    assert losses(folder) == pytest.approx(losses(alone), rel=bound)
    last = read_manifest(folder / "checkpoints" / f"step-{n_steps:08d}")
    assert (
        last.consumed_sequences
        == read_manifest(alone / "checkpoints" / f"step-{n_steps:08d}").consumed_sequences
    )
