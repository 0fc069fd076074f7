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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.architecture import ParameterSpec
    from trainyard.parallel.placement import Placement

Costs = dict[str, float]
SECONDS, BYTES, COUNT = "CPU s", "bytes", "count"
N_STEPS = 30
SEQUENCES_A_RANK = 4
TENSORS_OF_A_MODEL = 444  # GPT-3 125M with both moments
_STAGES: dict[int, dict[str, ParameterSpec]] = {}
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
    """Joins and saves as many ranks, here threads; reads the manifest."""
    import torch

    from trainyard.checkpoint.format import MANIFEST, Facts, read_manifest
    from trainyard.checkpoint.save import SavingRank, save_checkpoint
    from trainyard.parallel.placement import Placement

    facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})
    parts = ("model", "optimizer", "optimizer")
    names = [f"{parts[n % 3]}.blocks.{n}.weight" for n in range(TENSORS_OF_A_MODEL)]
    barrier = threading.Barrier(n_ranks)

    def agree(text: str | None) -> str | None:
        barrier.wait()
        return text

    def save(rank: int) -> float:
        tensors = dict.fromkeys(names, torch.zeros(1, 64))
        place = Placement((n_ranks, 64), (rank, 0), (1, 64))
        ranks = SavingRank(rank, n_ranks, agree)
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
    return costs | {"rendezvous of all ranks": cpu_seconds(lambda: join_ranks(n_ranks))}


def measure_groups(n_ranks: int, folder: Path) -> Costs:
    """Creates the groups of the first rank of GPT-3 175B, of a fake backend that connects none."""
    import torch
    import torch.distributed as dist

    from trainyard.parallel.mesh import build_mesh
    from trainyard.simulate.fake_world import fake_world
    from trainyard.topology import Topology

    topology = Topology(pipeline=8, shard=n_ranks // 32, tensor=4)
    with fake_world(0, n_ranks):
        build = cpu_seconds(lambda: build_mesh(topology, 0, torch.device("cpu")))
        n_groups = len(dist.distributed_c10d._world.pg_map)
    return {"create the groups of a rank": build, "groups of a rank": float(n_groups)}


def measure_hang(n_ranks: int, folder: Path) -> Costs:
    """Names the rank that hangs: the first parent from all reports, another from its verdict."""
    from trainyard.launch.supervise import HangReports, RankStatus, describe_hang

    opened: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.scandir") and str(arguments[0]).startswith(str(folder)):
            opened.append(event)

    reports, of_first, of_another = (HangReports(folder / "logs") for _ in range(3))
    sys.addaudithook(note)
    reports.write(
        RankStatus(
            rank, "node", 12, "update", 41 - (rank == 1), 12.3, "waiting", False, False, STACK
        )
        for rank in range(n_ranks)
    )
    written = len(opened)

    def lead() -> None:
        text = describe_hang(of_first.read([], n_ranks, 0.0), n_ranks)
        of_first.decide(text.partition("\n")[0])

    def follow() -> None:
        assert len(of_another.find()) == n_ranks
        assert of_another.verdict().startswith(f"rank 1 of {n_ranks} ")

    costs = {"first parent": cpu_seconds(lead)}
    by_first = len(opened) - written
    costs["another parent"] = cpu_seconds(follow)
    by_another = len(opened) - written - by_first
    costs["files opened by all parents"] = written + by_first + (n_ranks - 1) * by_another
    return costs


def measure_chunks(n_ranks: int, folder: Path) -> Costs:
    """Merges what as many ranks of GPT-3 175B wrote, and reads the manifest as one of them.

    Pipeline 8, tensor 4, ZeRO 3 over the data ranks; the lists of chunks are real, and stand for
    files of values that are not there.
    """
    from trainyard.checkpoint.format import MANIFEST, Facts
    from trainyard.checkpoint.save import ALONE, SavingRank, _join_and_publish

    (partial := folder / "partial").mkdir()
    n_chunks = int(run_child("--lists", n_ranks, partial))
    facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})
    ranks, path = SavingRank(0, n_ranks, ALONE.agree), folder / "step-00000001"
    costs = {
        "chunks": float(n_chunks),
        "merge by rank 0": cpu_seconds(
            lambda: _join_and_publish(partial, path, facts, ranks, None)
        ),
        "manifest": float((path / MANIFEST).stat().st_size),
    }
    seconds, memory, n_opened = json.loads(run_child("--read", n_ranks, path))
    costs |= {"manifest read by a rank": seconds, "memory of the manifest": memory}
    return costs | {"files opened by a rank": n_opened}


