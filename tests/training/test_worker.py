"""Training end to end on a tiny model: it learns, stops, resumes to the last bit, and refuses."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.training.conftest import (
    lines_of,
    losses_of,
    newest,
    require_same,
    start,
    stop_at,
    with_fields,
)
from tests.waiting import wait_until

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.config.corpus import load_corpus
from trainyard.config.run import Blend, Data, Run
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.index_cache import FileBlock, IndexCache
from trainyard.data.indexed import IndexedDataset, token_paths
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
from trainyard.precision import policy
from trainyard.topology import Topology
from trainyard.training import loop
from trainyard.training.context import (
    build_shared_orders,
    check_token_files,
    hash_new_token_files,
)
from trainyard.training.run_folder import open_run, refuse_unsupported, write_run_folder
from trainyard.training.step import StepResult, train_step
from trainyard.training.stop import DONE, StopReason
from trainyard.training.worker import main as worker_main
from trainyard.training.worker import run_worker

EMULATED = {"fp8": {"emulate": True, "precise_blocks": 0}}
PRECISIONS: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {},
    "fp16": {"loss_scale": {"initial": 2.0**26}},  # is still searched for when the run stops
    "fp8": EMULATED,
    "fp8_lowbit": EMULATED,
}


@pytest.mark.parametrize("precision", everyday(PRECISIONS, ("fp16", "fp8_lowbit")))
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
    stop_at(monkeypatch, 5)
    assert start(tmp_path / "parts", run) == StopReason("told to", 75)
    assert start(tmp_path / "parts", run, "must") == DONE

    whole, parts = (
        [(line["loss"], line.get("loss_scale")) for line in lines_of(tmp_path / name, "train")]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert len(whole) == 12
    if precision == "fp16":
        assert whole[0][1] > whole[4][1] > whole[7][1]
    require_same(tmp_path / "whole", tmp_path / "parts")


def test_it_learns(tiny_run: Run, tmp_path: Path) -> None:
    run = with_fields(
        tiny_run,
        train={"length": "60 steps"},
        schedule={"decay": "60 steps"},
        optimizer={"learning_rate": 3e-3},
        model={"dropout": 0.0},
    )
    start(tmp_path, run)
    losses = losses_of(tmp_path)
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # ln 512
    assert losses[-1] < 4.5


def test_run_folder_says_everything(tiny_run: Run, tmp_path: Path) -> None:
    run = with_fields(tiny_run, log={"tensorboard": True})
    start(tmp_path, run)
    plan = json.loads((tmp_path / "plan.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kinds = ["start", *["train"] * 12, "evaluate", "evaluate", "save", "end"]
    assert [line["kind"] for line in lines] == kinds
    assert (lines[15]["step"], lines[15]["bytes"]) == (12, 12 * plan["n_parameters"])
    train = lines[1:13]
    last = train[-1]
    assert (last["step"], last["sequences"], last["tokens"]) == (12, 96, 96 * 64)
    assert all(last[key] > 0 for key in ("loss", "gradient_norm", "milliseconds_per_step"))
    assert last["model_flops_utilization"] is None
    # Of its own batch, after a warmup of two steps to 1e-3.
    rates = [line["learning_rate"] for line in train]
    assert (*rates[:2], rates[-1]) == pytest.approx((0.5e-3, 1e-3, 1e-4))
    speeds = [line["tokens_per_second_per_device"] for line in train]
    for number, line in enumerate(train, 1):
        left = (last["tokens"] - line["tokens"]) / statistics.median(speeds[:number])
        assert line["seconds_left"] == pytest.approx(left)
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert json.loads((tmp_path / "versions.json").read_text())["torch"]
    assert plan["n_steps"] == 12
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000012")
    assert manifest.build_run() == run
    # Defaults too: a later version may have others.
    assert manifest.run["model"] == tiny_run.model.model_dump(mode="json")


@pytest.mark.parametrize("native", [True, False])
def test_emulated_bf16_is_said(
    tiny_run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(policy, "cpu_multiplies_bf16_natively", lambda: native)
    policy.warn_of_slow_precision(with_fields(tiny_run, precision={"kind": "bf16"}), CPU)
    assert ("this CPU has no bf16 matmuls" in caplog.text) is not native


def test_resume_never_and_must(tiny_run: Run, copied: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*--resume must"):
        start(tmp_path / "new", tiny_run, "must")
    assert not (tmp_path / "new").exists()
    with pytest.raises(
        CheckpointError, match="step-00000012 exists, and --resume never"
    ) as refused:
        start(copied, tiny_run, "never")
    assert "another name, or pass --overwrite" in refused.value.hint
    # A worker may be started again without the parent that looks first.
    with pytest.raises(CheckpointError, match="step-00000012 exists, and --resume never"):
        run_worker(open_run(copied), "never")


def test_resume_with_a_changed_run_names_the_fields(tiny_run: Run, copied: Path) -> None:
    before = (copied / "run.toml").read_text()
    changed = with_fields(tiny_run, optimizer={"learning_rate": 0.1}, train={"seed": 5})
    with pytest.raises(CheckpointError) as refused:
        start(copied, changed)
    text = str(refused.value)
    assert "optimizer.learning_rate: 0.001 in the checkpoint, now 0.1" in text
    assert "train.seed: 1234 in the checkpoint, now 5" in text
    assert "continues with those" in text
    assert (copied / "run.toml").read_text() == before


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


CPU = torch.device("cpu")
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


def test_sums_inside_matmuls_are_fp32_and_attention_is_flash(tiny_run: Run) -> None:
    matmul = torch.backends.cuda.matmul
    for allows in (True, False):
        run = with_fields(tiny_run, kernels={"reduced_precision": allows})
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_device(Process(), run)
        assert matmul.allow_bf16_reduced_precision_reduction is allows
        assert matmul.allow_fp16_reduced_precision_reduction is allows
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()


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
    ("micro_batch_size", "n_ranks", "hint"),
    [
        (4, 2, 'train.micro_batch_size=1, or parallel.recompute="block", or parallel.zero_stage=3'),
        (1, 1, 'parallel.recompute="block", or parallel.zero_stage=3, or '),
    ],
)
def test_a_full_gpu_is_one_message(
    tiny_run: Run, micro_batch_size: int, n_ranks: int, hint: str
) -> None:
    batches = {"micro_batch_size": micro_batch_size, "global_batch_size": 8}
    run = with_fields(tiny_run, train=batches)
    with (
        pytest.raises(MachineError, match="does not fit into the memory of cpu") as error,
        explain_device_errors(run, resolve(run, n_ranks), CPU),
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB. Of the allocated memory 1 .."
        )
    assert error.value.problem.endswith("CUDA out of memory. Tried to allocate 2 GiB.")
    assert error.value.hint.startswith(hint)
    assert error.value.exit_code == 2


def test_what_has_no_deterministic_kernel_is_named(tiny_run: Run) -> None:
    run = with_fields(tiny_run, train={"deterministic": True})
    device = choose_device(Process(), run)
    with (
        pytest.raises(ConfigError, match="put_ has no deterministic kernel for cpu"),
        explain_device_errors(run, resolve(run, 1), device),
    ):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    choose_device(Process(), tiny_run)
    assert not torch.are_deterministic_algorithms_enabled()


def test_token_outside_the_vocabulary(tiny_run: Run, tmp_path: Path) -> None:
    small = with_fields(tiny_run, model={"vocabulary_size": 300})
    with pytest.raises(DataError, match=r"token id \d+ is outside the model's vocabulary of 300"):
        start(tmp_path / "run", small)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 93)])
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
    assert read_manifest(newest(folder)).step >= 3


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
    told = json.loads((tmp_path / "versions.json").read_text())
    for versions in (read_manifest(newest(tmp_path)).versions, told):
        assert versions["code"] == "0123456789ab"
        assert versions["commit"]


def test_wall_clock_limit_saves_and_can_be_resumed(tiny_run: Run, tmp_path: Path) -> None:
    limited = with_fields(tiny_run, train={"stop_after_minutes": 1e-9})
    ending = start(tmp_path / "run", limited)
    assert (ending.reason, ending.exit_code) == ("train.stop_after_minutes=1e-09 has elapsed", 75)
    assert start(tmp_path / "run", tiny_run, "must") == DONE


def test_data_of_another_tokenizer_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog, whose bark is worse than its bite. "
    for name, words in (("mine", text), ("other", text[::-1])):
        train_tokenizer([words] * 4, 270, tmp_path / name)
    (tmp_path / "text.txt").write_text(text * 40)
    corpus = {"inputs": [f"{tmp_path}/text.txt"], "output": f"{tmp_path}/tokens"}
    prepare(load_corpus(None, {**corpus, "tokenizer": f"{tmp_path}/mine"}))
    data = {"train": {"prefixes": [f"{tmp_path}/tokens_text_document"]}, "blend": {}}
    run = with_fields(tiny_run, data=data, tokenizer={"path": f"{tmp_path}/other"})
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


def meet() -> tuple[int, Mesh]:
    """Gives the number of this rank of three, and the mesh of all."""
    return dist.get_rank(), build_mesh(Topology(shard=3), dist.get_rank(), CPU)


@contextmanager
def counted_reads() -> Iterator[list[FileBlock]]:
    """Yields a list of the blocks of files that are read in this process."""
    found: list[FileBlock] = []
    read_digest = FileBlock.read_digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileBlock, "read_digest", lambda *a: found.append(a[0]) or read_digest(*a))
        yield found


def run_on(prefixes: list[Path], cache: Path) -> Run:
    data = {"blend": {"prefixes": list(map(str, prefixes))}, "cache_folder": str(cache)}
    return Run.model_validate({"data": data})


def write_twice(folder: Path) -> list[Path]:
    """Writes the same token files in two folders."""
    for name in "ab":
        (folder / name).mkdir()
    return [write_tokens(folder / name) for name in "ab"]


def test_data_without_a_record_is_read_once_by_all_ranks_together(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.data.index_cache.BLOCK_BYTES", 500)
    monkeypatch.setattr("trainyard.training.context.BLOCKS_A_ROUND", 2)
    prefixes = write_twice(tmp_path)
    blocks = sum(-(-path.stat().st_size // 500) for p in prefixes for path in token_paths(str(p)))
    run = run_on(prefixes, tmp_path / "cache")

    def read() -> tuple[int, str]:
        rank, mesh = meet()
        with counted_reads() as read_here:
            describe_data(run)
            assert not read_here, "before the ranks have met, none reads"
            hash_new_token_files(run, mesh, Heartbeat(), keeps=rank == 0)
            return len(read_here), data_fingerprint(run)

    counts, fingerprints = zip(*run_ranks(3, read), strict=True)
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == blocks
    assert set(fingerprints) == {data_fingerprint(run_on(prefixes, tmp_path / "new"))}
    assert run_ranks(3, read) == [(0, fingerprints[0])] * 3, "it is remembered"


def test_ranks_that_see_other_data_are_told(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    mine, other = write_twice(tmp_path)
    path = Path(f"{other}.bin")
    path.write_bytes(bytes(path.stat().st_size))

    def read() -> str:
        rank, mesh = meet()
        run = run_on([other if rank == 2 else mine], tmp_path / f"cache{rank == 2}")
        with pytest.raises(LaunchError) as caught:
            hash_new_token_files(run, mesh, Heartbeat(), keeps=rank != 1)
        return caught.value.problem

    assert set(run_ranks(3, read)) == {"rank 2 of 3: the token files differ from those of rank 0"}


def check(prefixes: list[Path], folder: Path) -> tuple[int, int, list[int]]:
    """Checks as this rank; counts indexes it reads whole, then and when it builds its order."""
    rank, mesh = meet()
    run = run_on([prefixes[rank]], folder / f"cache{rank}")
    opened: list[str] = []
    check_sequences = IndexedDataset._check_sequences

    def note(dataset: IndexedDataset) -> None:
        opened.append(dataset.prefix)
        check_sequences(dataset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexedDataset, "_check_sequences", note)
        describe_data(run)
        assert not opened, "before the ranks have met, none reads"
        trusted = check_token_files(run, mesh)
        n_checked = len(opened)
        data_fingerprint(run)
        dataset = IndexedDataset(prefixes[rank], trusted)
    return n_checked, len(opened), [dataset.n_tokens, len(dataset), len(dataset.stream)]


def test_an_index_is_read_whole_once_by_ranks_that_see_it(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Ranks 0 and 1 share a file system; rank 2 has a copy."""
    mine, other = write_twice(tmp_path)
    dataset = IndexedDataset(mine)
    sizes = [dataset.n_tokens, len(dataset), len(dataset.stream)]
    found = run_ranks(3, check, [mine, mine, other], tmp_path)
    assert found == [(1, 1, sizes), (0, 0, sizes), (1, 1, sizes)]


