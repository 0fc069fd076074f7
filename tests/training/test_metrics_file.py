"""metrics.jsonl holds whole lines, whatever the disk does."""

from __future__ import annotations

import json
import logging
import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from trainyard.config.load import load_run
from trainyard.config.run import Log, Run
from trainyard.errors import MachineError
from trainyard.files import publish_text
from trainyard.layout.resolve import resolve
from trainyard.training.metrics import Outputs, render_full_line, render_short_line


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


PLAN = resolve(load_run("tiny", ["train.length='3_310 steps'"]).run)
VALUES: dict[str, Any] = {
    "step": 240,
    "sequences": 1920,
    "tokens": 123_000,
    "learning_rate": 1e-3,
    "loss": 2.51349,
    "gradient_norm": 0.5,
    "loss_scale": 1.0,
    "milliseconds_per_step": 33.0,
    "sequences_per_second": 240.0,
    "tokens_per_second_per_device": 61_234.0,
    "tflops_per_second_per_device": 0.1,
    "model_flops_utilization": None,
    "memory_bytes": 2**30,
    "skipped_steps": 0,
    "seconds_left": 112.0,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "step   240 of 3,310 | loss 2.513 | 61,234 tokens/s | 1m 52s left"),
        (
            {"model_flops_utilization": 0.412, "skipped_steps": 3, "step": 3310, "seconds_left": 0},
            "step 3,310 of 3,310 | loss 2.513 | 61,234 tokens/s | MFU 41.2% | 3 skipped "
            "| 0.0s left",
        ),
        (
            {"loss": math.nan, "loss_scale": 2.0**31, "skipped_steps": 1},
            "step   240 of 3,310 | skipped: gradients overflowed, loss scale now 2.14748e+09 "
            "| 61,234 tokens/s | 1 skipped | 1m 52s left",
        ),
        (
            {"loss": math.nan, "skipped_steps": 1},
            "step   240 of 3,310 | skipped: loss or gradients not finite | 61,234 tokens/s "
            "| 1 skipped | 1m 52s left",
        ),
    ],
)
def test_a_short_line_has_what_a_person_watches(changes: dict[str, Any], line: str) -> None:
    assert render_short_line(VALUES | changes, PLAN) == line


def test_a_full_line_has_every_metric() -> None:
    line = render_full_line(VALUES, PLAN)
    for text in (
        "lr 1.000e-03",
        "grad norm  0.500",
        "loss scale 1",
        "33.0 ms/step",
        "memory 1.0 GiB",
    ):
        assert text in line
    assert " by " not in line
    figures = {"formula_tflops_per_second_per_device": 72.02, "formula_share_of_peak": 0.3761}
    line = render_full_line(VALUES | {"flop_formula": "megatron", **figures}, PLAN)
    assert " | 72.02 TFLOP/s per device by megatron, 37.61% of the peak | " in line
