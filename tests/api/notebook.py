"""Runs docs/first-model.ipynb, and writes what it prints and draws into it.

python -m tests.api.notebook
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first-model.ipynb"


def read() -> NotebookNode:
    """Reads the notebook as it is in the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(folder: Path) -> NotebookNode:
    """Runs all cells in a folder.

    Raises:
        CellExecutionError: a cell raised an exception.
    """
    notebook = read()
    own = {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=None,
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=own)
    notebook.metadata.pop("language_info", None)
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(execute(Path(folder)), NOTEBOOK)
