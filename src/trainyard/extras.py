"""The packages of each extra of the distribution, and the command that installs an extra."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.errors import MachineError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

DISTRIBUTION = "trainyard-gpt"
REQUIREMENT = re.compile(r"([\w.-]+).*\bextra == ['\"](\w+)['\"]")


def require(package: str) -> None:
    """Checks that a package is installed, without importing it.

    Raises:
        MachineError: it is not; the hint is the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        missing = ModuleNotFoundError(name=package)
        raise missing_package(missing) or missing


def missing_package(error: ModuleNotFoundError) -> MachineError | None:
    """Explains the failed import of a package that belongs to an extra; None for any other."""
    package = (error.name or "").partition(".")[0]
    extra = _extras().get(package)
    if extra is None:
        return None
    return MachineError(
        f"this command needs {package}, which is not installed", install_command(extra)
    )


def install_command(extra: str) -> str:
    """Returns the command that adds an extra to this installation."""
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    options, place = "", DISTRIBUTION
    distribution = _distribution()
    origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
    if "dir_info" in origin:
        folder = Path(url2pathname(urlsplit(origin["url"]).path))
        if folder.is_dir():
            place = "." if folder == Path.cwd() else str(folder)
            options = "-e " if origin["dir_info"].get("editable") else ""
    return f"{_installer()} {options}{shlex.quote(f'{place}[{extra}]')}"


def _installer() -> str:
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:  # an environment made by uv
        return f"uv pip install --python {python}"
    found = shutil.which("pip")
    is_own = found is not None and Path(found).parent == Path(sys.executable).parent
    return "pip install" if is_own else f"{python} -m pip install"


def _extras() -> dict[str, str]:
    distribution = _distribution()
    requirements = (distribution and distribution.requires) or []
    found = (REQUIREMENT.match(requirement) for requirement in requirements)
    return {match[1].lower().replace("-", "_"): match[2] for match in found if match}


def _distribution() -> Distribution | None:
    """Finds this installation; None in a source tree that is not installed."""
    from importlib import metadata  # which takes 20 ms, and is needed on few starts

    try:
        return metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
