"""The command that measures a GPU, rehearsed here, so that it works on the day there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

from trainyard.config.load import load_run
from trainyard.planning.resolve import resolve

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("part", ["sizes", "precision", "peers", "trials", "budget"])
def test_all_that_a_part_times_can_be(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import parts
    from benchmarks.gpu.commands import Budget, Variant
    from benchmarks.gpu.session import Session

    tried: list[Variant] = []

    def fail(variant: Variant, *_: object, **__: object) -> dict[str, object]:
        tried.append(variant)
        return {"failed": "exit code 2", "out_of_memory": True, "said": ""}

    monkeypatch.setattr(parts, "bench", fail)
    found: dict[str, object] = {}
    parts.PARTS[part](Session(False, Budget(0.0), ()), found.update)
    assert len(tried) > 1
    assert len({variant.name for variant in tried}) == len(tried)
    for variant in tried:
        resolve(load_run(variant.model, list(variant.overrides)).run, 1)
    assert found["items"]


@pytest.mark.exhaustive
def test_the_rehearsal_leaves_records(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--only", "ceiling,sizes"]
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [*command, "--output", str(tmp_path), "--minutes", "8"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": source},
        check=True,
        capture_output=True,
    )
    (ceiling,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-gpu-ceiling.json"))
    assert ceiling["tflops_per_second"]["bf16"]["large"] > 0
    assert ceiling["failed"] == {}
    (sizes,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-gpu-sizes.json"))
    assert [item.get("failed") for item in sizes["items"]] == [None] * 5
    assert sizes["summary"]["6.7B"]["with_dropout"]["tokens_per_second"] > 0
    assert list(ceiling["attention_tflops_per_second"]) == ["flash_attention dropout 0.0"]
    assert sizes["summary"]["6.7B"]["of_ceiling"] > 0
    assert sizes["rehearsal"] is True


def test_a_failure_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.commands import Budget, Variant, bench

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    found = bench(Variant("none", "no-such-preset"), Budget(time.monotonic() + WATCHDOG_SECONDS))
    assert found["failed"] == "exit code 2"
    assert "no-such-preset" in found["said"]
    assert not found["out_of_memory"]
    late = bench(Variant("none", "tiny"), Budget(0.0))
    assert late["failed"] == "out of time"
