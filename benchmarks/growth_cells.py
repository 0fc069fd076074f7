"""What `growth.py` measures in processes of their own; not to be called by hand.

Each cell calls the product's functions on an input of one size, and returns costs by name: seconds
of CPU time, bytes, or calls. Nothing stands in for the product; inputs are made for the occasion.
"""

from __future__ import annotations

import gc
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Costs = dict[str, float]
SECONDS, BYTES, COUNT = "CPU s", "bytes", "count"
N_STEPS = 30
SEQUENCES_A_RANK = 4
TENSORS_OF_A_MODEL = 444  # GPT-3 125M with both moments
STACK = "Thread 0x00007f (most recent call first):\n" + '  File "x.py", line 1 in f\n' * 60


@dataclass(frozen=True)
class Cell:
    """Costs of one input, at growing sizes.

    Attributes:
        counted: what a size counts.
        sizes: of the full form.
        small: sizes of the small form.
        units: costs by name, with their units.
        measure: returns the costs of a size, given an empty folder.
    """

    counted: str
    sizes: tuple[int, ...]
    small: tuple[int, ...]
    units: dict[str, str]
    measure: Callable[[int, Path], Costs]


def cpu_seconds(work: Callable[[], object]) -> float:
    """Returns the CPU time of a call, of all threads of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_bytes() -> float:
    """Returns the most memory that this process has held."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024.0 * int(found[1])


def run_child(*arguments: object) -> str:
    """Runs this file as a child process, and returns its output."""
    command = [sys.executable, "-P", __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def write_run(folder: Path, n_ranks: int, *overrides: str) -> None:
    """Writes a tiny run with random tokens, as `trainyard bench` would."""
    from trainyard.bench.job import Steps, prepare_run
    from trainyard.config.load import load_run, render_run

    batch = SEQUENCES_A_RANK * n_ranks
    fields = [f"train.global_batch_size={batch}", f"train.micro_batch_size={SEQUENCES_A_RANK}"]
    run = load_run("tiny", [*fields, "parallel.zero_stage=1", *overrides]).run
    run = prepare_run(run, Steps(5, 2 * N_STEPS), folder)
    (folder / "run.toml").write_text(render_run(run), encoding="utf-8")


def train_steps(folder: Path) -> Costs:
    """Trains the run of a folder as this rank: builds, warms up, times steps, counts messages."""
    import torch

    from trainyard.bench.measure import OurTraining
    from trainyard.launch.environment import read_process
    from trainyard.launch.heartbeat import Heartbeat
    from trainyard.parallel.mesh import StopVote, build_mesh
    from trainyard.parallel.start import start_ranks
    from trainyard.simulate.accounting import Accounting
    from trainyard.training.context import build_context
    from trainyard.training.run_folder import open_run

    torch.set_num_threads(1)
    device, process = torch.device("cpu"), read_process()
    opened = open_run(folder, process.n_ranks)
    costs: Costs = {}
    with start_ranks(process, device, dict, timeout_seconds=600.0):
        mesh = build_mesh(opened.plan.topology, process.rank, device)
        start = time.process_time()
        context = build_context(opened, mesh, Heartbeat())
        costs["build"] = time.process_time() - start
        training, vote = OurTraining(context), StopVote(mesh)

        def steps(n: int = N_STEPS) -> None:
            for _ in range(n):
                training.step()
                vote.cast(None)

        steps()
        costs["step"] = cpu_seconds(steps) / N_STEPS
        with Accounting() as count:
            steps(1)
        costs["messages"] = count.calls.total()
        costs["message bytes"] = count.message_bytes.total()
    return costs


def measure_ranks(n_ranks: int, folder: Path) -> Costs:
    """Trains on ranks, each with as many sequences; what one rank alone takes is the compute."""
    from trainyard.launch.local import run_ranks

    write_run(folder, n_ranks)
    if n_ranks == 1:
        return {"step of a rank": train_steps(folder)["step"]}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(folder)]
    run_ranks(n_ranks, command, folder / "logs")
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    assert len(found) == n_ranks
    (alone := folder / "alone").mkdir()
    write_run(alone, 1)
    step = sum(rank["step"] for rank in found) / n_ranks
    costs = {"step of a rank": step, "beyond compute": step - train_steps(alone)["step"]}
    return costs | {f"{name} of a rank": found[0][name] for name in ("messages", "message bytes")}


def measure_depth(n_layers: int, folder: Path) -> Costs:
    """Builds, trains and plans a narrow model of many blocks."""
    import trainyard
    from trainyard.config.load import load_run

    write_run(folder, 1, f"model.n_layers={n_layers}")
    run = load_run(str(folder / "run.toml")).run
    costs = train_steps(folder)
    trainyard.plan(run, gpu="h100-80g", gpus=1)  # reads the tables of devices
    plan = cpu_seconds(lambda: [trainyard.plan(run, gpu="h100-80g", gpus=1) for _ in range(10)])
    return {"build": costs["build"], "step": costs["step"], "plan": plan / 10}


