"""Checks out the peers that are in no package, at the commits of `peers.toml`."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
import tomllib
from pathlib import Path

LIST = Path(__file__).with_name("peers.toml")
CHECKOUTS = Path(__file__).parents[1] / ".peers"
NETWORK_SECONDS = 300


def find_peer(name: str, clones: Path | None = None, checkouts: Path = CHECKOUTS) -> Path | str:
    """Returns the folder of a peer at its commit, or why there is none.

    Args:
        name: as in `peers.toml`.
        clones: a folder with a clone of it, bare or not, under its name; absent: from the network.
        checkouts: where it is kept.
    """
    peer = tomllib.loads(LIST.read_text(encoding="utf-8"))[name]
    checkout = checkouts / f"{name}-{peer['commit'][:12]}"
    if checkout.exists():
        return checkout
    checkouts.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkouts) as scratch:
        repository, archive = Path(scratch) / "repository", Path(scratch) / "archive.tar"
        try:
            if clones is None:
                git("init", "--quiet", "--bare", str(repository))
                git(
                    "-C",
                    str(repository),
                    "fetch",
                    "--quiet",
                    "--depth=1",
                    peer["url"],
                    peer["commit"],
                )
            else:
                repository = clones / name
            options = [f"--output={archive}", peer["commit"], *peer["paths"]]
            git("-C", str(repository), "archive", *options)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error)
            reason = said.strip().splitlines()[-1].replace(str(clones), "FOLDER")
            return f"{name}: {reason}"
        with tarfile.open(archive) as files:
            files.extractall(Path(scratch) / "files", filter="data")
        (Path(scratch) / "files").rename(checkout)
    return checkout


def git(*arguments: str) -> None:
    subprocess.run(
        ["git", *arguments], check=True, capture_output=True, text=True, timeout=NETWORK_SECONDS
    )
