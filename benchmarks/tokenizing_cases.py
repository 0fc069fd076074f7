"""What `tokenizing.py` runs in processes of their own; not to be called by hand.

    PYTHON tokenizing_cases.py RUN corpus.jsonl

runs in a folder that holds GPT-2's vocabulary as `gpt2/`, and leaves what it found in
`figures.json`. The peers are Megatron-LM's own scripts, as whole commands; a third argument
names its checkout.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import re
import runpy
import sys
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
BLOCK_BYTES = 4 * 2**20


def start_megatron(_: Path) -> Figures:
    """Makes Megatron-LM importable, and imports what both of its tools do.

    It is written for Python 3.12; Python 3.11 lacks only a decorator that has no effect.
    """
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    sys.path.insert(0, sys.argv[3])
    import gigatoken  # noqa: F401
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: F401
    from megatron.training.arguments import _add_tokenizer_args  # noqa: F401

    return {}


def run_megatron(script: str, corpus: Path, *options: str) -> str:
    """Runs a script of Megatron-LM in this process; returns what it printed."""
    path = Path(sys.argv[3]) / "tools" / script
    start_megatron(corpus)
    files = ["--vocab-file", "gpt2/vocab.json", "--merge-file", "gpt2/merges.txt"]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod"]
    sys.argv = [script, "--input", str(corpus), "--output-prefix", "out", *tokenizer, *options]
    runpy.run_path(str(path), run_name="__main__")
    sys.stdout.flush()
    return Path("log").read_text(encoding="utf-8")


def run_default_tool(corpus: Path) -> Figures:
    """One worker process and the main one; its own clock, from the end of its first chunk."""
    log = run_megatron("preprocess_data.py", corpus, "--workers", "1", "--log-interval", "8")
    counts = re.findall(r"Processed (\d+) documents \(([\d.]+) docs/s", log)
    chunk = min(3, len(counts) - 2)  # of 32 documents
    ends = [(int(n), int(n) / float(rate)) for n, rate in (counts[chunk], counts[-1])]
    (first, start), (last, end) = ends
    with corpus.open("rb") as lines:
        n_documents = sum(1 for _ in lines)
    return {"work_seconds": (end - start) * n_documents / (last - first)}


def run_fast_tool(corpus: Path) -> Figures:
    """Its clock starts after the imports."""
    log = run_megatron("preprocess_data_fast.py", corpus, "--use-gigatoken")
    return {"work_seconds": float(re.findall(r"Elapsed time: ([\d.]+) seconds", log)[0])}


def read_texts(corpus: Path) -> Iterator[list[str]]:
    """Yields the batches of documents that `prepare` works with."""
    from trainyard.corpus.sources.documents import read_documents
    from trainyard.corpus.sources.files import find_files, split_into_units

    files = [(file, file.stat().st_size) for file in find_files([str(corpus)])]
    for unit in split_into_units(files, 2**27):
        for segment in unit:
            for batch in read_documents(segment, "text"):
                yield batch.texts


def run_encode_alone(corpus: Path) -> Figures:
    """A new engine over texts that are in memory; the ids are dropped."""
    import gigatoken
    from transformers import GPT2TokenizerFast

    batches = list(read_texts(corpus))
    engine = gigatoken.Tokenizer(GPT2TokenizerFast.from_pretrained("gpt2"))
    n_tokens, start = 0, time.perf_counter()
    for texts in batches:
        n_tokens += len(engine.encode_batch(texts, parallel=False).layout.content.data)
    return {"work_seconds": time.perf_counter() - start, "tokens": n_tokens}


def run_read_alone(corpus: Path) -> Figures:
    """Everything up to the texts of the documents."""
    start = time.perf_counter()
    n_documents = sum(map(len, read_texts(corpus)))
    return {"work_seconds": time.perf_counter() - start, "documents": n_documents}


def run_write_alone(corpus: Path) -> Figures:
    """Writes about as much as there are tokens of 16 bits, and syncs it."""
    block = os.urandom(BLOCK_BYTES)
    start = time.perf_counter()
    with Path("out.bin").open("wb") as file:
        for _ in range(corpus.stat().st_size // (2 * BLOCK_BYTES)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"work_seconds": time.perf_counter() - start}


def run_profile(corpus: Path) -> Figures:
    """Self time of every function of `prepare` with one worker, in this process."""
    from trainyard.cli.main import main

    command = ["prepare", str(corpus), "-o", "out", "--tokenizer", "gpt2", "--workers", "1"]
    profile = cProfile.Profile()
    with suppress(SystemExit):
        profile.runcall(main, command)
    stats: Any = pstats.Stats(profile)
    times: Counter[str] = Counter()
    for (file, _, name), (_, _, self_seconds, _, _) in stats.stats.items():
        times[name if file == "~" else f"{Path(file).name}: {name}"] += self_seconds
    return {"self_seconds": dict(times)}


RUNS: dict[str, Callable[[Path], Figures]] = {
    "imports of Megatron-LM": start_megatron,
    "default tool": run_default_tool,
    "fast tool": run_fast_tool,
    "encode alone": run_encode_alone,
    "read and parse alone": run_read_alone,
    "write alone": run_write_alone,
    "profile": run_profile,
}

if __name__ == "__main__":
    found = RUNS[sys.argv[1]](Path(sys.argv[2]))
    Path("figures.json").write_text(json.dumps(found), encoding="utf-8")
