"""What the single device computes, for the table of layouts and for the table of faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.parity.rows import Row, train_rank

from trainyard import architecture
from trainyard.simulate.parity import Outcome


@pytest.fixture(scope="session")
def references() -> dict[str, Outcome]:
    """Outcomes of the single device, by the run that made them."""
    return {}


@pytest.fixture
def train_alone(
    run_ranks: Callable[..., list[Outcome]], references: dict[str, Outcome]
) -> Callable[[Row], Outcome]:
    """Trains the run of a row on a single device, or gives what came of it before."""

    def train(row: Row) -> Outcome:
        run = row.build_run(sharded=False)
        key = f"{run.model_dump_json()} {row.computed_in}"
        if key not in references:
            (references[key],) = run_ranks(1, partial(train_rank, run, 1, row.computed_in))
        return references[key]

    return train


@pytest.fixture
def train_sharded(
    run_ranks: Callable[..., list[Outcome]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Row], list[Outcome]]:
    """Trains the run of a row in its layout; tensor ranks exchange pieces of few tokens."""

    def train(row: Row) -> list[Outcome]:
        run = row.build_run()
        n_tokens, is_fp8 = run.model.sequence_length // run.parallel.context, "fp8" in row.name
        least = 2 * n_tokens if run.train.micro_batch_size > 2 else n_tokens // 2
        monkeypatch.setattr(architecture, "PIECE_TOKENS", max(least, 16) if is_fp8 else least)
        sharded = partial(train_rank, row.build_run(), row.n_ranks, row.computed_in)
        return run_ranks(row.n_ranks, sharded)

    return train
