"""The command that measures a GPU, rehearsed here, so that it works on the day there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.running import ROOT
from tests.training.test_metrics_file import no_file_above
from tests.waiting import WATCHDOG_SECONDS

from trainyard.layout.resolve import resolve

KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopB_TNN": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "products",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "products",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward": "loss",
    "ncclDevKernel_ReduceScatter_Sum_f32": "communication",
    "Memcpy DtoD (Device -> Device)": "copies and casts",
    "triton_per_fused_add_native_layer_norm_3": "norms and elementwise",
}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize(("name", "group"), KERNELS.items())
def test_kernels_fall_into_groups(name: str, group: str) -> None:
    from benchmarks.gpu.kernels import group_of

    assert group_of(name) == group


def test_what_the_device_does_at_once_counts_once(tmp_path: Path) -> None:
    from benchmarks.gpu.kernels import add_up, read_kernels

    times = [("nvjet", 0, 4000), ("nccl", 3000, 2000), ("triton", 10000, 3000), ("host", 0, 9e9)]
    events = [
        {"ph": "X", "cat": "cpu_op" if name == "host" else "kernel", "name": name}
        | {"ts": start, "dur": length}
        for name, start, length in times
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = add_up(read_kernels(tmp_path / "trace.json"), 5.0)  # of two steps
    assert found["milliseconds_per_step"] == {
        "products": 2.0,
        "communication": 1.0,
        "norms and elementwise": 1.5,
        "idle": 1.0,  # busy from 0 to 5 and from 10 to 13, in two steps
    }


HOW_PLANTED_ITEMS_END = {
    "first": "done",
    "failure": "failed",
    "wrong": "wrong",
    "exit": "crashed",
    "segfault": "crashed",
    "too long": "interrupted",
    "hang": "killed",
    "once": "failed",
    "last": "done",
}
MOST_GIB = 75
PLANTED = "tests.benchmarks.planted_items"


def supervise(folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Runs the command over the planted items; gives its results, and all it says."""
    source = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-m", "benchmarks.gpu", "--items", PLANTED]
    done = subprocess.run(
        [*command, "--output", str(folder), "--seconds", str(WATCHDOG_SECONDS), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert "Traceback" not in done.stderr, done.stderr
    path = folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return rows, done.stdout


def ends_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["item"]: row["end"] for row in rows if "end" in row}


def test_no_item_stops_the_others(tmp_path: Path) -> None:
    rows, said = supervise(tmp_path)
    assert ends_of(rows) == HOW_PLANTED_ITEMS_END
    found = {row["item"]: row["found"] for row in rows if "found" in row}
    assert set(found) == set(HOW_PLANTED_ITEMS_END) - {"once"}  # what came before the fault
    told = {row["item"]: row["said"] for row in rows if "end" in row}
    assert "illegal memory access" in told["failure"]
    assert "exit code 7" in told["exit"]
    assert "exit code -11" in told["segfault"] and "read_address_zero" in told["segfault"]
    assert all(f"== {name}: {end}" in said for name, end in HOW_PLANTED_ITEMS_END.items())
    assert "WRONG gradients" in said


def test_a_second_call_does_what_is_not_done(tmp_path: Path) -> None:
    supervise(tmp_path, "--only", "first,once,last")
    before = (tmp_path / "results.jsonl").read_bytes()
    rows, said = supervise(tmp_path, "--continue", "--only", "first,once,last")
    assert (tmp_path / "results.jsonl").read_bytes().startswith(before)
    assert ends_of(rows) == {"first": "done", "once": "done", "last": "done"}
    assert "== once: done" in said and "== first" not in said


def test_what_no_longer_fits_is_left_out_and_said(tmp_path: Path) -> None:
    rows, said = supervise(tmp_path, "--only", "first", "--seconds", "60")
    assert ends_of(rows) == {"first": "skipped"} and "== first: skipped" in said


def test_a_full_disk_keeps_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu.supervisor import Results

    path = tmp_path / "results.jsonl"
    results = Results(path)
    rows = [{"item": "x", "row": f"row {number}", "found": 1.0} for number in range(20)]
    with no_file_above(250):
        for row in rows:
            results.append(row)
    assert "File too large: 1 rows only printed" in capsys.readouterr().out
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == rows[: len(kept)] and 0 < len(kept) < len(rows)
    results.append(rows[-1])  # there is room again
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*rows, rows[-1]]
    Results(tmp_path / "none" / "results.jsonl").append({"item": "x", "end": "done"})
    assert "No such file or directory: 1 rows only printed" in capsys.readouterr().out


def test_every_item_can_be_done() -> None:
    from benchmarks.gpu.item import read_items

    items = read_items("benchmarks.gpu.items")
    assert len({item.name for item in items}) == len(items)
    for item in items:
        module, _, name = item.function.partition(":")
        assert callable(getattr(import_module(module), name))


def test_every_timed_run_fits_into_80_gb() -> None:
    from benchmarks.gpu.runs import RUNS, load, predict

    for name in RUNS:
        run = load(name, is_small=False)
        found = predict(name, run, resolve(run, 1), None)
        assert found["gib_plan"] < MOST_GIB, name
        assert 0.1 < found["mfu_plan"] < 0.7, name


def test_a_failure_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.commands import Budget, Variant, bench

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    found = bench(Variant("none", "no-such-preset"), Budget(time.monotonic() + WATCHDOG_SECONDS))
    assert found["failed"] == "exit code 2"
    assert "no-such-preset" in found["said"]
    assert not found["out_of_memory"]
    late = bench(Variant("none", "tiny"), Budget(0.0))
    assert late["failed"] == "out of time"
