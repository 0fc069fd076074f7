"""metrics.jsonl holds whole lines, whatever the disk does."""

from __future__ import annotations

import json
import logging
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from trainyard.config.run import Log, Run
from trainyard.errors import MachineError
from trainyard.files import publish_text
from trainyard.training.metrics import Outputs


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


def test_a_clock_that_is_set_adds_no_time(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(tmp_path, tiny_run)
    outputs.write("train", {"step": 1})
    tomorrow = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    outputs.write("train", {"step": 2})
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert 0 <= second["time"] - first["time"] < 43200


def test_a_limit_of_file_sizes_is_hinted_at(tmp_path: Path) -> None:
    with no_file_above(10), pytest.raises(MachineError) as caught:
        publish_text(tmp_path / "a", "text" * 10)
    assert "ulimit -f" in caught.value.hint


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


@pytest.mark.parametrize(
    ("tail", "kept"), [('{"step": 2}', [1, 2, 3]), ('{"step": 2', [1, 3]), ("", [1, 3])]
)
def test_a_whole_line_without_its_end_is_kept(
    tiny_run: Run, tmp_path: Path, tail: str, kept: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    outputs = Outputs(tmp_path, tiny_run)
    outputs.write("train", {"step": 3})
    outputs.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept


def test_a_file_made_shorter_meanwhile_gets_no_zeros(tiny_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    outputs = Outputs(tmp_path, tiny_run)
    outputs.write("train", {"step": 1})
    path.write_text("")  # as `> metrics.jsonl` does
    with no_file_above(10):
        outputs.write("train", {"step": 2})
    outputs.write("train", {"step": 3})
    outputs.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3]


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_that_was_replaced_meanwhile_gets_the_lines_that_follow(
    tiny_run: Run, tmp_path: Path, kept: bool
) -> None:
    """As editors and `sed -i` do, and, without a new file, what rotates logs."""
    path = tmp_path / "metrics.jsonl"
    outputs = Outputs(tmp_path, tiny_run)
    outputs.write("train", {"step": 1})
    path.rename(tmp_path / "old")
    if kept:
        path.write_text((tmp_path / "old").read_text())
    outputs.write("train", {"step": 2})
    outputs.close()
    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert found == ([1, 2] if kept else [2])


def test_tensorboard_has_settings_both_losses_in_one_chart_and_no_counters(
    tiny_run: Run, tmp_path: Path
) -> None:
    outputs = Outputs(tmp_path, tiny_run.model_copy(update={"log": Log(tensorboard=True)}))
    outputs.write("start", {"step": 0, "resumed": 0})
    outputs.write("train", {"step": 1, "tokens": 64, "loss": 5.0})
    outputs.write("evaluate", {"step": 1, "split": "valid", "loss": 4.0, "n_tokens": 64})
    outputs.write("evaluate", {"step": 1, "split": "test", "loss": 3.0, "n_tokens": 64})
    outputs.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "evaluate/loss", "test/loss"]
    layout = layout_pb2.Layout.FromString(
        events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )
    assert layout.category[0].chart[0].multiline.tag == ["train/loss", "evaluate/loss"]
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    start = HParamsPluginData.FromString(content).session_start_info.hparams
    assert start["optimizer.learning_rate"].number_value == tiny_run.optimizer.learning_rate
