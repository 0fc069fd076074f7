"""Small corpora under the addresses of the real ones, served on one address of this machine.

    python -m tests.cluster.mirror 10.77.0.1 8080

With `--mirror http://10.77.0.1:8080`, `prepare --fetch` finds every corpus of the recipes there.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import random
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tests.corpus.fetching.test_fetch import COMMIT, Server, serving
from tests.corpus.sources.test_wikipedia import page, write

from trainyard.corpus.fetching.catalogue import find_corpus

from .slimpajama import SETS, WORDS, write_slimpajama

DUMP = "enwiki-20261101-pages-articles-multistream.xml.bz2"


def publish_corpora(server: Server, folder: Path) -> None:
    """Publishes all corpora of the recipes, small, at the revisions that their files name.

    Args:
        folder: an empty one, for the files.
    """
    write_slimpajama(folder, n_files=72)
    shards = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.zst")}
    put(server, "slimpajama", shards)
    sample = {
        "text": texts(5)[:35],
        "meta": [{"redpajama_set_name": name} for name in SETS] * 5,
    }
    name = "data/train-{:05}-of-00048-0123456789abcdef.parquet"
    put(server, "slimpajama-6b", {name.format(n): parquet(sample) for n in range(48)})
    put(server, "openwebtext", {"plain_text/train-00000.parquet": parquet({"text": texts(1)})})
    cleaned = {"data/20220301.en/train-00000-of-00041.parquet": parquet({"text": texts(6)})}
    put(server, "wikipedia-20220301", cleaned)
    lines = "\n".join(json.dumps({"text": text}) for text in texts(3))
    put(server, "oscar-1gb", {"stas/oscar-1GB.jsonl.xz": lzma.compress(lines.encode())})
    dump = write(folder / DUMP, [page(f"Page {n}", text) for n, text in enumerate(texts(2))])
    sums = f"{hashlib.sha1(dump.read_bytes()).hexdigest()}  {DUMP}\n".encode()
    server.files["/enwiki/latest/enwiki-latest-sha1sums.txt"] = sums
    server.files[f"/enwiki/20261101/{DUMP}"] = dump.read_bytes()


def put(server: Server, corpus: str, files: dict[str, bytes]) -> None:
    """Publishes the repository of a shipped corpus."""
    known = find_corpus(corpus)
    api = f"/api/{known.repository_kind}/{known.repository}"
    place = "" if known.repository_kind == "models" else f"/{known.repository_kind}"
    server.files[f"{api}/revision/{known.revision}"] = json.dumps({"sha": COMMIT}).encode()
    listing = []
    for path, data in files.items():
        large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        listing.append({"type": "file", "path": path, "size": len(data), "lfs": large})
        server.files[f"{place}/{known.repository}/resolve/{COMMIT}/{path}"] = data
    server.files[f"{api}/tree/{COMMIT}?recursive=true"] = json.dumps(listing).encode()


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """The bytes of one Parquet file."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def texts(seed: int) -> list[str]:
    """1,200 documents of 40 words: enough for a split of one in a thousand."""
    choice = random.Random(seed)
    return [" ".join(choice.choices(WORDS, k=40)) for _ in range(1200)]


def main() -> None:
    """Serves them until this process is ended."""
    host, port = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        publish = partial(publish_corpora, folder=Path(folder))
        with serving(host, int(port), publish):
            threading.Event().wait()


if __name__ == "__main__":
    main()
