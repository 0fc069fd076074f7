"""`python -m trainyard.launch.installed train`: whether this Python can run a job.

Job scripts run it on each node before the ranks start. Where something is missing or of a version
out of range, it prints that on one line and exits with 93: starting again would not help.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata

from trainyard.errors import EXIT_HOLD
from trainyard.extras import DISTRIBUTION

PYTHON = (3, 11)
TORCH = "torch"
BOUND = re.compile(r"(>=|==|<)\s*([\d.]+)")


def find_problems(needs_torch: bool) -> list[str]:
    """Returns what is missing or out of range, such as `torch 2.7.0 is installed, not ..`.

    Args:
        needs_torch: whether the job trains.
    """
    problems = []
    if sys.version_info < PYTHON:
        problems.append(f"Python {sys.version.split()[0]} is older than 3.11")
    return problems + [
        problem
        for requirement in _requirements(needs_torch)
        if (problem := find_problem(requirement)) is not None
    ]


def find_problem(requirement: str) -> str | None:
    """Returns why a requirement such as `torch<2.15,>=2.11` is not met; None if it is.

    Versions compare by their leading numbers, so 2.11.0a0+vendor meets >=2.11.
    """
    name = re.split(r"[^\w.-]", requirement)[0]
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        return f"{name} is not installed"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    for relation, text in BOUND.findall(requirement):
        bound, found = _numbers(text), _numbers(version)
        found += (0,) * (len(bound) - len(found))  # 2.11 is 2.11.0
        found = found[: len(bound)] if relation == "==" else found
        if not {">=": found >= bound, "<": found < bound, "==": found == bound}[relation]:
            return f"{name} {version} is installed, but Trainyard needs {requirement}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _requirements(needs_torch: bool) -> list[str]:
    """The packages that every command imports, and those of training."""
    try:
        written = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        written = []
    parts = [text.partition(";") for text in written]
    found = [head.strip() for head, _, marker in parts if "extra" not in marker]
    if needs_torch:
        of_train = re.compile(r"extra\s*==\s*[\"']train[\"']")
        found += [head.strip() for head, _, marker in parts if of_train.search(marker)] or [TORCH]
    return found


def main() -> None:
    """Prints the problems and exits with 93, or exits with 0."""
    problems = find_problems(needs_torch="train" in sys.argv[1:])
    if problems:
        sys.stdout.write("; ".join(problems) + "\n")
        sys.exit(EXIT_HOLD)


if __name__ == "__main__":
    main()
