"""Converts the Hugging Face folder that a new run starts from."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainyard.config.run import Run
from trainyard.train.start import CONVERTED, is_huggingface


def convert_start(run: Run, folder: Path) -> None:
    """Converts `train.start_from` in the run folder, if it is a Hugging Face folder.

    Raises:
        CheckpointError, DataError, MachineError: as `import_huggingface`.
    """
    if not is_huggingface(run.train.start_from):
        return
    from trainyard.export.from_huggingface import import_huggingface

    output = folder / CONVERTED
    shutil.rmtree(output, ignore_errors=True)
    import_huggingface(Path(run.train.start_from), output)
