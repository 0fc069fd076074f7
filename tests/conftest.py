"""Fixtures that every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real corpora and golden files, beside the checkout."""
    folder = Path(__file__).parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real corpora and golden files (../shared/data) are not on this machine")
    return folder
