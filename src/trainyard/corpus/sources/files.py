"""Finds the files of a corpus, and splits them into pieces of work.

Folders of Hugging Face's datasets library hold other files beside the text:

saved/      state.json lists the .arrow files; dataset_info.json        `save_to_disk`
splits/     dataset_dict.json lists the folders of the splits           of a DatasetDict
cache/      dataset_info.json lists the splits, in NAME-SPLIT.arrow or NAME-SPLIT-*.arrow;
            cache-*.arrow are results of `map` and `filter`             `load_dataset`
"""

from __future__ import annotations

import codecs
import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trainyard.data.indexed import RAW_TOKENS
from trainyard.errors import DataError, printable
from trainyard.files import SETTINGS_LIMIT_BYTES, open_file, read_file, refuse_lfs_pointer

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
    ".xml": "wikipedia",
}
_TABLES = {".parquet": "Parquet", ".arrow": "Arrow"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
LISTING_NAME = "fetch.listing"
"""What fetching keeps in the folder of a corpus; it is no part of the text."""
_MOST_UNIT_BYTES = 128 * 2**20
_LEAST_UNIT_BYTES = 32 * 2**20
_UNITS_OF_SMALL_CORPUS = 16
# Wikitext takes twenty times the work of a line of JSON, and bzip2 packs four bytes of it in one.
_DUMP_UNITS = {("wikipedia", ""): 4, ("wikipedia", ".bz2"): 16}
# Wikimedia names the parts of a dump pages-articles1.xml-p1p41242.bz2.
_DUMP_PART = re.compile(r"\.xml-p\d+p\d+[\w-]*$")
_KNOWN = (
    "folders are searched for .jsonl .ndjson .json (one object a line), .txt, .xml (a dump of "
    "Wikipedia), each also .gz .bz2 .xz .zst, .parquet and .arrow"
)
OTHER_TEXT = "to read other text files too, name them, such as 'notes/**/*.md'"
_CONVERT = (
    "save it as plain text first: pdftotext for .pdf, pandoc -t plain for .docx, .odt and .epub"
)
_PAGES = "extract the text, such as with trafilatura or pandoc -t plain"
_ROWS = (
    "write a JSON object a line: python3 -c 'import csv, json, sys; "
    "[print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]' < FILE.csv > FILE.jsonl"
)
_NOT_TEXT = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), ("HTML", _PAGES)),
    ".warc": ("a web archive", _PAGES),
    **dict.fromkeys((".csv", ".tsv"), ("a table", _ROWS)),
}
_HEAD_BYTES = 1 << 13
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_DESCRIPTIONS = (_STATE, _INFO, _SPLITS, "dataset_infos.json")
_BESIDE_TEXT = "not text, of Hugging Face's datasets library"
_BROKEN = "behind broken links"
Skipped = list[tuple[str, str]]
"""The real path of each file that is not read, if it has one, and its kind."""


@dataclass(frozen=True)
class Segment:
    """A whole file, or a part of one, from byte `start` up to byte `end`.

    Parts of `.jsonl` begin and end between lines. Parts of a dump do so anywhere: the reader knows
    which pages belong to it.
    """

    path: Path
    start: int
    end: int


def format_of(path: Path) -> tuple[str, str]:
    """Returns the format and the compression suffix ("" for none).

    A suffix that is not in `FORMATS` means plain text.
    """
    inner, compression = _suffixes(path)
    return FORMATS.get(inner, "txt"), compression


def _suffixes(path: Path) -> tuple[str, str]:
    """Returns the suffixes of format and compression, in lower case; "" for none."""
    name = path.name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    name = name.removesuffix(compression)
    return ".xml" if _DUMP_PART.search(name) else Path(name).suffix, compression


def _skipped_as(name: str) -> str:
    """Names the kind of a file that is skipped in folders; "" if it is read."""
    inner, compression = _suffixes(Path(name))
    if inner in FORMATS and not (inner in _TABLES and compression):
        return ""
    return f"{inner}{compression}" or "without a suffix"


