"""Which files a corpus is made of, and how they are cut into pieces of work."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from trainyard.config.reading import open_file
from trainyard.errors import DataError

FORMATS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "txt",
    ".xml": "wikipedia",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
UNIT_BYTES = 128 * 2**20
# Wikitext takes twenty times the work of a line of JSON, and bzip2 packs four bytes of it in one.
_DUMP_UNITS = {("wikipedia", ""): 4, ("wikipedia", ".bz2"): 16}
# Wikimedia names the parts of a dump pages-articles1.xml-p1p41242.bz2.
_DUMP_PART = re.compile(r"\.xml-p\d+p\d+[\w-]*$")
_KNOWN = (
    "known are .jsonl, .json (one object a line), .txt, .xml (a dump of Wikipedia), each also "
    ".gz .bz2 .xz .zst, and .parquet"
)


@dataclass(frozen=True)
class Segment:
    """A whole file, or a part of one, from byte `start` up to byte `end`.

    Parts of `.jsonl` begin and end between lines. Parts of a dump do so anywhere: the reader knows
    which pages belong to it.
    """

    path: Path
    start: int
    end: int


def format_of(path: Path) -> tuple[str, str] | None:
    """Gives the format and the compression suffix ("" for none); None when it is unknown."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    name = path.stem if compression else path.name
    kind = FORMATS.get(".xml" if _DUMP_PART.search(name) else Path(name).suffix)
    if kind is None or (kind == "parquet" and compression):
        return None
    return kind, compression


def find_files(inputs: Sequence[str]) -> list[Path]:
    """Lists the files that files, folders (recursive) and globs name, each input's names sorted.

    A folder is read with what its links lead to; hidden files and folders are passed over.

    Raises:
        DataError: an input is missing, matches nothing, has an unknown extension, a name that is
            not UTF-8, comes twice, or is a folder that cannot be read.
    """
    files: list[Path] = []
    for item in inputs:
        try:
            files += _expand(item)
        except OSError as error:
            problem = f"{_printable(error.filename or item)} cannot be read: {error.strerror}"
            raise DataError(problem, "check that it may be read, or leave it out") from error
    seen: set[str] = set()
    folders: dict[str, str] = {}
    for path in files:
        folder, _, name = str(path).rpartition(os.sep)
        if folder not in folders:
            folders[folder] = str(path.parent.resolve())
        real = str(path.resolve()) if path.is_symlink() else f"{folders[folder]}{os.sep}{name}"
        if real in seen:
            raise DataError(
                f"{path} is given twice; every document in it would be tokenised twice",
                "name each input once, or make the folders and globs not overlap",
            )
        seen.add(real)
    if not files:
        raise DataError("no input was given", "name at least one file, folder or glob")
    return files


def _expand(item: str) -> list[Path]:
    path, shown = Path(item), _printable(item)
    if path.is_dir():
        found = _search(path)
        if not found:
            raise DataError(f"the folder {shown} holds no file with a known extension", _KNOWN)
    elif path.exists():
        open_file(path).close()  # neither a pipe nor a device
        found = [path]
    else:
        matches = map(Path, glob.glob(item, recursive=True))  # noqa: PTH207 (absolute patterns)
        found = sorted(file for file in matches if file.is_file() and file.name[0] != ".")
    if not found and glob.has_magic(item):
        raise DataError(f"no file matches {shown}", "check the pattern; quote it for the shell")
    if not found:
        raise DataError(f"{shown} does not exist", "check the path of the input")
    for file in found:
        if _printable(file) != str(file):
            raise DataError(
                f"the name of {_printable(file)} is not UTF-8", "rename the file or its folder"
            )
        if format_of(file) is None:
            raise DataError(f"{file} has no known extension", _KNOWN)
    return found


def _printable(path: str | Path) -> str:
    """Shows the bytes of a name that are no text as backslash escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _search(top: Path) -> list[Path]:
    """Lists the files of known formats in a folder, each real file and folder once."""
    files: list[str] = []
    folders = [top]
    # Links come last, so that what is there without them keeps its plain path.
    folder_links: list[Path] = []
    file_links: list[Path] = []
    seen: set[str] = set()
    while folders or folder_links:
        folder_links.sort(reverse=True)
        folder = (folders or folder_links).pop()
        real = str(folder.resolve())
        if real in seen:
            continue
        seen.add(real)
        for entry in _list_folder(folder):
            if entry.is_symlink():
                path = folder / entry.name
                (folder_links if path.is_dir() else file_links).append(path)
            elif entry.is_dir():
                folders.append(folder / entry.name)
            elif format_of(Path(entry.name)) and entry.is_file():
                files.append(entry.path)
                seen.add(f"{real}{os.sep}{entry.name}")
    for link in sorted(file_links):
        if format_of(link) and link.is_file() and str(link.resolve()) not in seen:
            files.append(str(link))
            seen.add(str(link.resolve()))
    return sorted(map(Path, files), key=lambda path: path.parts)


def _list_folder(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def split_into_units(files: Sequence[Path], unit_bytes: int = UNIT_BYTES) -> list[list[Segment]]:
    """Cuts files into pieces of work of about `unit_bytes`, in order.

    Small files share a unit; a large plain `.jsonl` file is cut between lines, a dump anywhere. The
    result depends on nothing but the files, so any number of workers sees the same units.
    """
    units: list[list[Segment]] = []
    room = -1  # what the last unit can still take; below 0 it is not to be shared
    for path in files:
        size = path.stat().st_size
        kind = format_of(path)
        if size > unit_bytes and kind == ("jsonl", ""):
            units += [[segment] for segment in _cut_between_lines(path, size, unit_bytes)]
            room = -1
        elif kind in _DUMP_UNITS:
            step = max(1, unit_bytes // _DUMP_UNITS[kind])
            units += [[Segment(path, at, min(at + step, size))] for at in range(0, size, step)]
            room = -1
        elif size <= room:
            units[-1].append(Segment(path, 0, size))
            room -= size
        else:
            units.append([Segment(path, 0, size)])
            room = unit_bytes - size
    return units


def _cut_between_lines(path: Path, size: int, unit_bytes: int) -> list[Segment]:
    cuts = [0]
    n_units = -(-size // unit_bytes)  # equal ones, so that two workers end together
    with path.open("rb") as file:
        for position in [size * number // n_units for number in range(1, n_units)]:
            if position > cuts[-1]:
                cuts.append(_next_line_start(file, position, size))
    if cuts[-1] < size:
        cuts.append(size)
    return [Segment(path, start, end) for start, end in pairwise(cuts)]


def _next_line_start(file: BinaryIO, position: int, size: int) -> int:
    """Gives the first byte after `position` that begins a line, or `size`."""
    file.seek(position)
    while block := file.read(2**16):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    return size
