"""What the fixture `run_ranks` says of a rank that crashes, before its result and after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_at_the_end() -> int:
    """After the result was sent: by a thread that Python waits for."""
    if dist.get_rank() == 1:
        main = threading.main_thread()
        threading.Thread(target=lambda: (main.join(), crash())).start()
    return dist.get_rank()


@pytest.mark.parametrize(
    ("work", "says"),
    [(crash_at_the_end, r"after their results: \{1: -11\}"), (crash, "ended without a result")],
)
def test_a_crash_shows_its_native_stack(
    run_ranks: Callable[..., list[Any]],
    capfd: pytest.CaptureFixture[str],
    work: Callable[[], Any],
    says: str,
) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=says):
        run_ranks(2, work)
    said = capfd.readouterr().err
    assert "Fatal Python error: Segmentation fault" in said
    assert "frame #0: c10::FatalSignalHandler" in said
