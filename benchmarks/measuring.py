"""What the benchmarks of whole commands share: running one on chosen cores, and a record's form."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
N_OPERATORS = 12


def measure(command: list[str], cores: int, folder: Path) -> Figures:
    """Runs a command in `folder`; CPU time and memory are of all its processes."""
    allowed = sorted(os.sched_getaffinity(0))[-cores:]
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    os.sync()
    start = time.perf_counter()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
    watch = MemoryWatch(process.pid)
    watch.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall_seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    peak_bytes = watch.stop()
    if process.returncode:
        sys.exit(f"{command} failed:\n{(folder / 'log').read_text(errors='replace')[-4000:]}")
    own = folder / "figures.json"
    return {
        "wall_seconds": wall_seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mebibytes": peak_bytes / 2**20,
        **(json.loads(own.read_text()) if own.exists() else {}),
    }


class MemoryWatch(threading.Thread):
    """Keeps the most that a process and its descendants held together, looking now and then."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._pid = pid
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            resident_bytes, left = 0, [self._pid]
            while left:
                folder = Path(f"/proc/{left.pop()}")
                with suppress(OSError):
                    found = re.findall(r"Vm(HWM|RSS):\s+(\d+)", (folder / "status").read_text())
                    own = {key: int(kibibytes) * 1024 for key, kibibytes in found}
                    resident_bytes += own.get("RSS", 0)
                    self.peak_bytes = max(self.peak_bytes, own.get("HWM", 0))
                    for task in (folder / "task").iterdir():
                        left += map(int, (task / "children").read_text().split())
            self.peak_bytes = max(self.peak_bytes, resident_bytes)

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak_bytes


def profile_operators(action: Callable[[], object]) -> dict[str, float]:
    """Calls an action under torch's profiler; gives the largest shares of CPU time by operator."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        action()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    whole = sum(row.self_cpu_time_total for row in rows)
    return {row.key: round(row.self_cpu_time_total / whole, 4) for row in rows[:N_OPERATORS]}


def write_source_corpus(path: Path, megabytes: float) -> None:
    """Writes the source of Python's standard library as documents of a .jsonl file."""
    n_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if {"site-packages", "lib2to3", "test", "tests"} & set(source.parts):
                continue
            n_bytes += file.write(json.dumps({"text": source.read_text("utf-8", "replace")}) + "\n")
            if n_bytes >= megabytes * 1e6:
                break


def describe_machine(packages: Sequence[str]) -> Figures:
    """Machine, code, command and packages of a record."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    arguments = [Path(at).name if Path(at).is_absolute() else at for at in sys.argv[1:]]
    return {
        "machine": f"{models[0] if models else 'unknown processor'}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "commit": commit,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
    }


def render(record: Figures) -> str:
    """Indents a record, with short lists and objects of plain values on one line."""

    def join(found: re.Match[str]) -> str:
        line = re.sub(r"\s*\n\s*", " ", found[0])
        return line if len(line) < 160 else found[0]

    return re.sub(r"[\[{][^\[\]{}]*[\]}]", join, json.dumps(record, indent=2)) + "\n"


def publish(record: Figures, output: Path | None) -> None:
    """Prints a record, and writes it where a file is named."""
    text = render(record)
    sys.stdout.write(text)
    if output:
        output.write_text(text, encoding="utf-8")
