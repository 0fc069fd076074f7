"""The only reader of the environment: which process this is, of how many, and where."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from trainyard import __version__

PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "gigatoken")


@dataclass(frozen=True)
class Process:
    """This process among those that train together."""

    rank: int = 0
    n_ranks: int = 1
    local_rank: int = 0


def read_process(environment: Mapping[str, str] = os.environ) -> Process:
    """Reads what torchrun set; without it this is the only process."""
    return Process(
        rank=int(environment.get("RANK", 0)),
        n_ranks=int(environment.get("WORLD_SIZE", 1)),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
    )


def read_versions() -> dict[str, str]:
    """Names the versions of everything that can change a result."""
    versions = {
        "trainyard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": _processor_name(),
        "command": " ".join(sys.argv),
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        return platform.machine()
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
