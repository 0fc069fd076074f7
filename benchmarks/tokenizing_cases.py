"""What `tokenizing.py` runs in processes of their own; not to be called by hand.

    PYTHON tokenizing_cases.py RUN corpus.jsonl

runs in a folder that holds GPT-2's vocabulary as `gpt2/`, and leaves what it found in
`figures.json`. The peers are Megatron-LM's own classes (tokenizer, index builder) from the package
megatron-core; the few lines of its scripts around them, which are in no package, are re-enacted
here. The peers run under any Python that has megatron-core; the rest needs Trainyard.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
BLOCK_BYTES = 4 * 2**20
CHUNK_DOCUMENTS = 32


class Encoder:
    """What a worker process of the default tool holds."""

    tokenizer: Any

    def start(self) -> None:
        Encoder.tokenizer = build_megatron_tokenizer()

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        text = json.loads(line)["text"]
        ids = Encoder.tokenizer.text_to_ids(text)
        if ids:
            ids.append(Encoder.tokenizer.eod)
        return ids, [len(ids)] if ids else [], len(line)


def build_megatron_tokenizer() -> Any:
    from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MegatronHFTokenizer

    # It looks for the name "gpt2" too, and finds the folder of that name in the current one.
    files = {"vocab_file": "gpt2/vocab.json", "merges_file": "gpt2/merges.txt"}
    return MegatronHFTokenizer("GPT2BPETokenizer", **files)


def build_megatron_writer(tokenizer: Any) -> Any:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder("out.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))


def run_default_tool(corpus: Path) -> Figures:
    """One worker process and the main one, as with --workers 1 --append-eod."""
    import multiprocessing

    encoder = Encoder()
    tokenizer = build_megatron_tokenizer()
    pool = multiprocessing.Pool(1, initializer=encoder.start)
    writer = build_megatron_writer(tokenizer)
    n_characters, first_characters, start = 0, 0, time.perf_counter()
    with corpus.open(encoding="utf-8") as lines, pool:
        for number, (ids, lengths, line_characters) in enumerate(
            pool.imap(encoder.encode, lines, CHUNK_DOCUMENTS), 1
        ):
            writer.add_document(ids, lengths)
            n_characters += line_characters
            if number == CHUNK_DOCUMENTS:  # the worker has started
                first_characters, start = n_characters, time.perf_counter()
        writer.finalize("out.idx")
    seconds = time.perf_counter() - start
    # What the whole file would have taken at the rate of all but the first chunk.
    return {"work_seconds": seconds * n_characters / (n_characters - first_characters)}


def run_fast_tool(corpus: Path) -> Figures:
    """The whole file as one array, as with --append-eod; its clock starts after the imports."""
    import awkward
    import gigatoken
    import megatron.core.datasets.indexed_dataset
    import megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer  # noqa: F401
    import numpy as np

    start = time.perf_counter()
    tokenizer = build_megatron_tokenizer()
    engine = gigatoken.Tokenizer(tokenizer.tokenizer)
    documents = engine.encode_files(gigatoken.JsonlFileSource([corpus], "text"))
    ends = awkward.singletons(awkward.Array(np.full(len(documents), tokenizer.eod, np.uint32)))
    documents = awkward.concatenate([documents, ends], axis=1)
    writer = build_megatron_writer(tokenizer)
    tokens = np.asarray(awkward.flatten(documents), dtype=writer.dtype)
    writer.data_file.write(tokens.tobytes())
    lengths = np.asarray(awkward.num(documents, axis=1)).tolist()
    writer.sequence_lengths.extend(lengths)
    writer.document_indices.extend(range(1, len(lengths) + 1))
    writer.finalize("out.idx")
    return {"work_seconds": time.perf_counter() - start}


def read_texts(corpus: Path) -> Iterator[list[str]]:
    """Yields the batches of documents that `prepare` works with."""
    from trainyard.corpus.sources import find_files, read_documents, split_into_units

    for unit in split_into_units(
        [(file, file.stat().st_size) for file in find_files([str(corpus)])]
    ):
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
