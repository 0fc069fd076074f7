"""Builds what a training step needs: model, optimizer, and data that all ranks know to be the same.

Each block and index of a token file is read by one rank, and each order of sequences is checked by
one, for all ranks that see the same files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch

from trainyard.checkpoint.format import list_checkpoints
from trainyard.config.run import Run
from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import FileState, IndexedDataset, index_state
from trainyard.data.loader import (
    Loader,
    build_training_orders,
    data_fingerprint,
    data_prefixes,
    find_unread,
)
from trainyard.data.order import SequenceOrder, Split
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import Tokenizer, tokenizer_name
from trainyard.errors import ConfigError, LaunchError
from trainyard.launch.heartbeat import Heartbeat
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import Plan
from trainyard.log import show_progress
from trainyard.optim.optimizer import build_optimizer
from trainyard.parallel.mesh import Mesh, keep_freed_memory
from trainyard.parallel.model import ParallelModel
from trainyard.topology import name_ranks
from trainyard.training.run_folder import OpenRun, checkpoint_folder, refuse_larger_vocabulary
from trainyard.training.state import TrainContext

BLOCKS_A_ROUND = 64
"""Blocks of 16 MiB that a rank reads between synchronizations."""


def build_context(opened: OpenRun, mesh: Mesh, heartbeat: Heartbeat) -> TrainContext:
    """Builds model, optimizer and data; checks that data, tokenizer and model belong together."""
    folder, run, plan = opened.folder, opened.run, opened.plan
    tokenizer = None
    if opened.files.vocabulary is not None:
        tokenizer = Tokenizer(opened.files.vocabulary, tokenizer_name(run.tokenizer.path))
    _check_vocabularies(run, tokenizer)
    batches = BatchSchedule(run)
    orders = build_shared_orders(run, plan, mesh)
    if orders["train"] is None:
        raise ConfigError(
            f"data.split={run.data.split!r} leaves no sequences for training",
            "set its first share above 0",
        )
    if mesh.device.type == "cpu":
        keep_freed_memory(mesh.topology.n_ranks)
    is_filled = bool(list_checkpoints(checkpoint_folder(folder)) or run.train.start_from)
    parallel_model = ParallelModel(run, plan, mesh, is_filled=is_filled)
    return TrainContext(
        folder=folder,
        run=run,
        plan=plan,
        batches=batches,
        model=parallel_model,
        optimizer=build_optimizer(parallel_model, run),
        train_data=Loader(
            orders["train"],
            batches,
            run.model.vocabulary_size,
            mesh.data_rank_and_size,
            pin_memory=mesh.device.type == "cuda",
        ),
        valid_order=orders["valid"],
        test_order=orders["test"],
        tokenizer=tokenizer,
        data_fingerprint=data_fingerprint(run),
        heartbeat=heartbeat,
    )


def check_token_files(run: Run, mesh: Mesh) -> set[FileState]:
    """Reads the index of each token file whole: one rank does, for all that see the same files.

    Args:
        run: names the files.
        mesh: all ranks call this.

    Returns:
        the states of the indexes, for `IndexedDataset`.

    Raises:
        DataError: an index is damaged; the ranks that wait then lose the one that has read it.
    """
    states = [index_state(prefix) for prefix in data_prefixes(run)]
    views = mesh.gather([_number(states)])
    if views.index(views[mesh.rank]) == mesh.rank:
        for prefix in data_prefixes(run):
            IndexedDataset(prefix)
    mesh.barrier()
    return set(states)


def hash_new_token_files(run: Run, mesh: Mesh, heartbeat: Heartbeat, *, keeps: bool) -> None:
    """Reads token files missing from records and caches: each block once, by one rank.

    Ranks that see the same files share the work. They synchronize every round, so that no rank
    waits long and all send heartbeats.

    Args:
        run: names the files.
        mesh: all ranks call this.
        heartbeat: of this rank.
        keeps: whether this rank writes the results to the cache folder.

    Raises:
        LaunchError: ranks see different contents.
    """
    unread = find_unread(run)
    blocks = [block for files in unread for block in files.blocks]
    view = _number([files.states for files in unread]) if unread else 0
    views = mesh.gather([view, len(blocks)])
    if not any(n_blocks for _, n_blocks in views):
        return
    alike = [rank for rank, (other, _) in enumerate(views) if other == view]
    mine = range(alike.index(mesh.rank), len(blocks), len(alike))
    n_seeing = Counter(other for other, _ in views)
    n_rounds = max(-(-n // (n_seeing[other] * BLOCKS_A_ROUND)) for other, n in views)
    digests = torch.zeros(len(blocks), 32, dtype=torch.uint8)
    title = "fingerprinting the token files"
    with show_progress(title) if mesh.rank == 0 else nullcontext(lambda *_: None) as update:
        for number in range(n_rounds):
            heartbeat.enter("load", 0)
            for block in mine[number * BLOCKS_A_ROUND :][:BLOCKS_A_ROUND]:
                digest = bytearray(blocks[block].read_digest())
                digests[block] = torch.frombuffer(digest, dtype=torch.uint8)
            mesh.barrier()
            update(number + 1, n_rounds)
    for other, n_blocks in sorted({(other, n) for other, n in views if n}):
        mesh.all_reduce(digests if other == view else torch.zeros(n_blocks, 32, dtype=torch.uint8))
    cache, found = IndexCache(Path(run.data.cache_folder)), iter(digests.tolist())
    if keeps:
        for files in unread:
            cache.remember(files, [bytes(next(found)) for _ in files.blocks])
    mesh.barrier()
    contents = mesh.gather([_number(data_fingerprint(run))])
    if others := [rank for rank, each in enumerate(contents) if each != contents[0]]:
        raise LaunchError(
            f"{name_ranks(others)} of {len(contents)}: the token files differ from those of rank 0",
            "copy them again where they differ, or put them on shared storage",
        )


def build_shared_orders(run: Run, plan: Plan, mesh: Mesh) -> dict[Split, SequenceOrder | None]:
    """Builds the orders of all splits, or loads them.

    The first rank fills the cache and checks it; of the others only those that see other files
    check theirs.

    Args:
        run: names the data.
        plan: its numbers of sequences.
        mesh: all ranks call this.

    Raises:
        ConfigError, DataError: as `build_training_orders`.
        LaunchError: ranks have different orders.
    """
    folder, trusted = Path(run.data.cache_folder), check_token_files(run, mesh)
    cache = IndexCache(folder, checks=mesh.rank == 0, trusted=trusted)
    if mesh.rank > 0:
        mesh.barrier()
    orders = build_training_orders(run, plan, cache)
    if mesh.rank == 0:
        mesh.barrier()
    views = mesh.gather([_number(cache.loaded)])
    if views[mesh.rank] != views[0]:
        cache = IndexCache(folder, trusted=trusted)
        orders = build_training_orders(run, plan, cache)
    checksums = {name: checksum for name, (_, checksum) in cache.loaded.items()}
    contents = mesh.gather([_number(checksums)])
    if others := [rank for rank, each in enumerate(contents) if each != contents[0]]:
        raise LaunchError(
            f"{name_ranks(others)} of {len(contents)}: the order of training sequences differs "
            "from that of rank 0",
            f"remove the folder {folder} (data.cache_folder) on each host; it is made anew",
        )
    return orders


def _check_vocabularies(run: Run, tokenizer: Tokenizer | None) -> None:
    """Checks that the tokenizer fits the model and made every token file."""
    if tokenizer is not None:
        refuse_larger_vocabulary(run, tokenizer.vocabulary_size)
    for prefix in data_prefixes(run):
        if not Path(f"{prefix}.json").exists():  # made by Megatron-LM: tokenizer unknown
            continue
        sidecar = load_sidecar(prefix)
        sidecar.check_sizes(prefix)
        if tokenizer is not None:
            sidecar.check_against(tokenizer.name, tokenizer.fingerprint, prefix)
        if sidecar.tokenizer.vocabulary_size > run.model.vocabulary_size:
            raise ConfigError(
                f"{prefix} was made with a vocabulary of {sidecar.tokenizer.vocabulary_size} "
                f"tokens, model.vocabulary_size={run.model.vocabulary_size} is smaller",
                f"model.vocabulary_size={sidecar.tokenizer.vocabulary_size}",
            )


def _number(value: object) -> int:
    text = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7])