def measure_documents(n_documents: int, folder: Path) -> Costs:
    """Opens token files of as many documents, builds their order for one epoch, loads it again."""
    import sample_index

    from trainyard.data.indexed import IndexedDataset

    prefix, cache = str(folder / "corpus"), str(folder / "cache")
    # A child makes them: the peak of memory is of this process.
    n_tokens = int(sample_index.run_child("corpus", prefix, n_documents)["tokens"])
    opened = cpu_seconds(lambda: IndexedDataset(prefix))
    build = cpu_seconds(lambda: sample_index.build(prefix, 1, n_tokens, cache))
    peak = peak_bytes()
    load = cpu_seconds(lambda: sample_index.build(prefix, 1, n_tokens, cache))
    shuffle = cpu_seconds(lambda: sample_index.shuffle_only(1, n_documents, n_tokens))
    costs = {"open the index": opened, "build the order": build, "load the order": load}
    costs |= {"numpy's shuffles alone": shuffle, "peak memory": peak}
    return costs | {"cached order": sum(path.stat().st_size for path in Path(cache).iterdir())}


def measure_tensors(n_tensors: int, folder: Path) -> Costs:
    """Saves, loads and verifies a checkpoint of small tensors."""
    import torch

    from trainyard.checkpoint.format import MANIFEST, Facts
    from trainyard.checkpoint.load import load_into
    from trainyard.checkpoint.save import save_checkpoint
    from trainyard.checkpoint.verify import check_checkpoint

    facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})
    state = {f"model.blocks.{n}.weight": torch.full((64,), float(n)) for n in range(n_tensors)}
    path = folder / "step-00000001"
    costs = {
        "save": cpu_seconds(lambda: save_checkpoint(folder, facts, state)),
        "load": cpu_seconds(lambda: load_into(path, state, 1)),
        "verify": cpu_seconds(lambda: check_checkpoint(path)),
    }
    gc.disable()  # which looks at all objects again as they become more
    costs["save without Python's collector"] = cpu_seconds(
        lambda: save_checkpoint(folder, facts, state)
    )
    return costs | {"manifest": (path / MANIFEST).stat().st_size}


def measure_many_ranks(n_ranks: int, folder: Path) -> Costs:
    """Joins and saves as many ranks, here threads; reads the manifest, and hang reports of all."""
    import torch

    from trainyard.checkpoint.format import MANIFEST, Facts, read_manifest
    from trainyard.checkpoint.save import SavingRank, save_checkpoint
    from trainyard.launch.supervise import HangReports, RankStatus
    from trainyard.parallel.placement import Placement

    facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})
    parts = ("model", "optimizer", "optimizer")
    names = [f"{parts[n % 3]}.blocks.{n}.weight" for n in range(TENSORS_OF_A_MODEL)]
    barrier = threading.Barrier(n_ranks)

    def save(rank: int) -> float:
        tensors = dict.fromkeys(names, torch.zeros(1, 64))
        place = Placement((n_ranks, 64), (rank, 0), (1, 64))
        ranks = SavingRank(rank, n_ranks, barrier.wait)
        start = time.thread_time()
        save_checkpoint(folder, facts, tensors, dict.fromkeys(names, place), ranks)
        return time.thread_time() - start

    with ThreadPoolExecutor(n_ranks) as pool:
        first, *_ = pool.map(save, range(n_ranks))
    path = folder / "step-00000001"
    costs = {"save of rank 0": first, "manifest": float((path / MANIFEST).stat().st_size)}
    costs["files"] = len(list(path.iterdir()))
    costs["manifest read by a rank"] = cpu_seconds(lambda: read_manifest(path))
    costs["memory of the manifest"] = float(run_child("--manifest", path))
    reports = HangReports(folder / "logs")
    reports.write(
        RankStatus(rank, "node", 12, "update", 41, 1201.3, "waiting", False, False, STACK)
        for rank in range(n_ranks)
    )
    costs["hang reports read by a parent"] = cpu_seconds(reports.read)
    return costs | {"rendezvous of all ranks": cpu_seconds(lambda: join_ranks(n_ranks))}


def join_ranks(n_ranks: int) -> None:
    """Calls the roll of as many ranks, here threads, in a store of rank 0."""
    from trainyard.launch.environment import LOOPBACK, Process
    from trainyard.parallel.start import _Rendezvous, gather_facts

    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]

    def join(rank: int) -> _Rendezvous:
        meeting = _Rendezvous(Process(rank, n_ranks, address=LOOPBACK, port=port), 600.0)
        meeting.call_roll(lambda: gather_facts("run", "data"))
        return meeting

    with ThreadPoolExecutor(n_ranks) as pool:
        list(pool.map(join, range(n_ranks)))


def weigh_manifest(path: Path) -> float:
    """Returns the memory that reading a manifest adds to this process."""
    from trainyard.checkpoint.format import read_manifest

    before = peak_bytes()
    read_manifest(path)
    return peak_bytes() - before


