"""Folders of Hugging Face's datasets library: which of their files are the text.

saved/      state.json lists the .arrow files; dataset_info.json        `save_to_disk`
splits/     dataset_dict.json lists the folders of the splits           of a DatasetDict
cache/      dataset_info.json lists the splits, in NAME-SPLIT.arrow or NAME-SPLIT-*.arrow;
            cache-*.arrow are results of `map` and `filter`             `load_dataset`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainyard.errors import DataError, printable
from trainyard.files import SETTINGS_LIMIT_BYTES, read_file

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_DESCRIPTIONS = (_STATE, _INFO, _SPLITS, "dataset_infos.json")
_KIND = "not text, of Hugging Face's datasets library"


class _Splits(msgspec.Struct):
    splits: list[str]


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files")


class _Info(msgspec.Struct):
    splits: dict[str, Any] | None = None


def leave_out(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Names the files of a folder that the library keeps beside the text, each with its kind.

    Raises:
        DataError: the folder holds several splits, or its files are incomplete or unreadable.
    """
    arrow = [name for name in names if name.endswith(".arrow")]
    others = [name for name in names if name in _DESCRIPTIONS and (arrow or name != _STATE)]
    if _SPLITS in names:
        _require_one_split(folder, _read(folder / _SPLITS, _Splits).splits, "{}")
    elif arrow and _STATE in names:
        listed = [file.filename for file in _read(folder / _STATE, _State).files]
        if missing := set(listed) - set(arrow):
            problem = f"{printable(folder / min(missing))} is missing; {_STATE} lists it"
            raise DataError(problem, "copy the whole folder again")
        others += set(arrow) - set(listed)
    elif arrow and _INFO in names:
        splits = list(_read(folder / _INFO, _Info).splits or {})
        _require_one_split(folder, splits, "*-{}*.arrow")
        others += [name for name in arrow if name.startswith("cache-")]
    return dict.fromkeys(others, _KIND)


def _require_one_split(folder: Path, splits: Sequence[str], pattern: str) -> None:
    if len(splits) > 1:
        problem = f"{printable(folder)} holds the splits {printable(', '.join(splits))}"
        example = printable(folder / pattern.format(splits[0]))
        raise DataError(problem, f"name those to prepare, such as '{example}'")


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_file(path, SETTINGS_LIMIT_BYTES), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"{printable(path)} is not of Hugging Face's datasets library: {error}"
        raise DataError(problem, "make it again; or name the .arrow files themselves") from error
