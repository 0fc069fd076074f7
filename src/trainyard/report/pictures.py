"""Finished drawings, as SVG for the page and as PNG for papers.

Both use one figure, drawn in the colours of the light page. The SVG replaces each of these colours
with a CSS variable of the page, so that the drawing follows dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

PNG_DOTS_PER_INCH = 300

TEXT, MUTED, GRID, CARD, ALERT = "#1d2430", "#5b6675", "#dde1e7", "#fefefe", "#b3261e"
# Okabe and Ito's palette, which colour-blind readers can tell apart, darkened to read on white.
RUN_COLOURS = ("#0b6bb3", "#c2570a", "#11805a", "#9b4a8a", "#8a6d00", "#3b8ea5")
CSS_OF_COLOUR = {
    TEXT: "var(--text)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    CARD: "var(--card)",
    ALERT: "var(--alert)",
    **{colour: f"var(--run-{number})" for number, colour in enumerate(RUN_COLOURS)},
}


@dataclass(frozen=True)
class Plot:
    """A finished drawing with its alternative text."""

    name: str
    title: str
    description: str
    figure: Figure


def render_svg(plot: Plot, id_prefix: str = "") -> str:
    """Renders a plot for a page: text as text, colours from the page's CSS.

    Args:
        plot: to render.
        id_prefix: tells two drawings of one name apart.
    """
    buffer = io.StringIO()
    with drawing_style():
        FigureCanvasSVG(plot.figure).print_svg(
            buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # A hundredth of a point is enough, and halves the size.
    svg = re.sub(r'(?<= d=")[^"]*', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d.group()), svg)
    # Several drawings share one page: their ids must differ.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{id_prefix}{plot.name}-", svg)
    for colour, variable in CSS_OF_COLOUR.items():
        svg = svg.replace(colour, variable)
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    label = escape(f"{plot.title}. {plot.description}", quote=True)
    opening = f'<svg role="img" aria-label="{label}" {size.group()}>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).strip()


def save_png(plot: Plot, folder: Path) -> Path:
    """Writes `folder/<name>.png` on white, sized for a column of a paper."""
    buffer = io.BytesIO()
    with drawing_style():
        FigureCanvasAgg(plot.figure)
        plot.figure.savefig(buffer, format="png", dpi=PNG_DOTS_PER_INCH, facecolor="white")
    path = folder / f"{plot.name}.png"
    path.write_bytes(buffer.getvalue())
    return path


@contextmanager
def drawing_style() -> Iterator[None]:
    """Sets the fonts and colours of a figure."""
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "trainyard",
        "font.size": 9,
        "text.color": TEXT,
        "axes.titlecolor": TEXT,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID,
        "axes.axisbelow": True,
        "legend.edgecolor": "none",
        "legend.facecolor": CARD,
        "legend.framealpha": 0.85,
        "axes.unicode_minus": False,
    }
    with mpl.rc_context(settings):
        yield