def measure_files(n_files: int, folder: Path) -> Costs:
    """Lists and plans a folder of small files, and prepares it with one worker."""
    import msgspec

    from trainyard.config.corpus import Corpus
    from trainyard.corpus.preparation.plan import list_sources, plan_corpus
    from trainyard.corpus.preparation.prepare import prepare
    from trainyard.data.sidecar import TokenizerRecord

    (inputs := folder / "corpus").mkdir()
    for number in range(n_files):
        text = f"Note {number}.\n" + "A short line of text.\n" * 10
        (inputs / f"note-{number:06d}.txt").write_text(text, encoding="utf-8")
    corpus = Corpus(inputs=(str(inputs),), output=str(folder / "notes"), tokenizer="gpt2")
    tokenizer = TokenizerRecord("gpt2", "0" * 64, 50257, 50256, "text")
    costs = {"list the files": cpu_seconds(lambda: list_sources(corpus))}
    sources, _ = list_sources(corpus)
    costs["plan units"] = cpu_seconds(lambda: plan_corpus(corpus, tokenizer, None, sources))
    identity = plan_corpus(corpus, tokenizer, None, sources).identity
    costs["plan of the work folder"] = len(msgspec.json.encode(identity))
    return costs | {"prepare": cpu_seconds(lambda: prepare(corpus))}


def measure_devices(n_devices: int, folder: Path) -> Costs:
    """Plans GPT-3 175B on devices of azure-ndv5, and searches their layouts."""
    import trainyard
    from trainyard.planning.clusters import find_machine
    from trainyard.planning.search import search

    fields = ["train.batch_ramp=none", "train.global_batch_size=2048", "parallel.tensor=8"]
    run = trainyard.load_run("gpt3-175b", [*fields, f"parallel.pipeline={min(16, n_devices // 8)}"])
    machine = find_machine("azure-ndv5")

    def plan() -> None:
        trainyard.plan(run, cluster="azure-ndv5", gpus=n_devices)

    plan()  # reads the tables of devices
    return {
        "plan": cpu_seconds(plan),
        "search": cpu_seconds(lambda: search(run, machine, n_devices)),
    }


CELLS = {
    "depth": Cell(
        "blocks of the model",
        (4, 8, 16, 32, 64),
        (2, 4),
        {"build": SECONDS, "step": SECONDS, "plan": SECONDS},
        measure_depth,
    ),
    "documents": Cell(
        "documents",
        (10**4, 10**5, 10**6, 10**7, 10**8),
        (10**3, 3 * 10**3, 10**4),
        {
            "open the index": SECONDS,
            "build the order": SECONDS,
            "load the order": SECONDS,
            "numpy's shuffles alone": SECONDS,
            "peak memory": BYTES,
            "cached order": BYTES,
        },
        measure_documents,
    ),
    "tensors": Cell(
        "tensors of a checkpoint",
        (10**2, 10**3, 10**4, 10**5),
        (10, 30, 100),
        {
            "save": SECONDS,
            "save without Python's collector": SECONDS,
            "load": SECONDS,
            "verify": SECONDS,
            "manifest": BYTES,
        },
        measure_tensors,
    ),
    "saving": Cell(
        "ranks of a checkpoint",
        (8, 32, 128, 512),
        (2, 4),
        {
            "save of rank 0": SECONDS,
            "manifest read by a rank": SECONDS,
            "manifest": BYTES,
            "memory of the manifest": BYTES,
            "files": COUNT,
            "hang reports read by a parent": SECONDS,
            "rendezvous of all ranks": SECONDS,
        },
        measure_many_ranks,
    ),
    "files": Cell(
        "files of a corpus",
        (10, 100, 1000, 10_000, 60_000),
        (10, 30, 100),
        {
            "list the files": SECONDS,
            "plan units": SECONDS,
            "prepare": SECONDS,
            "plan of the work folder": BYTES,
        },
        measure_files,
    ),
    "devices": Cell(
        "devices, GPT-3 175B",
        (8, 128, 1024, 4096, 16_384),
        (8, 16),
        {"plan": SECONDS, "search": SECONDS},
        measure_devices,
    ),
    "ranks": Cell(
        "ranks",
        (1, 2, 4, 8),
        (1, 2, 4),
        {
            "step of a rank": SECONDS,
            "beyond compute": SECONDS,
            "messages of a rank": COUNT,
            "message bytes of a rank": BYTES,
        },
        measure_ranks,
    ),
}


def be_child() -> None:
    """Is one rank of a run in a folder, or reads the manifest of a checkpoint."""
    *options, place = sys.argv[1:]
    if options:
        print(weigh_manifest(Path(place)))
        return
    from trainyard.launch.environment import read_process

    path = Path(place) / f"rank-{read_process().rank:05d}.json"
    path.write_text(json.dumps(train_steps(Path(place))), encoding="utf-8")


if __name__ == "__main__":
    be_child()