def parts_of_rank(rank: int, n_ranks: int) -> dict[str, Placement]:
    """Names what a rank writes of the blocks of GPT-3 175B, as `measure_chunks` lays it out."""
    from trainyard.architecture import parameters_of, stage_layers
    from trainyard.config.load import load_run
    from trainyard.parallel.placement import whole

    (pipeline, tensor), n_layers = (8, 4), 96
    data = n_ranks // (pipeline * tensor)
    stage, data_rank, tensor_rank = rank // (data * tensor), rank // tensor % data, rank % tensor
    bounds = n_layers // pipeline * stage, n_layers // pipeline * (stage + 1)
    if stage not in _STAGES:
        model = load_run("gpt3-175b").run.model
        layers = stage_layers(model, model.vocabulary_size, bounds)
        _STAGES[stage] = parameters_of(layers)
    places: dict[str, Placement] = {}
    for name, parameter in _STAGES[stage].items():
        place = whole(parameter.shape)
        if parameter.dimension is not None:
            place = place.cut(parameter.dimension, tensor_rank, tensor)
        elif tensor_rank:
            continue  # the first tensor rank writes it
        place = place.cut(0, data_rank, data)
        if name.startswith("blocks.") and 0 not in place.local_shape:
            states = [f"optimizer.{name}.{moment}" for moment in ("exp_avg", "exp_avg_sq")]
            places |= dict.fromkeys([f"model.{name}", *states], place)
    return places


def write_lists(n_ranks: int, partial: Path) -> int:
    """Writes each rank's list of chunks, as a save does; returns the number of chunks."""
    import torch

    from trainyard.checkpoint.format import StoredFile
    from trainyard.checkpoint.save import (
        ALONE,
        RankManifest,
        SavingRank,
        _named_shards,
        _write_flushed,
        list_parts,
        parts_name,
    )

    n_chunks = 0
    for rank in range(n_ranks):
        places = parts_of_rank(rank, n_ranks)
        n_chunks += len(places)
        tensors = {n: torch.empty(place.local_shape, device="meta") for n, place in places.items()}
        shards = dict(_named_shards(tensors, SavingRank(rank, n_ranks, ALONE.agree)))
        files = {
            name: StoredFile(4096 + sum(tensor.nbytes for tensor in shard.values()), "0" * 64)
            for name, shard in shards.items()
        }
        parts = list_parts(shards.values(), places)
        _write_flushed(partial / parts_name(rank), RankManifest(parts, files))
    return n_chunks


def read_as_rank(n_ranks: int, path: Path) -> tuple[float, float, int]:
    """Reads a manifest and finds the chunks of the last rank: CPU time, memory, files to open."""
    from trainyard.checkpoint.format import load_manifest
    from trainyard.checkpoint.load import find_chunks

    places = parts_of_rank(n_ranks - 1, n_ranks)
    files: list[int] = []
    before = peak_bytes()
    seconds = cpu_seconds(lambda: files.extend(find_chunks(load_manifest(path), places)))
    return seconds, peak_bytes() - before, len(files)


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
            "rendezvous of all ranks": SECONDS,
        },
        measure_many_ranks,
    ),
    "chunks": Cell(
        "ranks of GPT-3 175B",
        (512, 2048, 8192),
        (32, 64),
        {
            "chunks": COUNT,
            "merge by rank 0": SECONDS,
            "manifest read by a rank": SECONDS,
            "manifest": BYTES,
            "memory of the manifest": BYTES,
            "files opened by a rank": COUNT,
        },
        measure_chunks,
    ),
    "groups": Cell(
        "ranks in groups",
        (512, 2048, 8192),
        (32, 64),
        {"create the groups of a rank": SECONDS, "groups of a rank": COUNT},
        measure_groups,
    ),
    "hang": Cell(
        "ranks of a hang",
        (8, 128, 1024, 8192),
        (2, 4),
        {"first parent": SECONDS, "another parent": SECONDS, "files opened by all parents": COUNT},
        measure_hang,
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
    """Is one rank of a run in a folder, or writes or reads what a checkpoint's ranks need."""
    *options, place = sys.argv[1:]
    match options:
        case ["--manifest"]:
            print(weigh_manifest(Path(place)))
            return
        case ["--lists", n_ranks]:
            print(write_lists(int(n_ranks), Path(place)))
            return
        case ["--read", n_ranks]:
            print(json.dumps(read_as_rank(int(n_ranks), Path(place))))
            return
    from trainyard.launch.environment import read_process

    path = Path(place) / f"rank-{read_process().rank:05d}.json"
    path.write_text(json.dumps(train_steps(Path(place))), encoding="utf-8")


if __name__ == "__main__":
    be_child()
