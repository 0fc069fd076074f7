"""The checksum of the code changes with every file of it, and with nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from trainyard.launch import environment


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "src" / "trainyard"
    shutil.copytree(environment.PACKAGE / "optim", folder / "optim")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    return folder


def test_the_checksum(package: Path) -> None:
    found = [environment.code_checksum.__wrapped__()]
    (package / "notes.txt").write_text("not code")
    shutil.rmtree(package / "optim" / "__pycache__", ignore_errors=True)
    assert environment.code_checksum.__wrapped__() == found[0]
    path = package / "optim" / "adamw.py"
    path.write_bytes(path.read_bytes().replace(b"lr=", b"lr=2 * ", 1))
    found.append(environment.code_checksum.__wrapped__())
    path.rename(package / "optim" / "adam.py")
    found.append(environment.code_checksum.__wrapped__())
    (package / "optim" / "empty.py").touch()
    found.append(environment.code_checksum.__wrapped__())
    assert len({*found}) == 4


def test_the_commit_is_that_of_its_own_checkout(package: Path, tmp_path: Path) -> None:
    assert environment.find_commit.__wrapped__() == ""
    who = ["-c", "user.name=x", "-c", "user.email=x@x.example"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert len(environment.find_commit.__wrapped__()) == 7
    (package / "optim" / "adamw.py").write_text("")
    assert environment.find_commit.__wrapped__().endswith("-dirty")
