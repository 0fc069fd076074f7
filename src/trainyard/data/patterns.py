"""Patterns among the prefixes of a blend, replaced by the token files they match.

    [data.train]
    prefixes = ["data/slimpajama/train_chunk_*_text_document[:-30]"]

A slice at the end, as of a Python list, takes a part of the matches: here all but the last 30.
Matches are in order of name, with numbers by value: `part_2` comes before `part_10`.

A run folder holds the files, and the patterns they came from. So a run that has trained keeps its
files when the patterns match others later, and resumes with bitwise the same result.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path

from pydantic import ValidationError

from trainyard.config.run import Blend, Run
from trainyard.errors import DataError

BLENDS = ("blend", "train", "valid", "test")
_MAGIC = re.compile(r"[*?[]")
_SLICE = re.compile(r"(.+)\[((?:-?[0-9]+)?):((?:-?[0-9]+)?)\]")
_ROUNDING = Fraction(1, 10**14)
_log = logging.getLogger(__name__)


def find_token_files(run: Run, begun: Run | None = None, *, missing_ok: bool = False) -> Run:
    """Replaces the patterns of a run's blends by the token files they match.

    Args:
        run: the run as its file describes it.
        begun: the same run as it started, if it has trained: unchanged patterns, with unchanged
            weights, keep its files.
        missing_ok: keep all patterns of a blend if one of them matches nothing.

    Raises:
        DataError: a pattern or its slice matches nothing, the files are still being prepared, or
            one file is matched twice.
    """
    blends: dict[str, Blend] = {}
    for name in BLENDS:
        blend: Blend = getattr(run.data, name)
        if not any(map(is_pattern, blend.prefixes)):
            continue
        started: Blend | None = getattr(begun.data, name) if begun else None
        if started and not _comes_from(started, blend):
            started = None
        try:
            blends[name] = _match(blend, f"data.{name}.prefixes")
        except DataError:
            if not missing_ok and not started:
                raise
            blends[name] = blend
        if started:
            if started.prefixes != blends[name].prefixes:
                _log.info(
                    "data.%s.prefixes: the patterns match %s files now; the run keeps the %s it "
                    "started with",
                    *(name, len(blends[name].prefixes), len(started.prefixes)),
                )
            blends[name] = started
    if not blends:
        return run
    run = run.model_copy(update={"data": run.data.model_copy(update=blends)})
    _refuse_overlap(run)
    return run


def is_pattern(prefix: str) -> bool:
    """Returns whether this entry of a blend is a pattern, not the name of one token file."""
    return bool(_MAGIC.search(prefix)) and not Path(f"{prefix}.bin").exists()


def could_match(entry: str, prefix: str) -> bool:
    """Returns whether an entry names this token file, or its pattern does, before its slice."""
    pattern, name = map(os.path.normpath, (_split_slice(entry)[0], prefix))
    if entry == prefix or "**" in pattern:
        return entry == prefix or fnmatchcase(name, pattern.replace("**/", "*"))
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _comes_from(started: Blend, blend: Blend) -> bool:
    """Returns whether files and weights result from the patterns and weights of this blend."""
    if started.patterns != blend.prefixes or not (started.weights and blend.weights):
        return (started.patterns, started.weights) == (blend.prefixes, blend.weights)
    files = zip(started.prefixes, started.weights, strict=True)
    for entry, weight in zip(blend.prefixes, blend.weights, strict=True):
        left = Fraction(weight)  # exact: the smallest file's share counts too
        while left > weight * _ROUNDING:
            prefix, part = next(files, ("", 0.0))
            if not part or not could_match(entry, prefix):
                return False
            left -= Fraction(part)
        if left < -weight * _ROUNDING:
            return False
    return next(files, None) is None


def _match(blend: Blend, field: str) -> Blend:
    prefixes: list[str] = []
    weights: list[float] = []
    for number, entry in enumerate(blend.prefixes):
        matches = _find_matches(entry, field) if is_pattern(entry) else [entry]
        prefixes += matches
        if blend.weights:  # in proportion to size, as without weights
            sizes = [Path(f"{match}.bin").stat().st_size if matches[1:] else 1 for match in matches]
            if 0 in sizes:
                raise DataError(
                    f"{field}: {matches[sizes.index(0)]}.bin is empty: no weight by size",
                    "prepare it again, or choose a pattern without it",
                )
            weights += [blend.weights[number] * size / sum(sizes) for size in sizes]
    counts = Counter(map(os.path.normpath, prefixes))
    if repeated := [prefix for prefix, count in counts.items() if count > 1]:
        raise DataError(
            f"{field}: {repeated[0]!r} is listed more than once", "each file may match once"
        )
    try:
        return Blend(prefixes=tuple(prefixes), weights=tuple(weights), patterns=blend.prefixes)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        hint = "match a part of them, such as [:1000], or prepare fewer, larger files"
        raise DataError(f"{field}: {problem}", hint) from None


def _find_matches(entry: str, field: str) -> list[str]:
    pattern, first, last = _split_slice(entry)
    names = glob.glob(f"{pattern}.bin", recursive=True)  # noqa: PTH207 (absolute patterns)
    matches = sorted((name.removesuffix(".bin") for name in names), key=_by_number)
    if not matches:
        raise DataError(
            f"{field}: {pattern!r} matches no token files",
            "name PREFIX.bin without its ending, such as 'data/web_*_text_document'; relative "
            f"patterns start at the working folder, here {Path.cwd()}",
        )
    _refuse_unfinished(matches, field)
    chosen = matches[int(first) if first else None : int(last) if last else None]
    if not chosen:
        raise DataError(
            f"{field}: [{first}:{last}] is empty: {pattern!r} matches {len(matches)} token files",
            f"choose a slice of {len(matches)} files, such as [:-1] and [-1:]",
        )
    return chosen


def _split_slice(entry: str) -> tuple[str, str, str]:
    """Returns the pattern of an entry, and both ends of its slice."""
    sliced = _SLICE.fullmatch(entry)
    return (sliced[1], sliced[2], sliced[3]) if sliced else (entry, "", "")


def _by_number(name: str) -> tuple[list[str | int], str]:
    parts = re.split("([0-9]+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)], name


def _refuse_unfinished(prefixes: Sequence[str], field: str) -> None:
    """Rejects files of a corpus in preparation: the others would join them later."""
    for folder in {Path(prefix).parent for prefix in prefixes}:
        for work in sorted(folder.glob("*.work")):
            output = str(work.with_suffix(""))
            if any(str(Path(prefix)).startswith(f"{output}_") for prefix in prefixes):
                raise DataError(
                    f"{field}: {output} is still being prepared ({work} exists)",
                    "wait for trainyard prepare, or run it again to finish",
                )


def _refuse_overlap(run: Run) -> None:
    """Rejects a file that two splits share, if at least one of them has patterns."""
    of_file: dict[str, str] = {}
    for name in BLENDS:
        blend: Blend = getattr(run.data, name)
        for prefix in blend.prefixes:
            other = of_file.setdefault(os.path.normpath(prefix), name)
            if other != name and (blend.patterns or getattr(run.data, other).patterns):
                raise DataError(
                    f"{prefix} is in data.{other} and in data.{name}",
                    "slices must not overlap, such as [:-30], [-30:-15] and [-15:]",
                )
