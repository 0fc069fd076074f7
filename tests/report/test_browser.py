"""The report in a real browser: it draws every chart, at any width, without the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WATCHDOG_SECONDS

from trainyard.report.page import write_report

from .conftest import run_lines

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


def run_chromium(chromium: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=WATCHDOG_SECONDS
    )


@pytest.fixture(scope="module")
def page(make_run_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("browser") / "report.html"
    long_name = "a-run-with-a-name-that-is-too-long-for-a-phone-" + "x" * 53
    with_experts = run_lines()
    for line in with_experts[1:-3]:  # expert 0 dies
        step = line["step"]
        load = [[100, 120, 90, 90], [0 if step > 10 else 100, 100, 100, 100 + 50 * min(step, 11)]]
        line |= {"expert_load": load, "expert_imbalance": max(load[1]) / 100}
    write_report([make_run_folder(lines=with_experts), make_run_folder(long_name)], page)
    return page


def run_in_frames(chromium: str, page: Path, widths: tuple[int, ...], measure: str) -> Any:
    """Opens the page in frames of some widths; gives what a JavaScript function found in each."""
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px" src="{page.as_uri()}"></iframe>'
        for width in widths
    )
    script = f"""
    addEventListener("load", () => {{
      const found = [...document.querySelectorAll("iframe")].map({measure});
      document.body.textContent = "found " + JSON.stringify(found);
    }});"""
    outer = page.with_name("frames.html")
    outer.write_text(f"<!DOCTYPE html><body>{frames}<script>{script}</script></body>")
    flags = ("--allow-file-access-from-files", "--dump-dom")
    dom = run_chromium(chromium, page.parent, *flags, outer.as_uri()).stdout
    return json.loads(dom[dom.index("found ") + 6 : dom.index("</body>")])


@pytest.mark.exhaustive
def test_no_width_makes_the_page_scroll_sideways(page: Path, chromium: str) -> None:
    """A browser's window is no narrower than 500 pixels: frames stand for phones."""
    widths = (320, 360, 500, 700, 1000, 1400)
    measure = """frame => {
      const page = frame.contentDocument, root = page.documentElement;
      const top = name => page.querySelector(name).getBoundingClientRect().top;
      const curve_is_first = top(".curves") < top("main > h2");
      return [root.scrollWidth - frame.clientWidth, curve_is_first];
    }"""
    found = run_in_frames(chromium, page, widths, measure)
    expected = [[0, width <= 672] for width in widths]  # a phone begins with the curve
    assert found == expected


@pytest.mark.exhaustive
def test_a_map_has_the_colour_of_each_load(page: Path, chromium: str) -> None:
    """Row by row: expert 0 has died, the next two have little, the last has the most."""
    measure = """frame => {
      const canvas = frame.contentDocument.querySelector("#chart-experts-0-experts canvas");
      const {width, height} = canvas, seen = [];
      const image = canvas.getContext("2d").getImageData(0, 0, width, height);
      for (let y = 0; y < height; y++) {
        const at = 4 * (y * width + Math.round(.9 * width));
        const [r, g, b, a] = image.data.slice(at, at + 4);
        const colour = a < 255 ? `${r > b ? "over" : "under"}` : `${[r, g, b]}`;
        if (a && seen.at(-1) !== colour) seen.push(colour);
      }
      return seen;
    }"""
    (found,) = run_in_frames(chromium, page, (1000,), measure)
    text, most = "29,36,48", "194,87,10"  # --text and --run-1 of a light page
    assert [each for each in found if each in ("under", text, most)] == [text, "under", most]


@pytest.mark.exhaustive
def test_every_chart_is_drawn_without_an_error(page: Path, chromium: str) -> None:
    flags = ("--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom")
    done = run_chromium(chromium, page.parent, *flags, page.as_uri())
    assert done.stdout.count("<canvas") == 8
    assert "held out" in done.stdout.split('class="u-legend')[1]
    assert "CONSOLE" not in done.stderr
