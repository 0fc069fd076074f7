"""Runs Python with the fake device: `start.py -m pytest ...` in the environment of this Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "fake_cuda"
CACHES = Path(sys.prefix) / "compiled"


def has_started() -> bool:
    """Whether this process has the fake device."""
    return FOLDER.name in os.environ.get("LD_PRELOAD", "")


def variables() -> dict[str, str]:
    """Gives the environment in which CUDA's libraries are the stubs."""
    return {
        "LD_PRELOAD": str(FOLDER / "libfake_cuda.so"),
        "LD_LIBRARY_PATH": str(FOLDER / "lib"),
        "TRITON_LIBCUDA_PATH": str(FOLDER / "lib"),
        "TRITON_CACHE_DIR": str(CACHES / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHES / "inductor"),
        # Forks would wait for ever for the threads of a pool of compilers.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | variables())
