"""Records of token files that a test wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trainyard.data.indexed import IndexedDataset
from trainyard.data.sidecar import Sidecar, TokenizerRecord, save_sidecar
from trainyard.files import BlockChecksum, FileRecord

VOCABULARY_SIZE, EOD = 300, 299


def record_file(path: Path, block_bytes: int) -> FileRecord:
    data = path.read_bytes()
    blocks = [data[first : first + block_bytes] for first in range(0, len(data), block_bytes)]
    return FileRecord([BlockChecksum(len(b), hashlib.sha256(b).hexdigest()) for b in blocks])


def write_record(prefix: Path, block_bytes: int = 7, **changes: Any) -> Sidecar:
    dataset = IndexedDataset(prefix)
    empty = int(np.count_nonzero(np.diff(dataset.document_indices) == 0))
    record = Sidecar(
        recipe="r" * 64,
        tokenizer=TokenizerRecord("small", "f" * 64, VOCABULARY_SIZE, EOD, "text"),
        json_key="text",
        append_eod=True,
        dtype=dataset.dtype.name,
        documents=len(dataset.document_indices) - 1,
        empty_documents=empty,
        sequences=len(dataset),
        tokens=dataset.n_tokens,
        text_bytes=100,
        steps=[],
        groups={},
        quarantined={},
        quarantined_places=[],
        bin=record_file(Path(f"{prefix}.bin"), block_bytes),
        idx=record_file(Path(f"{prefix}.idx"), block_bytes),
        sources=[],
    )
    record = msgspec.structs.replace(record, **changes)
    save_sidecar(record, prefix)
    return record