def test_a_changed_index_is_read_whole_again(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path)
    trusted = check_token_files(run_on([prefix], tmp_path), Mesh(Topology(), 0, CPU))
    path = token_paths(prefix)[1]
    content = bytearray(path.read_bytes())
    content[34] ^= 1  # the first length
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"idx: byte \d+: sequence_pointers\[\d\] is "):
        IndexedDataset(prefix, trusted)


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


def spoil(folder: Path, shuffle: Path, fault: str) -> None:
    """Puts zeros or another order into the cache."""
    if fault == "damaged":
        content = shuffle.read_bytes()
        shuffle.write_bytes(content[:128] + bytes(len(content) - 128))
    if fault == "other":
        found = np.load(shuffle)
        IndexCache(folder).save(shuffle.stem, found.shape, found.dtype, [found[::-1]])


@pytest.mark.parametrize("fault", ["none", "damaged", "other"])
def test_an_order_of_a_rank_s_own_is_checked(
    run_ranks: Callable[..., list[Any]], tiny_run: Run, tmp_path: Path, fault: str
) -> None:
    """Ranks 0 and 1 share a cache; that of rank 2 may be damaged or another."""

    def read() -> tuple[Any, int, bool]:
        rank, mesh = meet()
        folder = tmp_path / ("mine" if rank == 2 else "shared")
        batches = {"micro_batch_size": 1, "global_batch_size": 3}
        run = with_fields(tiny_run, data={"cache_folder": str(folder)}, train=batches)
        rows_of_order(run, mesh)
        shuffles = sorted(folder.glob("*-shuffle_index.npy"))
        for shuffle in shuffles if rank == 2 else ():
            spoil(folder, shuffle, fault)
        states = [path.stat().st_mtime_ns for path in shuffles]
        with counted_reads() as read_here:
            try:
                result: Any = rows_of_order(run, mesh)
            except LaunchError as error:
                result = error.problem
        return result, len(read_here), states == [path.stat().st_mtime_ns for path in shuffles]

    results, n_read, untouched = zip(*run_ranks(3, read), strict=True)
    assert n_read[0] and not n_read[1] and n_read[2]
    if fault == "other":
        problem = "rank 2 of 3: the order of training sequences differs from that of rank 0"
        assert set(results) == {problem}
    else:
        assert results[0] == results[1] == results[2]
        assert untouched == (True, True, fault == "none")


def test_after_the_second_step_the_collector_has_little_left_to_look_at(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []

    def noted(*context_and_state: Any) -> StepResult:
        frozen.append(gc.get_freeze_count())
        return train_step(*context_and_state)

    monkeypatch.setattr(loop, "train_step", noted)
    start(tmp_path, with_fields(tiny_run, train={"length": "4 steps"}))
    assert frozen[:2] == [0, 0] and min(frozen[2:]) > 10_000
    assert gc.get_freeze_count() == 0, "what runs next in this process is collected as ever"
