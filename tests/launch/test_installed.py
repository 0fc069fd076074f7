"""What a Python lacks, from the packages that it really finds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.errors import EXIT_HOLD
from trainyard.launch.installed import find_problem, find_problems

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"


def test_this_python_lacks_nothing() -> None:
    assert find_problems(needs_torch=True) == []


@pytest.mark.parametrize(
    ("version", "requirement", "is_met"),
    [
        ("2.11.0", "made-up<2.14,>=2.11", True),
        ("2.13.1+cu130", "made-up<2.14,>=2.11", True),
        ("2.11.0a0+d7e8f", "made-up<2.14,>=2.11", True),
        ("2.7.0a0+7c8ec84dab.nv25.3", "made-up<2.14,>=2.11", False),
        ("2.14.0", "made-up<2.14,>=2.11", False),
        ("2.11", "made-up>=2.11.0", True),
        ("2.11", "made-up<2.11.0", False),
        ("0.10", "made-up==0.10.0", True),
        ("0.10.0", "made-up==0.10.0", True),
        ("0.10.1", "made-up==0.10.0", False),
        ("3", "made-up", True),
    ],
)
def test_versions(
    version: str,
    requirement: str,
    is_met: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_package(tmp_path, "made_up", version)
    monkeypatch.syspath_prepend(tmp_path)
    said = f"made-up {version} is installed, but Trainyard needs {requirement}"
    assert find_problem(requirement) == (None if is_met else said)


def test_a_missing_package() -> None:
    assert find_problem("made-up-too>=1") == "made-up-too is not installed"


@pytest.mark.parametrize("what", ["train", "prepare"])
@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [("torch", "2.7.0", "torch<2.15,>=2.11"), ("torchao", "0.17.0", "torchao<0.19,>=0.18")],
)
def test_an_old_package_holds_training_alone(
    name: str, version: str, wanted: str, what: str, tmp_path: Path
) -> None:
    write_package(tmp_path, name, version)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainyard.launch.installed", what],
        env={"PYTHONPATH": f"{tmp_path}:{SOURCES}"},
        capture_output=True,
        text=True,
    )
    said = f"{name} {version} is installed, but Trainyard needs {wanted}\n"
    assert (done.returncode, done.stdout) == ((EXIT_HOLD, said) if what == "train" else (0, ""))


def test_pages_and_ci_state_the_range_of_torch() -> None:
    (wanted,) = re.findall(r'"(torch>=2\.\d+,<2\.\d+)"', (ROOT / "pyproject.toml").read_text())
    oldest, beyond = map(int, re.findall(r"2\.(\d+)", wanted))
    for page in (ROOT / "README.md", ROOT / "docs" / "installing.md"):
        text = page.read_text()
        assert f"torch 2.{oldest} to 2.{beyond - 1}" in text
        assert set(re.findall(r"torch>=[\d.,<]+", text)) <= {wanted}
    assert wanted in text
    script = ROOT / ".ci" / "run"
    tried = re.search(r"for torch in 2\.(\d+)\.\d+ 2\.(\d+)\.\d+", script.read_text())
    assert tried is not None and [*map(int, tried.groups())] == [oldest, beyond - 1]


def write_package(folder: Path, name: str, version: str) -> None:
    """Writes an installed package without code."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
