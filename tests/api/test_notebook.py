"""The notebook of the docs, run as its readers run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat import NotebookNode
from tests.api.notebook import execute, read

import trainyard


def kinds_of_outputs(notebook: NotebookNode) -> list[set[str]]:
    """What each cell prints ("stream") or draws ("image/png")."""
    return [
        {
            kind
            for output in cell.get("outputs", [])
            for kind in ([output.output_type] if "data" not in output else output.data)
        }
        for cell in notebook.cells
    ]


@pytest.mark.exhaustive
def test_the_notebook_runs_and_its_outputs_are_in_it(tmp_path: Path) -> None:
    notebook = execute(tmp_path)
    assert kinds_of_outputs(notebook) == kinds_of_outputs(read())
    assert any("image/png" in kinds for kinds in kinds_of_outputs(notebook))
    evaluated = notebook.cells[-2].outputs[0].text
    assert "bits per byte on held-out text\nThe class statement" in evaluated
    losses = trainyard.read_metrics(tmp_path / "runs/topics").train["loss"]
    assert losses[-1] < losses[0] - 1
