"""`make wheels` on a copy of this checkout, for tests that install without an index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
FILES = ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src", "images")
BASE_PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")
"""The Python that this environment was made with: one that uv makes has no pip of its own."""


def make_wheels(checkout: Path) -> Path:
    """Copies what an installation needs into a new folder, and makes the wheels there.

    Returns:
        Their folder, inside the copy: 340 MB.
    """
    if torch.version.cuda or torch.version.hip:
        pytest.skip("the wheels of torch for GPUs are 3 GB")
    checkout.mkdir()
    for name in FILES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, checkout)
    said = run("make", "wheels", f"PYTHON={BASE_PYTHON}", folder=checkout)
    assert "pip install --no-index --find-links wheels 'trainyard-gpt[train]'" in said
    return checkout / "wheels"


def run(*argv: str, folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Runs a command that must succeed, and gives its output."""
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr
