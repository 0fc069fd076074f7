"""Sets up `.venv` for the Makefile: `set_up.py train` for training, `set_up.py dev` for tests too.

uv installs in seconds what takes pip minutes, so pip installs uv, and takes over if uv fails. uv
gets pip's settings (index, mirror, local wheels, certificates), so both find the same packages.
`.venv/.set-up.json` records what is installed. It is written last: an interrupted set-up starts
anew.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
STATE = VENV / ".set-up.json"
EXTRAS = {"train": ["train"], "dev": ["train", "dev"]}
CONTENTS = {
    "train": "what training needs: 70 packages, 350 MB",
    "dev": "what training, tests and checks need: 90 packages, 400 MB",
}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class SetUpError(Exception):
    """The set-up failed in a way the user can fix; the message says how."""


@dataclass(frozen=True)
class State:
    """What is installed in `.venv`.

    Attributes:
        folder: the checkout, which the commands in `.venv/bin` name.
        torch_index: where torch comes from; empty for PyPI, or pip's settings.
        files: the checksum of pyproject.toml and constraints.txt.
        extras: of Trainyard.
    """

    folder: str
    torch_index: str
    files: str
    extras: list[str]


def main() -> None:
    """Sets up `.venv` unless it is set up already."""
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    purpose = sys.argv[1]
    try:
        if needs(read_state(), purpose) == read_state():
            return
        with lock():
            before = read_state()  # another make may have set it up meanwhile
            wanted = needs(before, purpose)
            if wanted != before:
                set_up(before, wanted)
    except SetUpError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command starts the set-up anew")


def needs(before: State | None, purpose: str) -> State:
    """Gives the state that a target needs; keeps what other targets need."""
    files = b"".join(Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    asked = os.environ.get("TORCH_INDEX", "")
    wanted = State(str(ROOT), asked, hashlib.sha256(files).hexdigest(), EXTRAS[purpose])
    if before is None:
        return wanted
    extras = max(wanted.extras, before.extras, key=len)
    return replace(wanted, torch_index=asked or before.torch_index, extras=extras)


def set_up(before: State | None, wanted: State) -> None:
    """Makes `.venv`, or adds to it.

    Raises:
        SetUpError: it failed; it can be run again, and what worked before still works.
    """
    started = time.monotonic()
    print(
        f"Setting up .venv with {CONTENTS[wanted.extras[-1]]} unless cached (3 GB if torch comes "
        "with CUDA), 10 seconds to a few minutes",
        flush=True,
    )
    same = before and replace(wanted, files=before.files, extras=before.extras) == before
    if not same:
        if STATE.exists() or not PYTHON.exists():  # else it was made by hand
            shutil.rmtree(VENV, ignore_errors=True)
        create()
    STATE.write_text("", encoding="utf-8")
    try:
        install(wanted.extras, wanted.torch_index)
    except SetUpError:
        # Most likely nothing was installed: both uv and pip download everything first.
        if before and same:
            write(before)
        else:
            STATE.unlink()
        raise
    write(wanted)
    print(f"Set up in {time.monotonic() - started:.0f} s", flush=True)


def create() -> None:
    """Makes `.venv` with pip; one made by hand keeps its Python and packages.

    Raises:
        SetUpError: this Python cannot make virtual environments.
    """
    maker = str(PYTHON) if PYTHON.exists() else sys.executable
    failure = run("virtual environment", [maker, "-m", "venv", str(VENV)], {})
    if failure is not None:
        raise SetUpError(
            f"{maker} cannot make a virtual environment:\n{tail(failure)}\n"
            "hint: on Debian and Ubuntu `apt install python3-venv`, or make PYTHON=python3.12 ..."
        )


def install(extras: list[str], torch_index: str) -> None:
    """Installs Trainyard with its extras, with uv or else with pip.

    Raises:
        SetUpError: neither could.
    """
    pip = [str(PYTHON), "-m", "pip"]
    common = ["-c", "constraints.txt"]
    packages = ["-e", f".[{','.join(extras)}]"]
    variables = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    failure = run("installer (uv)", [*pip, "install", "-q", *common, "uv"], variables)
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    settings = pip_settings(listing.stdout)
    if torch_index:
        more = f"{settings.get('extra-index-url', '')} {torch_index}".strip()
        settings["extra-index-url"] = variables["PIP_EXTRA_INDEX_URL"] = more
    elif gets_needless_cuda(settings):
        print(f"  torch comes with CUDA; without: make ... TORCH_INDEX={CPU_INDEX}", flush=True)
    if failure is None:
        uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), *common]
        uv += ["--build-constraints", "constraints.txt"]
        failure = run("packages", [*uv, *packages], uv_environment(settings, os.environ))
    if failure is not None:
        print(
            f"  uv failed ({tail(failure, 1).strip()}); pip installs instead, in minutes",
            flush=True,
        )
        failure = run("packages", [*pip, "install", "-q", *common, *packages], variables)
    if failure is not None:
        raise SetUpError(
            f"pip cannot install the packages:\n{tail(failure)}\n"
            "hint: check the network; set a proxy or a mirror with `pip config`; `make clean` "
            "removes .venv for a fresh start"
        )


def gets_needless_cuda(settings: dict[str, str]) -> bool:
    """Tells whether torch will come with CUDA on a machine without a GPU."""
    sources = {"index-url", "extra-index-url", "find-links", "no-index"}
    has_gpu = any(Path(device).exists() for device in GPU_DEVICES)
    return sys.platform == "linux" and not has_gpu and not sources & settings.keys()


def pip_settings(listing: str) -> dict[str, str]:
    """Reads the settings of `pip install` from `pip config list`; variables override files."""
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            key, equals, value = line.partition("=")
            if equals and key.startswith(section):
                settings[key[len(section) :]] = str(ast.literal_eval(value))
    return {key: value for key, value in settings.items() if value}


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Gives the variables that make uv find the packages that pip would."""
    certificates = "SSL_CERT_DIR" if Path(settings.get("cert", "")).is_dir() else "SSL_CERT_FILE"
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "no-index": "UV_NO_INDEX",
        "trusted-host": "UV_INSECURE_HOST",
        "cert": certificates,
        "client-cert": "SSL_CLIENT_CERT",
        "proxy": "ALL_PROXY",
        "default-timeout": "UV_HTTP_TIMEOUT",
        "timeout": "UV_HTTP_TIMEOUT",
    }
    variables = {
        name: " ".join(settings[setting].split())
        for setting, name in names.items()
        if setting in settings
    }
    if "find-links" in settings:
        variables["UV_FIND_LINKS"] = ",".join(settings["find-links"].split())
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # the best version of all, as pip
    home = environment.get("HOME", os.devnull)
    caches = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    if not can_write(Path(environment.get("UV_CACHE_DIR") or f"{caches}/uv")):
        variables["UV_CACHE_DIR"] = str(VENV / ".cache")
    return variables


