"""`tools/set_up.py`, with programs in place of pip and uv that note what they are asked."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.waiting import WATCHDOG_SECONDS

SCRIPT = Path(__file__).parent.parent / "tools" / "set_up.py"
RECORD = Path(".venv/.set-up.json")
OWN_CACHE = Path(".venv/.cache")
# In `log`: a line for each start; the file `fails` has patterns of those that are to fail.
PROGRAM = r"""#!/bin/sh
echo "$(basename "$0") $* index=$UV_INDEX" >> log
case "$*" in
  "-m pip config list") echo "global.extra-index-url='http://mirror/simple'" ;;
  *"requires('torch')"*) printf 'sympy\ntriton==3.6.0; platform_system == "Linux"\n' ;;
esac
for pattern in $(cat fails); do
  case "$(basename "$0") $*" in *$pattern*) echo "no route to host"; exit 1 ;; esac
done
[ ! -e hangs ] || [ "$(basename "$0")" = python ] || { touch started; exec sleep 600; }
"""


FILES = """
pyproject.toml constraints.txt log fails benchmarks/peers.txt tools/set_up.py
tests/fake_cuda/requirements.txt tests/fake_cuda/build.py tests/fake_cuda/stubs/runtime.cpp
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    for name in FILES.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(SCRIPT, folder / "tools")
    write_programs(folder)
    return folder


