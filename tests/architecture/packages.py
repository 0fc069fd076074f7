"""Draws the packages and their imports, for docs/architecture.md.

    python -m tests.architecture.packages

A row is a layer of `[tool.importlinter]` in pyproject.toml. An arrow is an import that no chain of
other arrows implies. The packages at the bottom are imported from everywhere, without arrows.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trainyard"
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
BASE = ("extras", "files", "errors", "log", "units")
COLUMNS = {
    **{
        "corpus": 0,
        "launch": 0,
        "jobs": 1,
        "data": 1,
        "report": 2,
        "planning": 2,
        "topology": 1,
        "layout": 2,
    },
    **{"bench": 4, "simulate": 4, "optim": 4, "doctor": 5, "api": 6},
}
"""Of packages beside column 3."""
WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT = 120, 50, 92, 24

Imports = dict[str, set[str]]


def read_layers() -> list[list[str]]:
    """Reads the packages of each layer, the highest first."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"]
        for contract in tables["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    return [re.split(" [|:] ", layer) for layer in layers]


def read_imports(packages: set[str]) -> Imports:
    """Finds the packages that each imports, at whatever depth in its code."""
    found: Imports = {package: set() for package in packages}
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainyard"):
                module = node.module or ""
                for alias in node.names:
                    name = f"{module}.{alias.name}".split(".")[1]
                    if package in packages and name in packages - {package}:
                        found[package].add(name)
    return found


def reduce_imports(imports: Imports) -> Imports:
    """Drops each import that a chain of others implies."""

    def reached(package: str) -> set[str]:
        return {package}.union(*(reached(name) for name in imports[package]))

    return {
        package: {
            name for name in names if not any(name in reached(other) for other in names - {name})
        }
        for package, names in imports.items()
    }


def route(start: tuple[int, int], end: tuple[int, int], boxes: set[tuple[int, int]]) -> int:
    """Returns the row below which an arrow changes its column, so that it crosses no box."""
    (row, column), (end_row, end_column) = start, end
    for turn in range(row, end_row):
        before = {(each, column) for each in range(row + 1, turn + 1)}
        after = {(each, end_column) for each in range(turn + 1, end_row)}
        if not (before | after) & boxes:
            return turn
    raise AssertionError(f"no way from {start} to {end}: choose other COLUMNS")


def draw() -> str:
    """Returns the picture, as SVG."""
    layers = [[name for name in layer if name not in BASE] for layer in read_layers()]
    layers = [layer for layer in layers if layer]
    places = {
        name: (row, COLUMNS.get(name, 3)) for row, layer in enumerate(layers) for name in layer
    }
    boxes = set(places.values())
    assert len(boxes) == len(places), "two packages in one place: choose other COLUMNS"
    width, height = 7 * WIDTH, (len(layers) + 1) * HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    imports = read_imports(set(places))
    for package, names in imports.items():
        upward = [name for name in names if places[name][0] <= places[package][0]]
        assert not upward, f"{package} imports {upward}, which are not below it"
    for package, names in sorted(reduce_imports(imports).items()):
        for name in sorted(names):
            lines.append(_arrow(places[package], places[name], boxes))
    for name, place in places.items():
        lines += _box(name, *_centre(*place), BOX_WIDTH)
    lines += _box(", ".join(BASE), width / 2, (len(layers) + 0.5) * HEIGHT, width - 28)
    return "\n".join([*lines, "</svg>", ""])


def _centre(row: int, column: int) -> tuple[float, float]:
    return (column + 0.5) * WIDTH, (row + 0.5) * HEIGHT


def _arrow(start: tuple[int, int], end: tuple[int, int], boxes: set[tuple[int, int]]) -> str:
    (x, y), (end_x, end_y) = _centre(*start), _centre(*end)
    turn = (route(start, end, boxes) + 0.5) * HEIGHT + BOX_HEIGHT / 2
    below = turn + HEIGHT - BOX_HEIGHT - 8  # the tip is vertical
    path = [f"M{x:g} {y + BOX_HEIGHT / 2:g}", f"V{turn:g}"]
    path.append(f"C{x:g} {below:g} {end_x:g} {turn:g} {end_x:g} {below:g}")
    path.append(f"V{end_y - BOX_HEIGHT / 2:g}")
    return f'<path d="{" ".join(path)}" fill="none" stroke="#667" marker-end="url(#tip)"/>'


def _box(text: str, x: float, y: float, width: float) -> Iterator[str]:
    yield (
        f'<rect x="{x - width / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{width:g}" '
        f'height="{BOX_HEIGHT}" rx="4" fill="#eef3fb" stroke="#557"/>'
    )
    yield f'<text x="{x:g}" y="{y + 4.5:g}" text-anchor="middle">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