def can_write(folder: Path) -> bool:
    """Tells whether files can be created in a folder, which is made if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def run(title: str, command: list[str], variables: Mapping[str, str]) -> str | None:
    """Runs a command as one stage, and prints its title and time.

    Returns:
        None, or its output if it failed.
    """
    started = time.monotonic()
    shows_seconds = sys.stdout.isatty()
    print(f"  {title} ... ", end="", flush=True)
    with tempfile.TemporaryFile() as said:
        environment = {**os.environ, **variables}
        try:
            process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        except OSError as error:
            print("failed", flush=True)
            return str(error)
        try:
            while not has_ended(process):
                if shows_seconds:
                    print(f"\r  {title} ... {time.monotonic() - started:.0f} s", end="", flush=True)
        except BaseException:
            process.kill()
            process.wait()
            raise
        said.seek(0)
        output = said.read().decode("utf-8", "replace")
    took = f"{time.monotonic() - started:.0f} s"
    end = took if process.returncode == 0 else f"failed after {took}"
    print(f"\r  {title} ... {end}" if shows_seconds else end, flush=True)
    return None if process.returncode == 0 else output


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Waits for a second, or until the process ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    return process.returncode is not None


def tail(text: str, n_lines: int = 15) -> str:
    """Gives the last lines of a command's output."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-n_lines:])


def read_state() -> State | None:
    """Reads what is installed; None if nothing is, or not all of it."""
    try:
        state = State(**json.loads(STATE.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return state if PYTHON.exists() else None


def write(state: State) -> None:
    """Writes what is installed."""
    STATE.write_text(json.dumps(asdict(state)), encoding="utf-8")


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Lets one `make` at a time set up, or any number where files cannot be locked."""
    try:
        file = SCRIPT.open("rb+")  # a network file system locks only what can be written
    except OSError as error:
        raise SetUpError(f"cannot write to {ROOT}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another make, which is setting up .venv", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


if __name__ == "__main__":
    main()
