"""The report in a real browser: it renders, in light and dark, without the network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from trainyard.report.page import write_report

FLAGS = [
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
]


@pytest.fixture(scope="module")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium on this machine")


def screenshot(chromium: str, page: Path, scheme: str, width: int) -> np.ndarray:
    picture = page.with_name(f"{scheme}-{width}.png")
    subprocess.run(
        [
            *(chromium, *FLAGS, f"--user-data-dir={page.parent / 'profile'}"),
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            *(f"--window-size={width},900", f"--screenshot={picture}", page.as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return np.asarray(matplotlib.image.imread(picture))[..., :3]


@pytest.mark.slow
def test_it_renders_in_light_and_dark(
    make_run_folder: Callable[..., Path], chromium: str, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    write_report([make_run_folder()], page)
    light = screenshot(chromium, page, "light", 1200)
    dark = screenshot(chromium, page, "dark", 500)
    # The background is what most pixels have; text and curves are what differs from it.
    assert np.median(light) > 0.8
    assert np.median(dark) < 0.3
    for picture in (light, dark):
        background = np.median(picture, axis=(0, 1))
        drawn = np.abs(picture - background).max(axis=2) > 0.2
        assert 0.01 < drawn.mean() < 0.6