def find_files(inputs: Sequence[str]) -> list[Path]:
    """Lists the files that `scan_inputs` finds."""
    return scan_inputs(inputs)[0]


def scan_inputs(inputs: Sequence[str]) -> tuple[list[Path], Counter[str]]:
    """Lists the files that files, folders (recursive) and globs name, each input's names sorted.

    A folder is read with what its links lead to.

    Returns:
        The files, and how many others there are: by suffix, "hidden", or what else keeps them from
        being read.

    Raises:
        DataError: an input is missing, matches nothing, is no text, has a name that is not UTF-8,
            comes twice, or is a folder without text or that cannot be read.
    """
    files: list[Path] = []
    skipped: Skipped = []
    for item in inputs:
        try:
            files += _expand(item, skipped)
        except OSError as error:
            problem = f"{printable(error.filename or item)} cannot be read: {error.strerror}"
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
                f"{printable(path)} is given twice; every document in it would be tokenized twice",
                "name each input once, or use folders and globs that do not overlap",
            )
        seen.add(real)
    if not files:
        raise DataError("no input was given", "name at least one file, folder or glob")
    return files, Counter(kind for real, kind in skipped if real not in seen)


def describe_skipped(skipped: Counter[str]) -> str:
    """Lists the kinds of skipped files, most frequent first: `9 .md, 3 .pdf, 1 hidden`."""
    ordered = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {printable(kind)}" for kind, count in ordered)


def _expand(item: str, skipped: Skipped) -> list[Path]:
    path, shown = Path(item), printable(item)
    if path.is_dir():
        others: Skipped = []
        files = _search(path, others)
        if not files:
            kinds = Counter(kind for _, kind in others)
            there = f"only {describe_skipped(kinds)}" if others else "it is empty"
            problem = f"the folder {shown} has no readable file: {there}"
            raise DataError(problem, f"{_KNOWN}; {OTHER_TEXT}")
        skipped += others
    elif path.exists():
        with open_file(path) as opened:  # neither a pipe nor a device
            refuse_lfs_pointer(opened, path, DataError)
        files = [path]
    else:
        matches = map(Path, glob.glob(item, recursive=True))  # noqa: PTH207 (absolute patterns)
        named = sorted(file for file in matches if file.name[0] != ".")
        files = [file for file in named if file.is_file()]
        skipped += [("", _BROKEN) for file in named if not file.exists()]
    if not files and path.is_symlink():
        problem = f"the link {shown} is broken: it leads to {printable(path.readlink())}"
        raise DataError(problem, "fix the link, or leave it out")
    if not files and glob.has_magic(item):
        raise DataError(f"no file matches {shown}", "check the pattern; quote it for the shell")
    if not files:
        raise DataError(f"{shown} does not exist", "check the path of the input")
    for file in files:
        if os.fsencode(file).decode(errors="replace") != str(file):
            raise DataError(
                f"the name of {printable(file)} is not UTF-8", "rename the file or its folder"
            )
        if not path.is_dir() and _skipped_as(file.name):
            _check_text(file)
    return files


def _check_text(path: Path) -> None:
    """Refuses a named file that is not text."""
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    inner, compression = _suffixes(path)
    if inner in _NOT_TEXT:
        kind, hint = _NOT_TEXT[inner]
        hint += "; or name it .txt, to read all of it as text"
        raise DataError(f"{printable(path)} is {kind}, not plain text", hint)
    if inner in _TABLES:
        problem = f"{printable(path)} is {_TABLES[inner]} inside {compression}"
        raise DataError(problem, f"unpack the {compression}")
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    is_binary = head.startswith(b"%PDF-") or (b"\0" in head and not is_utf16)
    if is_binary and not compression:
        hint = RAW_TOKENS if path.suffix == ".bin" else _CONVERT
        raise DataError(f"{printable(path)} is not plain text", hint)


