"""What one rank says reaches all others whole, in as few messages as if it were short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainyard.parallel.mesh import Mesh, StopVote
from trainyard.simulate.accounting import Accounting
from trainyard.topology import Topology

LONG = "".join(f"tensor {number} differs; " for number in range(500))
MULTIBYTE = 1_500 * "größer 語 😀 "
TEXTS = ["", "93 there is a file STOP", LONG, MULTIBYTE, "ends in zeros \0\0", "a name \udcff"]


def agree(texts: dict[int, str]) -> tuple[str | None, int]:
    """Returns what this rank hears, and how many collectives it called."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(Topology(shard=3), rank, torch.device("cpu"))
    with Accounting() as count:
        found = mesh.agree(texts.get(rank))
    return found, count.calls.total()


@pytest.mark.parametrize("text", TEXTS, ids=["empty", "short", "long", "multibyte", "zeros", "odd"])
def test_a_message_arrives_whole(run_ranks: Callable[..., list[Any]], text: str) -> None:
    heard = run_ranks(3, agree, {1: text, 2: "later"})
    assert heard == [(text, 2)] * 3


def test_no_message_costs_one_collective(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(3, agree, {}) == [(None, 1)] * 3


def test_the_lowest_rank_is_heard_however_long_its_message(
    run_ranks: Callable[..., list[Any]],
) -> None:
    assert run_ranks(3, agree, {0: LONG, 2: "short"}) == [(LONG, 2)] * 3


def vote(texts: dict[int, str]) -> str | None:
    rank = torch.distributed.get_rank()
    return StopVote(Mesh(Topology(shard=2), rank, torch.device("cpu"))).cast(texts.get(rank))


def test_a_long_request_arrives_whole(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, vote, {1: MULTIBYTE}) == [MULTIBYTE] * 2
