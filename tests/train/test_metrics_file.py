"""metrics.jsonl holds whole lines, whatever the disk does."""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainyard.config.run import Run
from trainyard.train.metrics import Outputs


@contextmanager
def no_file_above(n_bytes: int) -> Iterator[None]:
    """A limit of the kernel on the size of files: writing beyond it fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_without_room_is_left_out_and_told_once(
    tiny_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trainyard")
    outputs = Outputs(tmp_path, tiny_run)
    path = tmp_path / "metrics.jsonl"
    outputs.write("train", {"step": 1})
    with no_file_above(path.stat().st_size + 10):
        outputs.write("train", {"step": 2})
        outputs.write("train", {"step": 3})
    outputs.write("train", {"step": 4})
    outputs.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    # What the kernel cut short is as if there had been no space for it.
    assert caplog.text.count("metrics.jsonl: No space") == 1
