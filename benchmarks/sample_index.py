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
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trainyard.config.run import Blend
from trainyard.data.blend import build_blend_index
from trainyard.data.indexed import IndexedWriter, token_paths
from trainyard.data.order import SequenceSettings, build_order

N_DOCUMENTS = 20_000_000
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
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer._add_lengths(lengths, np.ones(n_documents, np.int32))
    bin_path, idx_path = token_paths(prefix)
    os.truncate(bin_path, 2 * n_tokens)
    with idx_path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    sidecar = {
        "bin": {"size_bytes": 2 * n_tokens, "sha256": "0" * 64},  # not worth hashing 40 GB of holes
        "idx": {"size_bytes": idx_path.stat().st_size, "sha256": checksum},
    }
    Path(f"{prefix}.json").write_text(json.dumps(sidecar))
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
        Path(folder),
    )
    order = orders["train"]
    assert order is not None
    return {"train_sequences": len(order), "epochs": order.corpora[0].plan.n_epochs}


def shuffle_only(n_epochs: int, n_tokens: int) -> dict[str, float]:
    """Shuffles arrays of the training split's sizes as Megatron-LM does, and nothing else."""
    random = np.random.RandomState(SEED)
    for size, dtype in (
        (int(0.949 * N_DOCUMENTS) * n_epochs, np.int32),
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
    tasks = {
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
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*json.loads(options.child))
        return
    record: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "numpy": np.__version__,
        "documents": N_DOCUMENTS,
        "import": run_child("import"),
        "blend of 2 corpora, 20 M sequences": run_child("blend", 20_000_000),
    }
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        # Every job is a child: a process begins with its parent's peak of memory as its own.
        record["tokens"] = n_tokens = int(run_child("corpus", str(prefix), N_DOCUMENTS)["tokens"])
        for n_epochs, megatron in MEGATRON.items():
            cache = Path(folder) / f"cache{n_epochs}"
            arguments = (str(prefix), n_epochs, n_tokens, str(cache))
            record[f"{n_epochs} epochs"] = {
                "trainyard": run_child("build", *arguments),
                "trainyard, second start": run_child("build", *arguments),
                "cache_gb": round(sum(f.stat().st_size for f in cache.iterdir()) / 1e9, 2),
                "shuffles alone, 32 bits": run_child("shuffle", n_epochs, n_tokens),
                "megatron_elsewhere": megatron,
            }
    text = json.dumps(record, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
