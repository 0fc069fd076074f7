"""Items that go wrong in every way, for the supervisor of the GPU benchmark."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator

from benchmarks.gpu.item import Item, Row, Session

LONG = 900.0
"""An allowance that no busy machine uses up."""
SHORT = 0.3


def measure(_: Session, found: str = "1") -> Iterator[Row]:
    yield {"row": "a number", "found": float(found), "unit": "times", "estimate": 2.0}


def fail(_: Session) -> Iterator[Row]:
    yield {"row": "before the failure", "found": 1.0}
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def find_wrong(session: Session) -> Iterator[Row]:
    yield session.judge({"row": "gradients", "found": 0.0}, is_right=False)


def end_at_once(_: Session) -> Iterator[Row]:
    yield {"row": "before the end", "found": 1.0}
    os._exit(7)


def read_address_zero(_: Session) -> Iterator[Row]:
    yield {"row": "before the crash", "found": 1.0}
    ctypes.string_at(0)


def take_too_long(_: Session) -> Iterator[Row]:
    yield {"row": "before the alarm", "found": 1.0}
    while True:
        time.sleep(0.01)


def hang(_: Session) -> Iterator[Row]:
    """Waits in C for a lock that nobody opens: Python never gets to see the alarm."""
    yield {"row": "before the hang", "found": 1.0}
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def work_once(session: Session) -> Iterator[Row]:
    """Fails in the first call, and works in the second."""
    mark = session.output / "was-here"
    if not mark.exists():
        mark.touch()
        raise RuntimeError("the first time")
    yield {"row": "the second time", "found": 2.0}


def _item(name: str, function: str, allowance: float = LONG) -> Item:
    return Item(name, allowance, f"tests.benchmarks.planted_items:{function}")


ITEMS = (
    _item("first", "measure"),
    _item("failure", "fail"),
    _item("wrong", "find_wrong"),
    _item("exit", "end_at_once"),
    _item("segfault", "read_address_zero"),
    _item("too long", "take_too_long", SHORT),
    _item("hang", "hang", SHORT),
    _item("once", "work_once"),
    _item("last", "measure"),
)
