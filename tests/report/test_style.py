from __future__ import annotations

import re
from importlib.resources import files

import pytest

LEAST_OF_TEXT, LEAST_OF_LINES = 4.5, 3.0
"""Ratios of luminance that WCAG 2.2 asks for (1.4.3 and 1.4.11)."""


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out_enough(scheme: str) -> None:
    style = files("trainyard.report").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    part = light if scheme == "light" else dark.split("* {")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
    for background in ("page", "card", "mark"):
        for name in ("text", "muted", "accent", "alert"):
            if background == "mark" and name != "text":
                continue  # marked values are plain text
            found = contrast(colours[name], colours[background])
            assert found >= LEAST_OF_TEXT, (name, background, found)
    for number in range(6):
        found = contrast(colours[f"run-{number}"], colours["card"])
        assert found >= LEAST_OF_LINES, (number, found)
