"""Sets up the environments of the Makefile.

    set_up.py train    .venv for training
    set_up.py dev      .venv for tests and checks too
    set_up.py bench    .venv-bench for benchmarks beside peers
    set_up.py cuda     .venv-cuda for tests on a fake GPU (tests/fake_cuda); exits with 3 and one
                       line where this machine cannot have it

With TORCH=2.11.0 in the environment, they get that torch instead of the one of constraints.txt, in
folders of their own: .venv-2.11.0, .venv-cuda-2.11.0. Where the index does not have it, exits
with 3.

uv installs in seconds what takes pip minutes, so pip installs uv, and takes over if uv fails. uv
gets pip's settings (index, mirror, local wheels, certificates), so both find the same packages.
`.set-up.json` in the environment records what is installed. It is written last: an interrupted
set-up starts anew.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
EXTRAS = {"train": ["train"], "dev": ["train", "dev"], "bench": ["train", "dev", "bench"]}
CONTENTS = {
    "train": "what training needs: 70 packages, 350 MB unless cached (3 GB if torch comes with "
    "CUDA), 10 seconds to a few minutes",
    "dev": "what training, tests and checks need: 90 packages, 400 MB unless cached (3 GB if torch "
    "comes with CUDA), 10 seconds to a few minutes",
    "bench": "what benchmarks and their peers need: 100 packages, 600 MB unless cached (3 GB if "
    "torch comes with CUDA), 10 seconds to a few minutes",
    "cuda": "what tests on a fake GPU need: 90 packages, 1.1 GB unless cached, without NVIDIA's "
    "libraries, half a minute to a few minutes; 2.5 GB on disk",
}
FILES = ["pyproject.toml", "constraints.txt"]
FAKE_CUDA = Path("tests") / "fake_cuda"
PEERS = Path("benchmarks") / "peers.txt"
CUDA_REQUIREMENTS = FAKE_CUDA / "requirements.txt"
COMPILERS = ("gcc", "g++", "nm", "readelf")
EXIT_NOT_HERE = 3
DEFAULT_INDEX = "https://pypi.org/simple"
PROBE_SECONDS = 5.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class SetUpError(Exception):
    """The set-up failed in a way the user can fix; the message says how."""


class NotHereError(Exception):
    """This machine cannot have the environment; the message says why, in one line."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the checkout."""

    folder: Path

    @classmethod
    def of(cls, purpose: str) -> Environment:
        """Returns the one for a purpose, and for the torch asked for."""
        folder = {"cuda": ".venv-cuda", "bench": ".venv-bench"}.get(purpose, ".venv")
        torch = os.environ.get("TORCH")
        return cls(Path(f"{folder}-{torch}" if torch else folder))

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def record(self) -> Path:
        """The file of its `State`."""
        return self.folder / ".set-up.json"


@dataclass(frozen=True)
class State:
    """What is installed in an environment.

    Attributes:
        folder: the checkout, which the commands in its `bin` name.
        torch_index: where torch comes from; empty for PyPI, or pip's settings.
        files: the checksum of the files that name packages.
        extras: of Trainyard; "cuda" for the packages of tests/fake_cuda, "bench" for peers.
        stubs: the checksum of what the fake GPU is built from; empty without one.
    """

    folder: str
    torch_index: str
    files: str
    extras: list[str]
    stubs: str = ""


def main() -> None:
    """Sets up the environment of a purpose unless it is set up already."""
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    purpose = sys.argv[1]
    venv = Environment.of(purpose)
    try:
        if purpose == "cuda" and (reason := find_missing_for_cuda()):
            raise NotHereError(reason)
        if needs(read_state(venv), purpose) == read_state(venv):
            return
        with lock():
            before = read_state(venv)  # another make may have set it up meanwhile
            wanted = needs(before, purpose)
            if wanted != before:
                set_up(venv, before, wanted)
    except NotHereError as error:
        what = "fake GPU" if purpose == "cuda" else str(venv.folder)
        print(f"no {what} here: {error}", flush=True)
        sys.exit(EXIT_NOT_HERE)
    except SetUpError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command starts the set-up anew")


def find_missing_for_cuda() -> str:
    """Returns why this machine cannot have the fake GPU; empty if it can."""
    here = f"{platform.system()} on {platform.machine()}"
    if here != "Linux on x86_64":
        return f"this is {here}, and its stubs stand for libraries of Linux on x86_64"
    missing = [name for name in COMPILERS if shutil.which(name) is None]
    return f"its stubs cannot be compiled without {', '.join(missing)}" if missing else ""


def needs(before: State | None, purpose: str) -> State:
    """Returns the state that a target needs; keeps what other targets need."""
    if purpose == "cuda":
        sources = [FAKE_CUDA / "build.py", *sorted((FAKE_CUDA / "stubs").iterdir())]
        files = checksum([*map(Path, FILES), CUDA_REQUIREMENTS])
        return State(str(ROOT), "", files, ["cuda"], checksum(sources))
    asked = os.environ.get("TORCH_INDEX", "")
    peers = [PEERS] if purpose == "bench" else []
    wanted = State(str(ROOT), asked, checksum([*map(Path, FILES), *peers]), EXTRAS[purpose])
    if before is None:
        return wanted
    extras = max(wanted.extras, before.extras, key=len)
    return replace(wanted, torch_index=asked or before.torch_index, extras=extras)


def checksum(paths: Iterable[Path]) -> str:
    """Returns the checksum of files together."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def set_up(venv: Environment, before: State | None, wanted: State) -> None:
    """Makes an environment, or adds to it.

    Raises:
        SetUpError: it failed; it can be run again, and what worked before still works.
        NotHereError: there is no CUDA build of torch for this machine.
    """
    started = time.monotonic()
    if before and before == replace(wanted, stubs=before.stubs):
        print(f"Building the fake GPU in {venv.folder} anew", flush=True)
        venv.record.write_text("", encoding="utf-8")
        build_stubs(venv)
        write(venv, wanted)
        return
    print(f"Setting up {venv.folder} with {CONTENTS[wanted.extras[-1]]}", flush=True)
    same = before and replace(wanted, files=before.files, extras=before.extras) == before
    if not same:
        if venv.record.exists() or not venv.python.exists():  # else it was made by hand
            shutil.rmtree(venv.folder, ignore_errors=True)
        create(venv)
    venv.record.write_text("", encoding="utf-8")
    try:
        install(venv, wanted.extras, wanted.torch_index)
        if wanted.stubs:
            build_stubs(venv)
    except SetUpError:
        # Most likely nothing was installed: both uv and pip download everything first.
        if before and same:
            write(venv, before)
        else:
            venv.record.unlink()
        raise
    write(venv, wanted)
    print(f"Set up in {time.monotonic() - started:.0f} s", flush=True)


def create(venv: Environment) -> None:
    """Makes an environment with pip; one made by hand keeps its Python and packages.

    Raises:
        SetUpError: this Python cannot make virtual environments.
    """
    maker = str(venv.python) if venv.python.exists() else sys.executable
    failure = run("virtual environment", [maker, "-m", "venv", str(venv.folder)], {})
    if failure is not None:
        raise SetUpError(
            f"{maker} cannot make a virtual environment:\n{tail(failure)}\n"
            "hint: on Debian and Ubuntu `apt install python3-venv`, or make PYTHON=python3.12 ..."
        )


def install(venv: Environment, extras: list[str], torch_index: str) -> None:
    """Installs Trainyard with its extras, with uv or else with pip.

    Raises:
        SetUpError: neither could.
        NotHereError: the index has no such torch for this machine.
    """
    pip = [str(venv.python), "-m", "pip"]
    constraints = ["-c", "constraints.txt"]
    own_extras = [extra for extra in extras if extra != "bench"]
    pins = str(write_pins(venv, "===" if extras == ["cuda"] else "=="))
    packages = ["-c", pins, "-e", f".[{','.join(own_extras)}]"]
    peers = ["--no-deps", "-r", str(PEERS)]
    if extras == ["cuda"]:
        # All that is pinned, and nothing that torch would bring: 2 GB of NVIDIA's libraries.
        packages = ["--no-deps", "-r", pins, "-r", str(CUDA_REQUIREMENTS), "-e", "."]
    variables = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    settings = read_settings(pip, variables)
    failure = run("installer (uv)", [*pip, "install", "-q", *constraints, "uv"], variables)
    if torch_index:
        more = f"{settings.get('extra-index-url', '')} {torch_index}".strip()
        settings["extra-index-url"] = variables["PIP_EXTRA_INDEX_URL"] = more
    elif extras != ["cuda"] and gets_needless_cuda(settings):
        print(f"  torch comes with CUDA; without: make ... TORCH_INDEX={CPU_INDEX}", flush=True)
    if failure is None:
        uv = [str(venv.folder / "bin" / "uv"), "pip", "install", "--python", str(venv.python)]
        uv += ["--build-constraints", "constraints.txt"]
        environment = uv_environment(settings, os.environ, venv.folder / ".cache")
        failure = run("packages", [*uv, *packages], environment)
        if failure is None and "bench" in extras:
            failure = run("peers", [*uv, *peers], environment)
    if failure is not None:
        print(
            f"  uv failed ({tail(failure, 1).strip()}); pip installs instead, in minutes",
            flush=True,
        )
        failure = run("packages", [*pip, "install", "-q", *packages], variables)
        if failure is None and "bench" in extras:
            failure = run("peers", [*pip, "install", "-q", *peers], variables)
    if failure is None and extras == ["cuda"]:
        failure = run("triton", [*pip, "install", "-q", "--no-deps", *triton_of(venv)], variables)
    if failure is not None:
        raise explain(failure, venv)


def explain(failure: str, venv: Environment) -> SetUpError | NotHereError:
    """Returns the error for what pip said."""
    if found := re.search("No matching distribution found for torch=+([0-9.]+)", failure):
        build = "CUDA build of torch" if "===" in found[0] else "torch"
        return NotHereError(f"the package index has no {build} {found[1]} for this Python")
    return SetUpError(
        f"pip cannot install the packages:\n{tail(failure)}\n"
        "hint: check the network; set a proxy or a mirror with `pip config`; `make clean` "
        f"removes {venv.folder} for a fresh start"
    )


def write_pins(venv: Environment, exactly: str) -> Path:
    """Writes constraints.txt with the torch asked for; `===` takes no other build, such as +cpu."""
    pins = Path("constraints.txt").read_text(encoding="utf-8")
    torch = os.environ.get("TORCH") or r"\1"
    pins = re.sub(r"^torch==(.+)$", f"torch{exactly}{torch}", pins, flags=re.MULTILINE)
    path = venv.folder / "pins.txt"
    path.write_text(pins, encoding="utf-8")
    return path


def triton_of(venv: Environment) -> list[str]:
    """Returns the triton that the installed torch requires."""
    code = "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"
    listing = subprocess.run([str(venv.python), "-c", code], capture_output=True, text=True)
    lines = listing.stdout.splitlines()
    return [line.partition(";")[0].strip() for line in lines if line.startswith("triton")]


def build_stubs(venv: Environment) -> None:
    """Builds what stands for NVIDIA's libraries.

    Raises:
        SetUpError: a stub cannot be compiled.
    """
    failure = run("fake GPU", [str(venv.python), str(FAKE_CUDA / "build.py")], {})
    if failure is not None:
        raise SetUpError(f"the stubs of {FAKE_CUDA} cannot be built:\n{tail(failure)}")


def gets_needless_cuda(settings: dict[str, str]) -> bool:
    """Tells whether torch will come with CUDA on a machine without a GPU."""
    sources = {"index-url", "extra-index-url", "find-links", "no-index"}
    has_gpu = any(Path(device).exists() for device in GPU_DEVICES)
    return sys.platform == "linux" and not has_gpu and not sources & settings.keys()


def read_settings(pip: list[str], variables: dict[str, str]) -> dict[str, str]:
    """Reads pip's settings, with uv's index; names an index that does not answer."""
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    settings = pip_settings(listing.stdout)
    if "index-url" not in settings and (index := os.environ.get("UV_DEFAULT_INDEX")):
        settings["index-url"] = variables["PIP_INDEX_URL"] = index
    if host := find_unreachable(settings):
        print(
            f"  {host} does not answer, and pip tries it for minutes: check the network, or set a "
            "mirror or a proxy with `pip config set global.index-url URL`",
            flush=True,
        )
    return settings


def find_unreachable(settings: Mapping[str, str]) -> str:
    """Returns the host of the package index, or of the proxy to it, if none answers; else ""."""
    index = urlsplit(settings.get("index-url", DEFAULT_INDEX))
    if "no-index" in settings or not index.hostname:  # a folder has no host
        return ""
    bypassed = proxy_bypass(index.hostname)
    proxy = settings.get("proxy") or ("" if bypassed else getproxies().get(index.scheme, ""))
    asked = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else index
    try:
        place = (asked.hostname, asked.port or (80 if asked.scheme == "http" else 443))
        socket.create_connection(place, PROBE_SECONDS).close()
    except (OSError, ValueError):
        return str(asked.hostname)
    return ""


def pip_settings(listing: str) -> dict[str, str]:
    """Reads the settings of `pip install` from `pip config list`; variables override files."""
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            key, equals, value = line.partition("=")
            if equals and key.startswith(section):
                settings[key[len(section) :]] = str(ast.literal_eval(value))
    return {key: value for key, value in settings.items() if value}


def uv_environment(
    settings: Mapping[str, str], environment: Mapping[str, str], own_cache: Path
) -> dict[str, str]:
    """Gives the variables that make uv find the packages that pip would.

    Args:
        settings: of pip.
        environment: of this process.
        own_cache: the folder for uv's cache if its usual one cannot be written.
    """
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
        variables["UV_CACHE_DIR"] = str(own_cache)
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
            # `process.wait` may hang: an interrupt just after it took its lock leaves that taken.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)
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


def read_state(venv: Environment) -> State | None:
    """Reads what is installed; None if nothing is, or not all of it."""
    try:
        state = State(**json.loads(venv.record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return state if venv.python.exists() else None


def write(venv: Environment, state: State) -> None:
    """Writes what is installed."""
    venv.record.write_text(json.dumps(asdict(state)), encoding="utf-8")


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
            print("waiting for another make, which is setting up", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


if __name__ == "__main__":
    main()
