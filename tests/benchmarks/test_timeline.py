"""The simulation of a logged step, on logs that one can follow by hand."""

from __future__ import annotations

import pytest
from benchmarks.timeline import DeadlockError, Request, Timeline

AXIS = ["mark axis tensor", "all-reduce 0 4 group 2 0 -1", "mark step"]
OVERLAPPED = [
    *AXIS,
    "kernel 0 10 a",
    "record 0 a-is-done",
    "wait 1 a-is-done",
    "all-reduce 1 5 group 2 0 -1",
    "record 1 is-reduced",
    "kernel 0 3 b",
    "wait 0 is-reduced",
    "kernel 0 1 c",
]
"""a 0 to 10, then b to 13 beside the message, to 15; c follows both."""


def price(_rank: int, request: Request) -> float:
    return float(request.words[2])


def test_a_message_is_exposed_where_nothing_is_left_to_compute() -> None:
    timeline = Timeline([OVERLAPPED], price, host_seconds=0)
    assert timeline.seconds() == 16
    assert timeline.exposed(["tensor"]) == 2
    assert timeline.exposed(["shard"]) == 0
    assert timeline.busy() == {"kernel": 14, "tensor": 5}


def test_a_request_starts_once_the_host_has_asked_for_it() -> None:
    # Asked for at 4, 8, 12 and 16.
    assert Timeline([OVERLAPPED], price, host_seconds=4).seconds() == 20


def test_a_message_between_stages_waits_for_both() -> None:
    sender = ["mark step", "kernel 0 10 a", "send 0 2 pair 2 0 1"]
    receiver = ["mark step", "recv 0 2 pair 2 1 0", "kernel 0 5 b"]
    timeline = Timeline([sender, receiver], price, host_seconds=0)
    assert timeline.seconds() == 17
    assert timeline.exposed(["pipeline"]) == 2


def test_messages_of_a_group_are_one() -> None:
    group = ["group", "send 0 2 pair 2 0 1", "recv 0 3 pair 2 0 1", "end", "kernel 0 1 a"]
    peer = ["group", "recv 0 2 pair 2 1 0", "send 0 3 pair 2 1 0", "end"]
    timeline = Timeline([["mark step", *group], ["mark step", *peer]], price, host_seconds=0)
    assert timeline.seconds() == 4


def test_messages_in_another_order_on_either_side_never_end() -> None:
    one = ["mark step", "send 0 2 pair 2 0 1", "recv 0 3 other 2 0 1"]
    peer = ["mark step", "send 0 3 other 2 1 0", "recv 0 2 pair 2 1 0"]
    timeline = Timeline([one, peer], price, host_seconds=0)
    with pytest.raises(DeadlockError, match="waits for itself"):
        timeline.seconds()