def _search(top: Path, skipped: Skipped) -> list[Path]:
    """Lists the files of known formats in a folder, each real file and folder once.

    Others are listed in `skipped`.
    """
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
        for entry in _list_folder(folder, skipped):
            if entry.is_symlink():
                path = folder / entry.name
                (folder_links if path.is_dir() else file_links).append(path)
            elif entry.is_dir():
                folders.append(folder / entry.name)
            elif kind := _skipped_as(entry.name):
                skipped.append((f"{real}{os.sep}{entry.name}", kind))
            elif entry.is_file():
                files.append(entry.path)
                seen.add(f"{real}{os.sep}{entry.name}")
            else:
                skipped.append(("", "pipes and devices"))
    files += _follow(file_links, seen, skipped)
    return sorted(map(Path, files), key=lambda path: path.parts)


def _follow(links: list[Path], seen: set[str], skipped: Skipped) -> Iterator[str]:
    for link in sorted(links):
        if kind := _skipped_as(link.name):
            skipped.append((str(link.resolve()), kind))
        elif not link.is_file():
            skipped.append(("", _BROKEN))
        elif str(link.resolve()) not in seen:
            seen.add(str(link.resolve()))
            yield str(link)


def _list_folder(folder: Path, skipped: Skipped) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        shown = {entry.name: entry for entry in entries if entry.name != LISTING_NAME}
    left_out = _find_beside_text(folder, list(shown))
    for name, entry in shown.items():
        if kind := "hidden" if name.startswith(".") else left_out.get(name):
            skipped.append(("", kind))
        else:
            yield entry


class _Splits(msgspec.Struct):
    splits: list[str]


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files")


class _Info(msgspec.Struct):
    splits: dict[str, Any] | None = None


def _find_beside_text(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Names the files of a folder that the library keeps beside the text, each with its kind.

    Raises:
        DataError: the folder holds several splits, or its files are incomplete or unreadable.
    """
    arrow = [name for name in names if name.endswith(".arrow")]
    others = [name for name in names if name in _DESCRIPTIONS and (arrow or name != _STATE)]
    if _SPLITS in names:
        _require_one_split(folder, _read_description(folder / _SPLITS, _Splits).splits, "{}")
    elif arrow and _STATE in names:
        listed = [file.filename for file in _read_description(folder / _STATE, _State).files]
        if missing := set(listed) - set(arrow):
            problem = f"{printable(folder / min(missing))} is missing; {_STATE} lists it"
            raise DataError(problem, "copy the whole folder again")
        others += set(arrow) - set(listed)
    elif arrow and _INFO in names:
        splits = list(_read_description(folder / _INFO, _Info).splits or {})
        _require_one_split(folder, splits, "*-{}*.arrow")
        others += [name for name in arrow if name.startswith("cache-")]
    return dict.fromkeys(others, _BESIDE_TEXT)


def _require_one_split(folder: Path, splits: Sequence[str], pattern: str) -> None:
    if len(splits) > 1:
        problem = f"{printable(folder)} holds the splits {printable(', '.join(splits))}"
        example = printable(folder / pattern.format(splits[0]))
        raise DataError(problem, f"name those to prepare, such as '{example}'")


def _read_description(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_file(path, SETTINGS_LIMIT_BYTES), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"{printable(path)} is not of Hugging Face's datasets library: {error}"
        raise DataError(problem, "make it again; or name the .arrow files themselves") from error


def choose_unit_bytes(total_bytes: int) -> int:
    """Returns the input of a unit: less for a small corpus, so that its workers end together."""
    equal = total_bytes // _UNITS_OF_SMALL_CORPUS
    return min(max(equal, _LEAST_UNIT_BYTES), _MOST_UNIT_BYTES)


def split_into_units(files: Sequence[tuple[Path, int]], unit_bytes: int) -> list[list[Segment]]:
    """Cuts files, given with their sizes, into pieces of work of about `unit_bytes`, in order.

    Small files share a unit; a large plain `.jsonl` file is cut between lines, a dump anywhere. The
    result depends on nothing but the files, so any number of workers sees the same units.
    """
    units: list[list[Segment]] = []
    room = -1  # what the last unit can still take; below 0 it is not to be shared
    for path, size in files:
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
    """Returns the first byte after `position` that begins a line, or `size`."""
    file.seek(position)
    while block := file.read(2**16):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    return size
