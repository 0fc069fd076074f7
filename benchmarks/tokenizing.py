"""Speed and memory of `prepare` on one core, beside a stand-in for Megatron-LM's default path.

    python benchmarks/tokenizing.py novels.jsonl gpt2/ --megabytes 300 --output record.json

The stand-in does what `tools/preprocess_data.py` does with GPT2BPETokenizer, without its processes:
one call of the transformers GPT-2 tokenizer per document, one NumPy array per document, one write.
Megatron-LM itself is not needed here; its own tool was measured once elsewhere at 2.25 MB/s of text
with one worker. Each case runs in a process of its own, held to one core. MB are 10^6 bytes of
text. A first case of one document gives the cost of starting: imports, loading and checking the
tokenizer. Where other work shares the core, read the figures per CPU second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def run_ours(corpus: Path, tokenizer: Path, folder: Path) -> int:
    from trainyard.data.prepare import PrepareOptions, prepare

    return prepare(PrepareOptions((str(corpus),), folder / "ours", tokenizer)).text_bytes


def run_stand_in(corpus: Path, tokenizer_folder: Path, folder: Path) -> int:
    import numpy as np
    from transformers import GPT2TokenizerFast

    tokenizer = GPT2TokenizerFast.from_pretrained(tokenizer_folder)
    eod = tokenizer.eos_token_id
    lengths = []
    text_bytes = 0
    with corpus.open(encoding="utf-8") as lines, (folder / "stand_in.bin").open("wb") as file:
        for line in lines:
            text = json.loads(line)["text"]
            ids = [*tokenizer(text).input_ids, eod]
            file.write(np.array(ids, dtype=np.uint16).tobytes())
            lengths.append(len(ids))
            text_bytes += len(text.encode())
    return text_bytes


AFTER_START = "megabytes_per_cpu_second_after_start"
RUNS = {"ours": run_ours, "stand-in": run_stand_in}


def measure_here(name: str, corpus: Path, tokenizer: Path, folder: Path) -> None:
    start = time.perf_counter()
    text_bytes = RUNS[name](corpus, tokenizer, folder)
    wall_seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "text_bytes": text_bytes,
        "wall_seconds": wall_seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    print(json.dumps(figures))


def measure(name: str, corpus: Path, tokenizer: Path, core: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, str(corpus), str(tokenizer), "--case", name, folder]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        figures: dict[str, float] = json.loads(done.stdout)
        ours = Path(folder) / "ours_text_document.bin"
        same = ours if ours.exists() else Path(folder) / "stand_in.bin"
        digest = subprocess.run(["sha256sum", same], check=True, stdout=subprocess.PIPE).stdout
    megabytes = figures["text_bytes"] / 1e6
    return {
        "case": name,
        "text_megabytes": round(megabytes, 1),
        "megabytes_per_second": round(megabytes / figures["wall_seconds"], 2),
        "megabytes_per_cpu_second": round(megabytes / figures["cpu_seconds"], 2),
        "cpu_seconds": round(figures["cpu_seconds"], 2),
        "peak_mebibytes": round(figures["peak_bytes"] / 2**20),
        "bin_sha256": digest.split()[0].decode(),
    }


def repeat(corpus: Path, megabytes: int, folder: Path) -> Path:
    data = corpus.read_bytes()
    path = folder / "repeated.jsonl"
    with path.open("wb") as file:
        for _ in range(max(1, round(megabytes * 1e6 / len(data)))):
            file.write(data)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        name, folder = arguments.case
        measure_here(name, arguments.corpus, arguments.tokenizer, Path(folder))
        return
    core = max(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        long = repeat(arguments.corpus, arguments.megabytes, Path(folder))
        one = Path(folder) / "one.jsonl"
        one.write_bytes(arguments.corpus.read_bytes().split(b"\n")[0] + b"\n")
        cases = [
            measure(name, path, arguments.tokenizer, core)
            for path in (one, arguments.corpus, long)
            for name in RUNS
        ]
    for at in range(2, len(cases)):
        add_rate_after_start(cases[at], cases[at % 2])
    packages = ("gigatoken", "tokenizers", "transformers", "numpy", "msgspec")
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one used",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "load_average": os.getloadavg(),
        "notes": [
            "the stand-in is not Megatron-LM's code, which is not on this machine",
            "the long corpus repeats the short one, so its words are already in the cache",
        ],
        "cases": cases,
        "ratios": [ratio(cases[at], cases[at + 1]) for at in (2, 4)],
        "same_bytes": [cases[at]["bin_sha256"] == cases[at + 1]["bin_sha256"] for at in (2, 4)],
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


def add_rate_after_start(case: dict[str, Any], start: dict[str, Any]) -> None:
    seconds = case["cpu_seconds"] - start["cpu_seconds"]
    case[AFTER_START] = round((case["text_megabytes"] - start["text_megabytes"]) / seconds, 2)


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    names = ("megabytes_per_second", "megabytes_per_cpu_second", AFTER_START)
    return {name: round(ours[name] / theirs[name], 1) for name in names}


if __name__ == "__main__":
    main()
