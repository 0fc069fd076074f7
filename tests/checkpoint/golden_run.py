"""The run of the golden checkpoints in `tests/golden/checkpoints`, one of each format.

Each was made by the code of its time at step 4 of 8, with these overrides of the preset `tiny` and
these token files in the current folder: format 1 by da6fe9b, format 2 by 1c276f2, format 3 by
50316b4, and with a micro batch of 2 on two ranks with ZeRO 1 by d527c300 (`git archive COMMIT src`,
then PYTHONPATH), the current one by the code that added it. In their manifests `platform`,
`machine`, `commit` and `command` were replaced, and the checksums made anew.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainyard.data.indexed import IndexedWriter

N_STEPS = 8


def write_golden_tokens(folder: Path) -> Path:
    """Writes token files that no library's random numbers decide; returns their prefix."""
    prefix = folder / "golden_text_document"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in range(120):  # fewer would be split by tokens, which format 1 did not
            numbers = np.arange(20 + document % 30, dtype=np.int64)
            writer.add_document((numbers * (document + 3) % 127).astype(np.uint16))
    return prefix


def golden_overrides(n_steps: int) -> list[str]:
    """The run up to a step; its schedule ends at the last."""
    return [
        "data.blend.prefixes=['golden_text_document']",
        "data.cache_folder='cache'",
        "data.split='80,20,0'",
        f"train.length='{n_steps} steps'",
        f"schedule.decay='{N_STEPS} steps'",
        "schedule.warmup='2 steps'",
        "model.d_model=8",
        "model.d_ff=16",
        "model.n_heads=2",
        "model.n_layers=1",
        "model.sequence_length=16",
        "model.vocabulary_size=128",
        "model.dropout=0.1",
        "train.micro_batch_size=4",
        "train.global_batch_size=4",
        "evaluate.batches=1",
        "evaluate.interval=4",
        "evaluate.sample_interval=0",
        "checkpoint.interval=4",
        "log.interval=1",
        "log.tensorboard=false",
        "precision.kind='fp32'",
    ]
