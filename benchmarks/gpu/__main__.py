"""Everything that is claimed of a GPU, measured in two calls on a borrowed machine.

    python -m benchmarks.gpu --output OUT                      # call 1, within 575 s
    python -m benchmarks.gpu --output OUT --continue           # call 2, within 180 s: the rest
    python -m benchmarks.gpu --fake                            # the rehearsal on the fake GPU
    python -m benchmarks.gpu --pack FOLDER --corpus TEXT.jsonl # what the machine lacks

Items run in the order of `items.py`, the most valuable first. `docs/gpu-day.md` tells what each
decides.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu.item import Row, Session
from benchmarks.gpu.supervisor import (
    RESULTS,
    Supervisor,
    choose,
    read_results,
    say,
    show_ends,
    unfinished,
)

CALL_SECONDS, CONTINUE_SECONDS = 555.0, 160.0
"""To these come the installation of the wheels, and the supervisor's grace."""
FAKE_SECONDS, FAKE_SLOWNESS = 5400.0, 20.0
FAKE_H100 = {
    "FAKE_CUDA_NAME": "NVIDIA H100 80GB HBM3",
    "FAKE_CUDA_MB": "85500",
    "FAKE_CUDNN_VERSION": "92000",
}
CACHE = "inductor.tar.xz"
OWN_CACHE = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""A caller's own, as `--pack` sets them, win."""
ROOT = Path(__file__).parents[2]


def describe() -> Row:
    """Returns facts of this machine and call."""
    commit = ""
    with suppress(OSError):  # there is no git
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        commit = done.stdout.strip()
    facts = {"call": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit}
    return facts | {"python": platform.python_version(), "cores": os.cpu_count()}


def variables(packed: Path | None, folder: Path, *, is_fake: bool) -> dict[str, str]:
    """Returns the worker's environment; unpacks the compiler's cache into `folder`."""
    found = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if is_fake:
        from tests.fake_cuda.start import variables as fake_variables

        found |= fake_variables() | FAKE_H100
    elif packed is not None:
        with tarfile.open(packed / CACHE) as archive:
            archive.extractall(folder, filter="data")
        found["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return found | {name: os.environ[name] for name in OWN_CACHE if name in os.environ}


def main() -> None:
    """Does a call."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="of the results")
    parser.add_argument("--packed", type=Path, help="folder of --pack")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="only the rest")
    parser.add_argument("--only", default="", help="items whose names contain one of: a,b")
    parser.add_argument("--seconds", type=float, help="when to stop")
    parser.add_argument("--fake", action="store_true", help="rehearse on the fake GPU")
    parser.add_argument("--pack", type=Path, help="gather in a folder what the machine lacks")
    parser.add_argument("--corpus", type=Path, help="with --pack: JSON Lines of text")
    parser.add_argument("--items", default="benchmarks.gpu.items", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pack:
        if not arguments.corpus:
            parser.error("--pack needs --corpus, a file of JSON Lines with real text")
        from benchmarks.gpu.pack import pack

        pack(arguments.pack, arguments.corpus)
        return
    seconds = arguments.seconds or (CONTINUE_SECONDS if arguments.goes_on else CALL_SECONDS)
    if arguments.fake and not arguments.seconds:
        seconds = FAKE_SECONDS
    deadline = time.monotonic() + seconds
    slowness = FAKE_SLOWNESS if arguments.fake else 1.0
    items = choose(arguments.items, arguments.only, slowness)
    output = arguments.output.absolute()
    if arguments.goes_on:
        items = unfinished(items, read_results(output / RESULTS))
    packed = arguments.packed and arguments.packed.absolute()
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        environment = variables(packed, Path(name), is_fake=arguments.fake)
        session = Session(arguments.fake, output, packed)
        supervisor = Supervisor(session, deadline, arguments.items, environment, slowness)
        supervisor.results.append(describe() | {"seconds": seconds, "fake": arguments.fake})
        supervisor.do(items)
        say("\n".join(show_ends(items, supervisor.ends)))


if __name__ == "__main__":
    main()