@pytest.fixture
def set_up(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a checkout, whose `create` writes programs instead of asking Python."""
    spec = importlib.util.spec_from_file_location("set_up", checkout / "tools" / "set_up.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "set_up", module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(module, "DEFAULT_INDEX", "file:///no/network/in/tests")
    for name in ("TORCH", "TORCH_INDEX", "UV_INDEX", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)

    def create(_venv: object) -> None:
        write_programs(checkout)
        with (checkout / "log").open("a") as log:
            log.write("created\n")

    monkeypatch.setattr(module, "create", create)
    return module


def write_programs(folder: Path) -> None:
    for venv in (".venv", ".venv-bench", ".venv-cuda", ".venv-2.11.0", ".venv-cuda-2.11.0"):
        (folder / venv / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("python", "uv"):
            program = folder / venv / "bin" / name
            program.write_text(PROGRAM)
            program.chmod(0o755)


def start(module: ModuleType, purpose: str) -> list[str]:
    """Runs `set_up.py PURPOSE` up to its end; gives what was created and installed, in order."""
    Path("log").write_text("")
    sys.argv = ["set_up.py", purpose]
    module.main()
    words = {"created": "created", "-q -c constraints.txt uv": "uv", "-e .[train,dev]": "dev"}
    words |= {"--no-deps -r .venv-cuda": "cuda", "fake_cuda/build.py": "stubs"}
    words |= {"--no-deps -r benchmarks/peers.txt": "peers", "-e .[train]": "train"}
    return [
        f"{line.split()[0]} {word}"
        for line in Path("log").read_text().splitlines()
        for text, word in words.items()
        if text in line
    ]


def test_what_is_set_up_is_not_set_up_again(
    set_up: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand = Path(".venv/by-hand")  # in a folder that somebody made
    by_hand.touch()
    assert start(set_up, "train") == ["created created", "python uv", "uv train"]
    assert by_hand.exists()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Setting up .venv with what training needs: 70 packages, 350 MB")
    assert [line.partition(" ...")[0] for line in said[1:-1]] == ["  installer (uv)", "  packages"]
    assert start(set_up, "train") == []
    assert start(set_up, "dev") == ["python uv", "uv dev"]
    assert start(set_up, "train") == start(set_up, "dev") == []
    Path("constraints.txt").write_text("torch==3.0\n")
    assert start(set_up, "train") == ["python uv", "uv dev"]
    capsys.readouterr()
    assert start(set_up, "dev") == []
    assert capsys.readouterr() == ("", "")


def test_benchmarks_have_an_environment_with_peers(set_up: ModuleType) -> None:
    assert start(set_up, "bench") == ["created created", "python uv", "uv dev", "uv peers"]
    assert start(set_up, "bench") == []
    Path("benchmarks/peers.txt").write_text("litgpt==0.6\n")
    assert start(set_up, "bench") == ["python uv", "uv dev", "uv peers"]
    start(set_up, "dev")
    assert start(set_up, "bench") == start(set_up, "dev") == []


def test_the_fake_gpu_has_an_environment_of_its_own(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(set_up, "find_missing_for_cuda", lambda: "")
    monkeypatch.setenv("TORCH_INDEX", "http://cpu/simple")  # has no CUDA
    assert start(set_up, "cuda") == ["created created", "python uv", "uv cuda", "python stubs"]
    log = Path("log").read_text().splitlines()
    (install,) = (line for line in log if "-e ." in line)
    assert install.endswith("-e . index=http://mirror/simple")
    assert "python -m pip install -q --no-deps triton==3.6.0 index=" in log
    assert "Setting up .venv-cuda with what tests on a fake GPU need" in capsys.readouterr().out
    assert start(set_up, "cuda") == []
    assert start(set_up, "dev")[1:] == ["python uv", "uv dev"]
    Path("tests/fake_cuda/stubs/runtime.cpp").write_text("// changed\n")
    assert start(set_up, "cuda") == ["python stubs"]
    Path("tests/fake_cuda/requirements.txt").write_text("torch===3.0\n")
    assert start(set_up, "cuda") == ["python uv", "uv cuda", "python stubs"]
    assert start(set_up, "cuda") == start(set_up, "dev") == []


@pytest.mark.parametrize(("purpose", "exactly"), [("dev", "=="), ("cuda", "===")])
def test_another_torch_has_environments_of_its_own(
    purpose: str,
    exactly: str,
    set_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(set_up, "find_missing_for_cuda", lambda: "")
    Path("constraints.txt").write_text("numpy==2.0\ntorch==2.13.0\ntorchao==0.18.0\n")
    folder = ".venv-cuda" if purpose == "cuda" else ".venv"
    start(set_up, purpose)
    pins = f"numpy==2.0\ntorch{exactly}VERSION\ntorchao==0.18.0\n"
    assert Path(folder, "pins.txt").read_text() == pins.replace("VERSION", "2.13.0")
    monkeypatch.setenv("TORCH", "2.11.0")
    assert start(set_up, purpose)[0] == "created created"
    assert Path(f"{folder}-2.11.0", "pins.txt").read_text() == pins.replace("VERSION", "2.11.0")
    assert f"{folder}-2.11.0/pins.txt" in Path("log").read_text()
    assert start(set_up, purpose) == []
    monkeypatch.setenv("TORCH", "2.12.0")
    monkeypatch.setattr(set_up, "create", lambda venv: shutil.copytree(folder, venv.folder))
    find_no_torch(Path(folder), f"torch{exactly}2.12.0")
    last = refusal(set_up, purpose, capsys)
    assert last.startswith("no ") and "torch 2.12.0 for this Python" in last


def find_no_torch(venv: Path, torch: str) -> None:
    """Makes every installation fail for want of a version."""
    Path("fails").write_text("install")
    said = f"No matching distribution found for {torch}"
    for program in ("python", "uv"):
        (venv / "bin" / program).write_text(PROGRAM.replace("no route to host", said))


def refusal(module: ModuleType, purpose: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Starts a set-up that is impossible here; gives its last line."""
    with pytest.raises(SystemExit) as ended:
        start(module, purpose)
    assert ended.value.code == 3
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("", "the package index has no CUDA build of torch 2.13.0 for this Python"),
        ("g++", "its stubs cannot be compiled without g++"),
        ("Linux", "this is Darwin on arm64, and its stubs stand for libraries of Linux"),
    ],
)
def test_where_there_can_be_no_fake_gpu_one_line_says_why(
    missing: str,
    why: str,
    set_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    system, machine = ("Darwin", "arm64") if missing == "Linux" else ("Linux", "x86_64")
    monkeypatch.setattr(set_up.platform, "system", lambda: system)
    monkeypatch.setattr(set_up.platform, "machine", lambda: machine)
    monkeypatch.setattr(set_up.shutil, "which", lambda name: None if name == missing else name)
    monkeypatch.setattr(set_up, "create", lambda _venv: None)
    find_no_torch(Path(".venv-cuda"), "torch===2.13.0 (from")
    assert refusal(set_up, "cuda", capsys).startswith(f"no fake GPU here: {why}")


@pytest.mark.parametrize("change", ["unfinished", "moved", "other torch", "no python"])
def test_what_cannot_be_added_to_is_made_anew(
    change: str, set_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(set_up, "train")
    leftover = Path(".venv/leftover")
    leftover.touch()
    state = json.loads(RECORD.read_text())
    assert state["folder"] == str(Path.cwd())
    moved = json.dumps(state | {"folder": "/elsewhere"})
    if change in ("unfinished", "moved"):
        RECORD.write_text(moved if change == "moved" else "")
    elif change == "other torch":
        monkeypatch.setenv("TORCH_INDEX", "http://cpu/simple")
    else:
        Path(".venv/bin/python").unlink()
    assert start(set_up, "train")[0] == "created created"
    assert not leftover.exists()
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    assert start(set_up, "train") == []


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ("uv*install", ["python uv", "uv train", "python train"]),
        ("python*constraints.txt?uv", ["python uv", "python train"]),
    ],
)
def test_pip_takes_over_where_uv_fails(
    fails: str, expected: list[str], set_up: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fails").write_text(fails)
    assert start(set_up, "train")[1:] == expected
    said = capsys.readouterr().out
    assert "uv failed (no route to host); pip installs instead" in said
    assert start(set_up, "train") == []


def test_where_both_fail_what_was_there_stays_in_use(set_up: ModuleType) -> None:
    start(set_up, "train")
    Path("fails").write_text("install")
    with pytest.raises(
        SystemExit, match="pip cannot install the packages:\nno route to host\nhint"
    ):
        start(set_up, "dev")
    assert start(set_up, "train") == []
    Path("fails").write_text("")
    assert start(set_up, "dev") == ["python uv", "uv dev"]


def test_python_without_venv_is_one_message(checkout: Path) -> None:
    shutil.copy(checkout / ".venv" / "bin" / "python", checkout / "python")
    shutil.rmtree(checkout / ".venv")
    (checkout / "fails").write_text("venv")
    code = "import sys; sys.path.insert(0, 'tools'); import set_up; "
    code += "sys.executable, sys.argv = './python', ['', 'train']; set_up.main()"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=WATCHDOG_SECONDS
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ./python cannot make a virtual environment:\nno route")
    assert "apt install python3-venv" in result.stderr and "Traceback" not in result.stderr


def test_another_index_for_torch(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "http://cpu/simple")
    start(set_up, "train")
    install = Path("log").read_text().splitlines()[-1]
    assert install.endswith("index=http://mirror/simple http://cpu/simple")
    assert "CUDA; without" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [({}, [], True), ({}, [os.devnull], False), ({"find-links": "/wheels"}, [], False)],
)
def test_where_cuda_is_needless_it_is_said(
    settings: dict[str, str],
    devices: list[str],
    expected: bool,
    set_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(set_up, "GPU_DEVICES", devices)
    monkeypatch.setattr(set_up.sys, "platform", "linux")
    assert set_up.gets_needless_cuda(settings) is expected


def test_uv_finds_what_pip_finds_with_the_precedence_of_pip(
    set_up: ModuleType, tmp_path: Path
) -> None:
    listing = r"""
:env:.find-links='/a /b'
:env:.proxy=''
download.cert='/not/this'
global.find-links='/c'
global.extra-index-url='\nhttp://one\nhttp://two'
global.timeout='10'
install.timeout='20'
Warning: something
"""
    settings = set_up.pip_settings(listing)
    more = {"extra-index-url": "\nhttp://one\nhttp://two", "timeout": "20"}
    assert settings == {"find-links": "/a /b", **more}
    settings |= {"index-url": "http://mirror", "cert": str(SCRIPT)}
    assert set_up.uv_environment(settings, {"HOME": str(tmp_path)}, OWN_CACHE) == {
        "UV_DEFAULT_INDEX": "http://mirror",
        "UV_INDEX": "http://one http://two",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": str(SCRIPT),
        "UV_HTTP_TIMEOUT": "20",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    folder = set_up.uv_environment({"cert": str(tmp_path)}, {"HOME": str(tmp_path)}, OWN_CACHE)
    assert folder["SSL_CERT_DIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("environment", "is_own"),
    [
        ({"HOME": "HERE"}, True),
        ({"HOME": "/dev/null/home"}, False),
        ({}, False),
        ({"HOME": "/dev/null/home", "XDG_CACHE_HOME": "HERE"}, True),
        ({"HOME": "HERE", "UV_CACHE_DIR": "/dev/null/cache"}, False),
    ],
)
def test_a_cache_that_cannot_be_written_is_replaced(
    environment: dict[str, str], is_own: bool, set_up: ModuleType, tmp_path: Path
) -> None:
    environment = {key: text.replace("HERE", str(tmp_path)) for key, text in environment.items()}
    found = set_up.uv_environment({}, environment, OWN_CACHE).get("UV_CACHE_DIR")
    assert found == (None if is_own else str(OWN_CACHE))


def start_process(checkout: Path) -> subprocess.Popen[str]:
    (checkout / "hangs").touch()
    command = [sys.executable, "tools/set_up.py", "train"]
    return subprocess.Popen(command, cwd=checkout, stdout=-1, stderr=-1, text=True)


def interrupt(process: subprocess.Popen[str], checkout: Path) -> str:
    """Interrupts the set-up in uv; gives what it said of it."""
    while not (checkout / "started").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=WATCHDOG_SECONDS)[1]


def test_an_interrupted_set_up_is_known_as_such(checkout: Path) -> None:
    with start_process(checkout) as process:
        errors = interrupt(process, checkout)
    assert process.returncode == 1
    assert errors == "\ninterrupted; the same command starts the set-up anew\n"
    assert (checkout / ".venv" / ".set-up.json").read_text() == ""


def test_two_at_once_set_up_one_after_the_other(checkout: Path) -> None:
    with (checkout / "tools" / "set_up.py").open("rb+") as script:
        fcntl.flock(script, fcntl.LOCK_SH)
        with start_process(checkout) as process:
            assert process.stdout is not None
            assert "waiting for another make" in process.stdout.readline()
            assert (checkout / "log").read_text() == ""
            fcntl.flock(script, fcntl.LOCK_UN)
            interrupt(process, checkout)


def test_an_index_that_does_not_answer_is_named_at_once(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert set_up.find_unreachable({"index-url": f"{place}/simple"}) == ""
        far = {"index-url": "https://packages.invalid/simple"}
        assert set_up.find_unreachable({**far, "proxy": place}) == ""
        monkeypatch.setenv("https_proxy", place)
        assert set_up.find_unreachable(far) == ""
    assert set_up.find_unreachable(far) == "127.0.0.1"  # the proxy has gone
    monkeypatch.delenv("https_proxy")
    assert set_up.find_unreachable({"index-url": f"{place}/simple"}) == "127.0.0.1"
    assert set_up.find_unreachable({**far, "no-index": "1"}) == ""
    monkeypatch.setenv("UV_DEFAULT_INDEX", place.replace("http://", "http://me:letmein@"))
    assert start(set_up, "train") == ["created created", "python uv", "uv train"]
    said = capsys.readouterr().out
    assert "  127.0.0.1 does not answer, and pip tries it for minutes" in said
    assert "letmein" not in said
