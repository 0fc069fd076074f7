"""Training end to end on a tiny model: it learns, stops, resumes to the last bit, and refuses."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.command import Fork
from tests.faults.small_run import write_tokens
from tests.training.conftest import lines_of, start, with_fields
from tests.waiting import wait_until

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.config.run import Blend, Data, Run
from trainyard.data.index_cache import FileBlock, IndexCache
from trainyard.data.indexed import token_paths
from trainyard.data.loader import build_training_orders, data_fingerprint, describe_data
from trainyard.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GuardError,
    LaunchError,
    MachineError,
    UserError,
)
from trainyard.launch.environment import Process, code_checksum
from trainyard.launch.heartbeat import Heartbeat
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import (
    HostClock,
    Mesh,
    build_mesh,
    choose_device,
    explain_device_errors,
)
from trainyard.topology import Topology
from trainyard.training import loop
from trainyard.training.context import build_shared_orders, hash_new_token_files
from trainyard.training.run_folder import open_run, refuse_unsupported, write_run_folder
from trainyard.training.state import State, TrainContext
from trainyard.training.step import StepResult, train_step
from trainyard.training.stop import DONE, Stop, StopReason
from trainyard.training.worker import main as worker_main
from trainyard.training.worker import run_worker


def train_losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines_of(folder, "train")]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return load_tensors(checkpoint, "")


class StopsAfter(Stop):
    """Asks to stop at the n-th step boundary, as a signal would."""

    def __init__(self, n_steps: int) -> None:
        super().__init__(folder=None)
        self.left = n_steps

    def stop_request(self) -> str | None:
        self.left -= 1
        return str(StopReason("told to", 75)) if self.left == 0 else None


EMULATED = {"fp8": {"emulate": True, "precise_blocks": 0}}
PRECISIONS: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {},
    "fp16": {"loss_scale": {"initial": 2.0**26}},  # is still searched for when the run stops
    "fp8": EMULATED,
    "fp8_lowbit": EMULATED,
}


@pytest.mark.parametrize("precision", everyday(PRECISIONS, ("fp32", "fp16", "fp8_lowbit")))
@pytest.mark.parametrize("accumulate", everyday((8, 2), (8,)))
def test_stopped_and_resumed_equals_uninterrupted_to_the_last_bit(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    accumulate: int,
) -> None:
    run = with_fields(
        tiny_run,
        precision={"kind": precision, **PRECISIONS[precision]},
        train={"micro_batch_size": accumulate},
    )
    assert start(tmp_path / "whole", run) == DONE
    monkeypatch.setattr("trainyard.training.loop.Stop", lambda *_: StopsAfter(5))
    assert start(tmp_path / "parts", run) == StopReason("told to", 75)
    monkeypatch.undo()
    assert start(tmp_path / "parts", run, "must") == DONE

    whole, parts = (
        [(line["loss"], line.get("loss_scale")) for line in lines_of(tmp_path / name, "train")]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert len(whole) == 12
    if precision == "fp16":
        assert whole[0][1] > whole[4][1] > whole[7][1]
    expected, found = all_tensors(tmp_path / "whole"), all_tensors(tmp_path / "parts")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_it_learns(tiny_run: Run, tmp_path: Path) -> None:
    run = with_fields(
        tiny_run,
        train={"length": "60 steps"},
        schedule={"decay": "60 steps"},
        optimizer={"learning_rate": 3e-3},
        model={"dropout": 0.0},
    )
    start(tmp_path / "run", run)
    losses = train_losses(tmp_path / "run")
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # ln 512
    assert losses[-1] < 4.5


def test_run_folder_says_everything(tiny_run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(folder, with_fields(tiny_run, log={"tensorboard": True}))
    plan = json.loads((folder / "plan.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = ["start", *["train"] * 12, "evaluate", "evaluate", "save", "end"]
    assert [line["kind"] for line in lines] == kinds
    assert (lines[15]["step"], lines[15]["bytes"]) == (12, 12 * plan["n_parameters"])
    train = lines[12]
    assert (train["step"], train["sequences"], train["tokens"]) == (12, 96, 96 * 64)
    assert all(train[key] > 0 for key in ("loss", "gradient_norm", "milliseconds_per_step"))
    assert train["model_flops_utilization"] is None
    assert list((folder / "tensorboard").glob("events*"))
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["torch"] == torch.__version__.partition("+")[0] or versions["torch"]
    assert plan["n_steps"] == 12
    manifest = read_manifest(folder / "checkpoints" / "step-00000012")
    assert manifest.build_run() == with_fields(tiny_run, log={"tensorboard": True})
    # Defaults too: a later version may have others.
    assert manifest.run["model"] == tiny_run.model.model_dump(mode="json")


def test_rate_of_a_step_counts_its_own_batch(tiny_run: Run, tmp_path: Path) -> None:
    start(tmp_path / "run", tiny_run)
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "run", "train")]
    assert rates[:2] == pytest.approx([0.5e-3, 1e-3])  # a warmup of two steps to 1e-3
    assert rates[-1] == pytest.approx(1e-4)


def test_emulated_bf16_is_said(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("trainyard.precision.policy.logger.warning", said.append)
    name = "trainyard.precision.policy.cpu_multiplies_bf16_natively"
    for native in (True, False):
        monkeypatch.setattr(name, lambda native=native: native)
        folder = tmp_path / str(native)
        start(folder, with_fields(tiny_run, precision={"kind": "bf16"}))
        assert any("this CPU has no bf16 matmuls" in text for text in said) is not native


def test_resume_never_and_must(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*--resume must"):
        start(tmp_path / "run", tiny_run, "must")
    assert not (tmp_path / "run").exists()
    start(tmp_path / "run", tiny_run, "never")
    with pytest.raises(CheckpointError, match="step-00000012 exists, and --resume never"):
        start(tmp_path / "run", tiny_run, "never")
    # A worker may be started again without the parent that looks first.
    with pytest.raises(CheckpointError, match="step-00000012 exists, and --resume never"):
        run_worker(open_run(tmp_path / "run"), "never")


def test_resume_with_a_changed_run_names_the_fields(tiny_run: Run, tmp_path: Path) -> None:
    start(tmp_path / "run", tiny_run)
    before = (tmp_path / "run" / "run.toml").read_text()
    changed = with_fields(tiny_run, optimizer={"learning_rate": 0.1}, train={"seed": 5})
    with pytest.raises(CheckpointError) as refused:
        start(tmp_path / "run", changed)
    text = str(refused.value)
    assert "optimizer.learning_rate: 0.001 in the checkpoint, now 0.1" in text
    assert "train.seed: 1234 in the checkpoint, now 5" in text
    assert "free to change" in text
    assert (tmp_path / "run" / "run.toml").read_text() == before


def test_steps_whose_gradients_are_not_finite_stop_the_run(tiny_run: Run, tmp_path: Path) -> None:
    hopeless = with_fields(
        tiny_run,
        model={"init_std": 1e30},
        guard={"skipped_steps_limit": 3},
    )
    with pytest.raises(GuardError, match="3 steps in a row up to step 3 were skipped") as caught:
        start(tmp_path / "run", hopeless)
    assert "sequences 16 to 23: loss nan" in caught.value.problem
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["exit_code"] == 93
    assert newest_checkpoint(tmp_path / "run" / "checkpoints") is None


FP8 = {"kind": "fp8", "fp8": {"precise_blocks": 0}}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"precision": FP8}, MachineError, "precision.kind='fp8' needs fp8 matmuls"),
        ({"data": {"blend": {"prefixes": []}}}, ConfigError, "data.blend.prefixes is empty"),
        ({"data": {"blend": {"prefixes": ["nowhere/corpus"]}}}, DataError, "nowhere/corpus"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tiny_run: Run,
    tmp_path: Path,
    fields: dict[str, dict[str, object]],
    error: type[UserError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(error, match=message):
        start(tmp_path / "run", with_fields(tiny_run, **fields))
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_cannot_be_written_are_found_before_training(
    tiny_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").symlink_to("/proc/self")
    with pytest.raises(MachineError, match=f"cannot write checkpoints to {tmp_path}/checkpoints: "):
        start(tmp_path, tiny_run)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    started_by_us = Process(1, 2, 1, 2, store_file=Path("store"))
    with pytest.raises(MachineError, match="rank 1 is number 1 on its machine, which has 1 GPU\n"):
        choose_device(started_by_us)


def test_sums_inside_matmuls_are_fp32_and_attention_is_flash(tiny_run: Run, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    start(tmp_path, tiny_run)
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    choose_device(Process(), with_fields(tiny_run, kernels={"reduced_precision": True}))
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    choose_device(Process())
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


class DeviceTime(HostClock):
    """A device on which a step takes 2 seconds and whatever follows it a minute."""

    def __init__(self) -> None:
        self._now, self._intervals = 0.0, itertools.cycle([60.0, 2.0])

    def mark(self) -> float:
        self._now += next(self._intervals)
        return self._now


def test_speed_is_the_devices(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.training.metrics.build_clock", lambda _device: DeviceTime())
    run = with_fields(tiny_run, log={"interval": 3}, evaluate={"interval": 2})
    start(tmp_path, with_fields(run, checkpoint={"interval": 2}))
    lines = lines_of(tmp_path, "train")
    assert [line["milliseconds_per_step"] for line in lines] == [2000.0] * 4
    assert [line["sequences_per_second"] for line in lines] == [8 / 2] * 4


@pytest.mark.parametrize(
    ("changes", "n_ranks", "hint"),
    [
        (
            {"micro_batch_size": 4},
            2,
            'train.micro_batch_size=1, or parallel.recompute="block", or '
            "parallel.zero_stage=3, or more ranks; trainyard plan says what fits",
        ),
        ({"micro_batch_size": 1}, 1, 'parallel.recompute="block", or parallel.zero_stage=3, or '),
    ],
)
def test_a_full_gpu_is_one_message(
    tiny_run: Run, changes: dict[str, int], n_ranks: int, hint: str
) -> None:
    run = with_fields(tiny_run, train={**changes, "global_batch_size": 8})
    told = "CUDA out of memory. Tried to allocate 2 GiB. Of the allocated memory 1 is .."
    plan, device = resolve(run, n_ranks), torch.device("cpu")
    with (
        pytest.raises(MachineError, match="does not fit into") as error,
        explain_device_errors(run, plan, device),
    ):
        raise torch.OutOfMemoryError(told)
    assert error.value.problem.endswith(
        "the memory of cpu: CUDA out of memory. Tried to allocate 2 GiB."
    )
    assert error.value.hint.startswith(hint)
    assert error.value.exit_code == 2


def test_a_deterministic_run_has_the_same_losses(tiny_run: Run, tmp_path: Path) -> None:
    start(tmp_path / "fixed", with_fields(tiny_run, train={"deterministic": True}))
    assert torch.are_deterministic_algorithms_enabled()
    start(tmp_path / "free", tiny_run)
    assert not torch.are_deterministic_algorithms_enabled()
    assert train_losses(tmp_path / "fixed") == train_losses(tmp_path / "free")


def test_what_has_no_deterministic_kernel_is_named(tiny_run: Run) -> None:
    run = with_fields(tiny_run, train={"deterministic": True})
    device = choose_device(Process(), run)
    with (
        pytest.raises(ConfigError, match="put_ has no deterministic kernel for cpu"),
        explain_device_errors(run, resolve(run, 1), device),
    ):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


def test_token_outside_the_vocabulary(tiny_run: Run, tmp_path: Path) -> None:
    small = with_fields(tiny_run, model={"vocabulary_size": 300})
    with pytest.raises(DataError, match=r"token id \d+ is outside the model's vocabulary of 300"):
        start(tmp_path / "run", small)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 93)]
)
def test_a_signal_saves_and_its_exit_code_tells_a_scheduler(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    folder = tmp_path / "run"
    run = with_fields(tiny_run, train={"length": "100000 steps"}, schedule={"decay": "99999 steps"})
    write_run_folder(open_run(folder, run=run), "auto")
    monkeypatch.setattr("sys.argv", ["worker", str(folder)])
    running = Fork(worker_main)
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count('"train"') >= 3)
    os.kill(running.pid, number)
    ended = running.wait()
    assert ended.returncode == code, ended.stderr
    assert f"received {number.name}" in ended.stderr
    assert ("saving after this step" in ended.stderr) == (number == signal.SIGINT)
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["reason"], outcome["exit_code"]) == (f"received {number.name}", code)
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    assert read_manifest(checkpoint).step >= 3


def test_half_a_line_of_a_killed_run_is_dropped(tiny_run: Run, tmp_path: Path) -> None:
    write_run_folder(open_run(tmp_path / "run", run=tiny_run), "auto")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "tra')
    run_worker(open_run(tmp_path / "run"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["kind"] for line in lines[:3]] == ["train", "start", "train"]


def test_a_run_that_goes_on_with_other_code_says_so(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    said = "the checkpoint was written by other code"
    start(tmp_path, with_fields(tiny_run, train={"length": "6 steps"}))
    start(tmp_path, with_fields(tiny_run, train={"length": "8 steps"}))
    assert said not in caplog.text
    monkeypatch.setattr("trainyard.launch.environment.code_checksum", lambda: "0123456789ab")
    start(tmp_path, tiny_run)
    assert f"{said}: {code_checksum()}, commit " in caplog.text
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    for versions in (
        read_manifest(newest).versions,
        json.loads((tmp_path / "versions.json").read_text()),
    ):
        assert versions["code"] == "0123456789ab"
        assert versions["commit"]


def test_wall_clock_limit_saves_and_can_be_resumed(tiny_run: Run, tmp_path: Path) -> None:
    limited = with_fields(tiny_run, train={"stop_after_minutes": 1e-9})
    ending = start(tmp_path / "run", limited)
    assert (ending.reason, ending.exit_code) == ("train.stop_after_minutes=1e-09 has elapsed", 75)
    assert start(tmp_path / "run", tiny_run, "must") == DONE


def test_data_of_another_tokenizer_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    from trainyard.config.corpus import load_corpus
    from trainyard.corpus.preparation.prepare import prepare
    from trainyard.corpus.preparation.train_tokenizer import train_tokenizer

    words = [f"{a}{b} " for a in "abcdefgh" for b in "ijklmnop"]
    (tmp_path / "text.txt").write_text("".join(words) * 40)
    mine = train_tokenizer(["".join(words)] * 4, 300, tmp_path / "mine").parent
    other = train_tokenizer(["".join(reversed(words))] * 4, 299, tmp_path / "other").parent
    corpus = {"inputs": [str(tmp_path / "text.txt")], "output": str(tmp_path / "tokens")}
    prepare(load_corpus(None, {**corpus, "tokenizer": str(mine)}))
    run = with_fields(
        tiny_run,
        data={"train": {"prefixes": [f"{tmp_path}/tokens_text_document"]}, "blend": {}},
        tokenizer={"path": str(other)},
    )
    with pytest.raises(DataError, match=r"made with the tokenizer mine .*not with other"):
        start(tmp_path / "run", run)


HAS_WANDB = find_spec("wandb") is not None


@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_WANDB, reason="the extra wandb is not installed")
def test_wandb_continues_one_run(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = with_fields(tiny_run, train={"length": "2 steps"}, log={"wandb_project": "yard"})
    folder = tmp_path / "run"
    for n_steps in (2, 4):
        start(folder, with_fields(run, train={"length": f"{n_steps} steps"}))
    written = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    known = (folder / "wandb-id").read_text().strip()
    assert len(written) == 2
    assert {path.name for path in written} == {f"run-{known}.wandb"}
    write_run_folder(open_run(folder, run=run), "overwrite")
    assert not (folder / "wandb-id").exists()


@pytest.mark.skipif(HAS_WANDB, reason="the extra wandb is installed")
def test_wandb_without_its_package(tiny_run: Run) -> None:
    with pytest.raises(ConfigError, match=r"log.wandb_project='yard' needs the package wandb"):
        refuse_unsupported(with_fields(tiny_run, log={"wandb_project": "yard"}))


def test_data_without_a_record_is_read_once_by_all_ranks_together(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.data.index_cache.BLOCK_BYTES", 500)
    monkeypatch.setattr("trainyard.training.context.BLOCKS_A_ROUND", 2)
    (tmp_path / "other").mkdir()
    prefixes = [str(write_tokens(tmp_path)), str(write_tokens(tmp_path / "other"))]
    blocks = sum(-(-path.stat().st_size // 500) for p in prefixes for path in token_paths(p))
    read_digest = FileBlock.read_digest

    def read() -> tuple[int, str]:
        rank = dist.get_rank()
        data = {"blend": {"prefixes": prefixes}, "cache_folder": str(tmp_path / "cache")}
        run = Run.model_validate({"data": data})
        read_here = []
        patch = pytest.MonkeyPatch()
        patch.setattr(FileBlock, "read_digest", lambda b: read_here.append(b) or read_digest(b))
        mesh = build_mesh(Topology(shard=3), rank, torch.device("cpu"))
        describe_data(run)
        assert not read_here, "before the ranks have met, none reads"
        hash_new_token_files(run, mesh, Heartbeat(), keeps=rank == 0)
        return len(read_here), data_fingerprint(run)

    counts, fingerprints = zip(*run_ranks(3, read), strict=True)
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == blocks
    alone = Run.model_validate({"data": {"blend": {"prefixes": prefixes},
                                         "cache_folder": str(tmp_path / "new")}})  # fmt: skip
    assert set(fingerprints) == {data_fingerprint(alone)}
    assert run_ranks(3, read) == [(0, fingerprints[0])] * 3, "it is remembered"


def test_ranks_that_see_other_data_are_told(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    prefixes = [write_tokens(tmp_path / name) for name in "ab"]
    path = Path(f"{prefixes[1]}.bin")
    path.write_bytes(bytes(path.stat().st_size))

    def read() -> str:
        rank = dist.get_rank()
        data = {"blend": {"prefixes": [str(prefixes[rank == 2])]},
                "cache_folder": str(tmp_path / f"cache{rank == 2}")}  # fmt: skip
        mesh = build_mesh(Topology(shard=3), rank, torch.device("cpu"))
        with pytest.raises(LaunchError) as caught:
            hash_new_token_files(
                Run.model_validate({"data": data}), mesh, Heartbeat(), keeps=rank != 1
            )
        return caught.value.problem

    assert set(run_ranks(3, read)) == {"rank 2 of 3: the token files differ from those of rank 0"}


def test_held_out_files_that_are_trained_on_are_said(
    tiny_run: Run, tmp_path: Path, token_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(Path(token_prefix).parent)
    other = str(tmp_path / "link" / Path(token_prefix).name)
    train, cache = Blend(prefixes=(token_prefix,)), str(tmp_path / "cache")
    for valid, is_said in ((other, True), (str(write_tokens(tmp_path)), False)):
        data = Data(train=train, valid=Blend(prefixes=(valid,)), cache_folder=cache)
        run = tiny_run.model_copy(update={"data": data})
        caplog.clear()
        build_training_orders(run, resolve(run))
        assert ("is in data.train and data.valid" in caplog.text) == is_said


def rows_of_order(run: Run, mesh: Mesh) -> list[list[int]]:
    """The training sequences as a rank would read them."""
    order = build_shared_orders(run, resolve(run, 3), mesh)["train"]
    assert order is not None
    rows: list[list[int]] = order.sequences(0, len(order)).tolist()
    return rows


@pytest.mark.parametrize("fault", ["none", "damaged", "other"])
def test_an_order_of_a_rank_s_own_is_checked(
    run_ranks: Callable[..., list[Any]], tiny_run: Run, tmp_path: Path, fault: str
) -> None:
    """Ranks 0 and 1 share a cache; that of rank 2 may be damaged or another."""

    def read() -> tuple[Any, int, bool]:
        rank = dist.get_rank()
        mesh = build_mesh(Topology(shard=3), rank, torch.device("cpu"))
        folder = tmp_path / ("mine" if rank == 2 else "shared")
        batches = {"micro_batch_size": 1, "global_batch_size": 3}
        run = with_fields(tiny_run, data={"cache_folder": str(folder)}, train=batches)
        rows_of_order(run, mesh)
        shuffles = sorted(folder.glob("*-shuffle_index.npy"))
        if rank == 2 and fault == "damaged":
            for path in shuffles:
                content = path.read_bytes()
                path.write_bytes(content[:128] + bytes(len(content) - 128))
        if rank == 2 and fault == "other":
            for path in shuffles:
                found = np.load(path)
                IndexCache(folder).save(path.stem, found.shape, found.dtype, [found[::-1]])
        states = [path.stat().st_mtime_ns for path in shuffles]
        read_here = []
        read_digest = FileBlock.read_digest
        patch = pytest.MonkeyPatch()
        patch.setattr(FileBlock, "read_digest", lambda *a: read_here.append(a) or read_digest(*a))
        try:
            result: Any = rows_of_order(run, mesh)
        except LaunchError as error:
            result = error.problem
        return result, len(read_here), states == [path.stat().st_mtime_ns for path in shuffles]

    results, n_read, untouched = zip(*run_ranks(3, read), strict=True)
    assert n_read[0] and not n_read[1] and n_read[2]
    if fault == "other":
        assert set(results) == {
            "rank 2 of 3: the order of training sequences differs from that of rank 0"
        }
    else:
        assert results[0] == results[1] == results[2]
        assert untouched == (True, True, fault == "none")


def test_after_the_second_step_the_collector_has_little_left_to_look_at(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []

    def noted(context: TrainContext, state: State) -> StepResult:
        frozen.append(gc.get_freeze_count())
        return train_step(context, state)

    monkeypatch.setattr(loop, "train_step", noted)
    start(tmp_path / "run", tiny_run)
    assert frozen[:2] == [0, 0] and min(frozen[2:]) > 10_000
    assert gc.get_freeze_count() == 0, "what runs next in this process is collected as ever"


def test_the_time_left_follows_the_median_speed(tiny_run: Run, tmp_path: Path) -> None:
    run = with_fields(tiny_run, train={"length": "6 steps"}, log={"interval": 1})
    start(tmp_path / "run", run)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"]
    assert len(lines) == 6
    for number, line in enumerate(lines, 1):
        left = lines[-1]["tokens"] - line["tokens"]
        speeds = [each["tokens_per_second_per_device"] for each in lines[:number]]
        assert line["seconds_left"] == pytest.approx(left / statistics.median(speeds))
