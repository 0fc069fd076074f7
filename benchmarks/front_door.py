"""`make demo` and `make test`, each from a fresh clone, on idle, busy and awkward machines.

    python benchmarks/front_door.py demo --conditions idle busy one-core c-locale spaces
    python benchmarks/front_door.py test --conditions idle --times 3
    taskset -c 1 python benchmarks/front_door.py test --conditions one-core   # not the first core

Each run clones the commit into an empty folder and adds a line to the record: exit code, seconds of
set-up and of the command, the demo's bits per byte, and the ten slowest tests. `user` and `no-home`
run as `nobody` (which only root can start), with a PATH that lacks the optional system packages;
`no-home` also has a read-only home. A folder `shared` beside this checkout is linked beside the
clone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONDITIONS = ("idle", "busy", "one-core", "c-locale", "spaces", "user", "no-home")
BUSY_LOOPS = 4
NOBODY = 65534
OPTIONAL = re.compile(
    r"chrom|slurm|^s(batch|run|cancel|control|queue|info|acct)|munge|mpi|hydra|ssh|^ip$"
)


def main() -> None:
    """Runs the target under each condition; exits with 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=("demo", "test", "test-all"))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=["idle"])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--beside", default="", help="what else runs on this machine")
    parser.add_argument("--loops", type=int, default=BUSY_LOOPS, help="to start, for `busy`")
    parser.add_argument("--record", type=Path, default=record_of_today())
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the busy loops too
    failed = False
    for condition in arguments.conditions:
        for _ in range(arguments.times):
            row = run(arguments.target, condition, arguments.loops) | {"beside": arguments.beside}
            append(arguments.record, row)
            print(json.dumps(row), flush=True)
            failed |= row["exit_code"] != 0
    sys.exit(failed)


def record_of_today() -> Path:
    return ROOT / "benchmarks" / "records" / f"{time.strftime('%Y-%m-%d')}-front-door.jsonl"


def run(target: str, condition: str, n_loops: int) -> dict[str, Any]:
    """Clones, sets up and runs one target under one condition; `busy` starts `n_loops` loops."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainyard-door-")))
        clone = folder / ("a path with spaces" if condition == "spaces" else "clone")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        if (ROOT.parent / "shared").is_dir():
            (folder / "shared").symlink_to(ROOT.parent / "shared")
        settings = surroundings(condition, folder)
        if condition == "busy":
            stack.enter_context(busy_loops(n_loops))
        log = (folder / "log.txt").open("w+")
        stack.callback(log.close)
        seconds, code = [], 0
        for command in (
            ["make", "set-up-" + ("train" if target == "demo" else "dev")],
            ["make", target],
        ):
            started = time.monotonic()
            code = (
                code
                or subprocess.run(
                    command,
                    cwd=clone,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    **settings,
                    check=False,
                ).returncode
            )
            seconds.append(round(time.monotonic() - started, 1))
        log.seek(0)
        said = log.read()
        if code:
            kept = (
                Path(tempfile.gettempdir()) / f"front-door-{target}-{condition}-{os.getpid()}.log"
            )
            kept.write_text(said)
            print(f"failed; its output is in {kept}", file=sys.stderr)
    bits = re.search(r"([0-9.]+) bits per byte on held-out", said)
    tests = re.search(r"(\d+ failed, )?\d+ passed.*", said)
    slowest = re.findall(r"^([0-9.]+)s (?:call|setup|teardown) +(\S.*)$", said, re.MULTILINE)
    return {
        "target": target,
        "condition": condition,
        "exit_code": code,
        "set_up_seconds": seconds[0],
        "seconds": seconds[1],
        "bits_per_byte": float(bits[1]) if bits else None,
        "tests": tests[0].strip("= ") if tests else None,
        "slowest_seconds": {name: float(seconds) for seconds, name in slowest},
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def surroundings(condition: str, folder: Path) -> dict[str, Any]:
    """Gives the arguments of `subprocess.run` that set up a condition."""
    environment = {**os.environ}
    if condition == "one-core":
        return {"preexec_fn": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})}
    if condition == "c-locale":
        environment = {**environment, "LC_ALL": "C", "LANG": "C"}
    if condition not in ("user", "no-home"):
        return {"env": environment}
    home = folder / "home"
    home.mkdir(mode=0o555 if condition == "no-home" else 0o755)
    programs = folder / "programs"
    programs.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in Path(place).iterdir():
            link = programs / program.name
            if not OPTIONAL.search(program.name) and not link.is_symlink():
                link.symlink_to(program)
    folder.chmod(0o755)
    for path in [folder, *folder.rglob("*")]:
        if path != home or condition == "user":
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    environment |= {"HOME": str(home), "PATH": str(programs), "USER": "nobody"}
    return {"env": environment, "user": NOBODY, "group": NOBODY, "extra_groups": []}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keeps this machine busy with other processes."""
    yes = shutil.which("yes") or "yes"
    loops = [subprocess.Popen([yes], stdout=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def append(record: Path, row: dict[str, Any]) -> None:
    """Adds a run to the record."""
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
