"""Time and memory of building the order of 20 million documents, beside Megatron-LM's.

    python benchmarks/sample_index.py --output sample_index.json

The corpus is made for the occasion: random document lengths, 20 billion tokens, and a .bin that is
one hole in the file system. Each build runs in a process of its own, and saves its arrays.
Megatron-LM's figures were taken with as many documents and tokens and the same split, seed and
length, but on another machine; the time of numpy's shuffles alone, which both need, says how the
machines compare.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import describe_machine, publish

from trainyard.config.run import Blend
from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import token_paths, write_index
from trainyard.data.order import SequenceSettings, build_blend_index, build_order
from trainyard.data.sidecar import Sidecar, TokenizerRecord, save_sidecar
from trainyard.files import BlockChecksum, FileRecord

MEAN_TOKENS = 1000
SEQUENCE_LENGTH = 1024
SPLIT = "949,50,1"
SEED = 1234
# facts/data-format.md, section 5; 0.51 GB of each peak is imports
MEGATRON = {1: {"cpu_seconds": 3.1, "peak_gb": 1.09}, 4: {"cpu_seconds": 17.3, "peak_gb": 2.39}}


def make_corpus(prefix: str, n_documents: int) -> dict[str, float]:
    """Writes a real .idx and a hole for a .bin, and what `prepare` would say about them."""
    random = np.random.RandomState(SEED)
    lengths = random.randint(1, 2 * MEAN_TOKENS - 1, n_documents).astype(np.int32)
    n_tokens = int(lengths.sum(dtype=np.int64))
    dtype = np.dtype(np.uint16)
    bin_path, idx_path = token_paths(prefix)
    bin_path.touch()
    os.truncate(bin_path, 2 * n_tokens)
    ones = np.ones(n_documents, np.int32)
    blocks = write_index(idx_path, dtype, (n_documents, n_documents), lambda: [(lengths, ones)])
    sidecar = Sidecar(
        recipe="benchmark",
        tokenizer=TokenizerRecord("benchmark", "0" * 64, 50257, 50256, "text"),
        json_key="text",
        append_eod=True,
        dtype=dtype.name,
        documents=n_documents,
        empty_documents=0,
        sequences=n_documents,
        tokens=n_tokens,
        text_bytes=4 * n_tokens,
        steps=[],
        groups={},
        quarantined={},
        quarantined_places=[],
        bin=FileRecord([BlockChecksum(2 * n_tokens, "0" * 64)]),  # 40 GB of holes are not hashed
        idx=FileRecord(blocks),
        sources=[],
    )
    save_sidecar(sidecar, prefix)
    return {"tokens": n_tokens}


def build(prefix: str, n_epochs: int, n_tokens: int, folder: str) -> dict[str, float]:
    """Builds the three splits: `n_epochs` of training documents, the rest in proportion."""
    train = int(0.949 * n_tokens * (n_epochs - 0.026)) // SEQUENCE_LENGTH
    sizes = (train, train // 20, train // 1000)
    orders = build_order(
        Blend(prefixes=(prefix,)),
        SPLIT,
        sizes,
        SequenceSettings(SEQUENCE_LENGTH, SEED),
        IndexCache(Path(folder)),
    )
    order = orders["train"]
    assert order is not None
    return {"train_sequences": len(order), "epochs": order.corpora[0].plan.n_epochs}


def shuffle_only(n_epochs: int, n_documents: int, n_tokens: int) -> dict[str, float]:
    """Shuffles arrays of the training split's sizes as Megatron-LM does, and nothing else."""
    random = np.random.RandomState(SEED)
    for size, dtype in (
        (int(0.949 * n_documents) * n_epochs, np.int32),
        (int(0.949 * n_tokens) * n_epochs // SEQUENCE_LENGTH, np.uint32),
    ):
        random.shuffle(np.arange(size, dtype=dtype))
    return {}


def blend_only(size: int) -> dict[str, float]:
    """Blends two corpora."""
    corpus, _ = build_blend_index(np.array([0.35, 0.65]), size)
    return {"share_of_first": float(np.mean(corpus == 0))}


def run_child(*arguments: object) -> dict[str, float]:
    """Runs this file as a child process and adds what it used."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    started = time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {**json.loads(output), "wall_seconds": round(time.perf_counter() - started, 2)}


def child(name: str, *arguments: object) -> None:
    tasks: dict[str, Callable[..., Any]] = {
        "build": build,
        "shuffle": shuffle_only,
        "blend": blend_only,
        "import": dict,
        "corpus": make_corpus,
    }
    result = tasks[name](*arguments)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result["cpu_seconds"] = round(usage.ru_utime + usage.ru_stime, 2)
    result["peak_gb"] = round(usage.ru_maxrss * 1024 / 1e9, 3)
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*json.loads(options.child))
        return
    n_documents = options.documents
    record = describe_machine(("numpy",)) | {
        "documents": n_documents,
        "import": run_child("import"),
        "blend of 2 corpora, 20 M sequences": run_child("blend", 20_000_000),
    }
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        # Every job is a child: a process begins with its parent's peak of memory as its own.
        record["tokens"] = n_tokens = int(run_child("corpus", str(prefix), n_documents)["tokens"])
        for n_epochs, megatron in MEGATRON.items():
            cache = Path(folder) / f"cache{n_epochs}"
            arguments = (str(prefix), n_epochs, n_tokens, str(cache))
            record[f"{n_epochs} epochs"] = {
                "trainyard": run_child("build", *arguments),
                "trainyard, second start": run_child("build", *arguments),
                "cache_gb": round(sum(f.stat().st_size for f in cache.iterdir()) / 1e9, 2),
                "shuffles alone, 32 bits": run_child("shuffle", n_epochs, n_documents, n_tokens),
                "megatron_elsewhere_with_20_million_documents": megatron,
            }
    publish(record, options.output)


if __name__ == "__main__":
    main()
