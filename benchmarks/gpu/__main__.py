"""Everything that is claimed of a GPU, measured by one command.

    python -m benchmarks.gpu --minutes 28 --output benchmarks/records
    python -m benchmarks.gpu --only ceiling,sizes --minutes 9
    python -m benchmarks.gpu --small                # the rehearsal: seconds a part, on a CPU

Parts run in this order, the most valuable first, and stop where the time is up:

    ceiling    products in bf16 and fp8 on random data, copies
    sizes      350M to 6.7B in bf16: MFU, and the share of the ceiling
    precision  fp8 and fp8_lowbit against bf16: speed, memory
    tests      pytest -m gpu
    budget     where the time of a step goes, by kernels; how often the host waits
    peers      transformers, plain PyTorch and Megatron-Core in turn with ours
    trials     what might help, one change at a time
    accuracy   losses after 1,000 steps on real text, with --data PREFIX

Each part writes its record after every command it ran, so that nothing is lost where the machine is
taken away. A candidate that fails, for memory say, is in the record with its last words, and the
rest goes on. A later call finds the fastest micro batches and the ceiling in the records of an
earlier one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.commands import LEAST_SECONDS, Budget, Figures
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.session import Session
from benchmarks.measuring import describe_machine, render

PACKAGES = ("torch", "triton", "torchao", "transformers", "megatron-core", "numpy")


def describe(commit: str) -> Figures:
    installed = []
    for name in PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        installed.append(name)
    try:
        found = describe_machine(installed)
    except OSError:  # there is no git
        found = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "packages": {name: version(name) for name in installed},
            "commit": "",
            "date": time.strftime("%Y-%m-%d"),
        }
    arguments = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    found["command"] = shlex.join(["python", "-m", "benchmarks.gpu", *arguments])
    if commit:  # a copy of the files knows none
        found["commit"] = commit
    return found


def find_earlier(folder: Path, part: str) -> Figures | None:
    """Reads the newest record of a part."""
    found = sorted(folder.glob(f"*-gpu-{part}.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def recall(session: Session, folder: Path) -> None:
    """Takes over what an earlier call found out."""
    if earlier := find_earlier(folder, "ceiling"):
        session.ceiling = earlier.get("tflops_per_second", {}).get("bf16", {}).get("large")
    if earlier := find_earlier(folder, "sizes"):
        for size, figures in earlier.get("summary", {}).items():
            recompute, micro = figures["rung"]
            session.best[size] = (recompute, micro)


def show(part: str, found: Figures) -> None:
    """Prints the last thing that was found, on one line."""
    items = found.get("items")
    if not items:
        print(f"{part}: {json.dumps(found)[:600]}", flush=True)
        return
    last = items[-1]
    name = last.get("variant") or last.get("precision", "")
    if "record" in last:
        told = "; ".join(
            f"{each['name']} {each['tokens_per_second_per_device']:.0f} tokens/s "
            f"{each['tflops_per_second_per_device']:.1f} TFLOP/s "
            f"MFU {each['model_flops_utilization'] or 0:.3f} "
            f"{each['peak_memory_bytes'] / 2**30:.1f} GiB"
            for each in last["record"]["candidates"]
        )
    elif last.get("losses"):
        told = f"loss {last['losses'][-1][1]:.4f} at step {last['losses'][-1][0]}"
    else:
        told = f"{last.get('failed', '')} {last.get('said', '')[-300:]}"
    print(f"{part}: {name}: {told} ({last.get('seconds', 0):.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="the rehearsal on a CPU")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--minutes", type=float, default=28.0, help="when to stop")
    parser.add_argument("--output", type=Path, help="folder of the records")
    parser.add_argument("--earlier", type=Path, help="records of an earlier call; else --output")
    parser.add_argument("--data", action="append", default=[], help="token files, for accuracy")
    parser.add_argument("--commit", default="", help="of the code, where this is no checkout")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    here = Path("runs/gpu-rehearsal" if arguments.small else "benchmarks/records")
    output = arguments.output or here
    output.mkdir(parents=True, exist_ok=True)
    budget = Budget(time.monotonic() + 60 * arguments.minutes)
    session = Session(arguments.small, budget, tuple(arguments.data))
    recall(session, arguments.earlier or output)
    machine = describe(arguments.commit)
    for part in [part for part in PARTS if part in wanted]:
        path = output / f"{machine['date']}-gpu-{part}.json"
        began = time.monotonic()

        def write(
            found: Figures, part: str = part, path: Path = path, began: float = began
        ) -> None:
            seconds = round(time.monotonic() - began, 1)
            record: dict[str, Any] = {**machine, "part": part, "seconds": seconds, **found}
            record["rehearsal"] = arguments.small
            path.write_text(render(record), encoding="utf-8")
            show(part, found)

        if budget.left < LEAST_SECONDS:
            print(f"{part}: no time left", flush=True)
            continue
        try:
            PARTS[part](session, write)
        except Exception:  # the other parts are worth having without this one
            text = traceback.format_exc()
            path.with_suffix(".failed.txt").write_text(text, encoding="utf-8")
            print(f"{part} failed:\n{text}", flush=True)


if __name__ == "__main__":
    main()
