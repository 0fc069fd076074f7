"""Every verb without the packages of the `train` extra: it works, or names the command to run."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.command import Fork

from trainyard.cli import help as verb_help
from trainyard.cli.help import VERBS
from trainyard.cli.main import main
from trainyard.data.indexed import IndexedWriter
from trainyard.extras import DISTRIBUTION, install_command, missing_package

NEEDS_TRAIN = {
    "prepare": "prepare text.txt --output new --train-tokenizer 300",
    "train": "train tiny --ranks 2",
    "bench": "bench tiny",
    "evaluate": "evaluate runs/a",
    "generate": "generate runs/a --prompt a",
    "report --png": "report runs/a --png figures",
    "export": "export runs/a --output new",
    "import": "import theirs --output new",
    "check layout": "check layout tiny",
    "check checkpoint": "check checkpoint runs/a",
    "plan --simulate": "plan tiny --simulate",
    "demo": "demo",
    "ladder": "ladder points.csv",
    "ladder RUN": "ladder gpt3-125m data.blend.prefixes=['corpus']",
    "sweep": "sweep tiny data.blend.prefixes=['corpus'] train.seed=1,2",
    "check parametrization": "check parametrization tiny",
    "doctor": "doctor --calibrate new.toml",
}
WORKS = {
    "plan": "plan tiny",
    "new": "new corpus -o new.toml --tokenizer gpt2",
    "sweep --dry-run": "sweep tiny train.seed=1,2 --dry-run",
    "ladder --dry-run": "ladder gpt3-1.3b --dry-run",
    "launch": "launch gpt3-350m data.blend.prefixes=['corpus'] --cluster slurm --dry-run",
    "show": "show tiny",
    "show order": "show order tiny data.blend.prefixes=['corpus'] data.split='90,10,0'",
    "check data": "check data corpus",
    "completion": "completion bash",
    "report": "report runs/a",
    "status": "status runs/a",
    "status --follow": "status runs/a --follow",
}


def packages_of(extra: str) -> list[str]:
    requirements = metadata.requires(DISTRIBUTION) or []
    return [re.split(r"[^\w-]", line)[0] for line in requirements if f'"{extra}"' in line]


def run_in_base(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Runs a command in a fork that cannot import what the `train` extra brings."""
    monkeypatch.chdir(folder)

    def run() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "trainyard":
                del sys.modules[name]
        sys.modules.update(dict.fromkeys(packages_of("train")))  # type: ignore[arg-type]
        from trainyard.cli.main import main

        sys.argv = ["trainyard", *words.split()]
        main()

    result = Fork(run).wait()
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from trainyard.config.load import load_run, render_run

    run_folder = tmp_path / "runs" / "a"
    run_folder.mkdir(parents=True)
    (run_folder / "run.toml").write_text(render_run(load_run("tiny").run))
    (run_folder / "metrics.jsonl").touch()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "points.csv").write_text("parameters,tokens,loss\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add_document(np.arange(400, dtype=np.uint16))
    return tmp_path


def test_every_verb_is_tried() -> None:
    assert {*VERBS} == {name.split()[0] for name in (NEEDS_TRAIN | WORKS)}


@pytest.mark.parametrize("words", NEEDS_TRAIN.values(), ids=NEEDS_TRAIN)
def test_a_verb_names_the_command_that_installs_what_it_needs(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.rglob("*"))
    code, _, errors = run_in_base(words, folder, monkeypatch)
    assert code == 2, errors
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1] == f"hint: {install_command('train')}"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("words", WORKS.values(), ids=WORKS)
def test_a_verb_works(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, errors = run_in_base(words, folder, monkeypatch)
    assert (code, bool(output)) == (0, True), errors


def test_the_extras_are_those_of_the_distribution() -> None:
    assert {"torch", "tokenizers", "matplotlib", "zstandard"} <= set(packages_of("train"))
    for package in ("torch", "wandb", "pytest_xdist", "import_linter"):
        error = missing_package(ModuleNotFoundError(name=f"{package}.part"))
        assert error is not None and package in error.problem
    for package in ("numpy", "sympy", "trainyard", ""):
        assert missing_package(ModuleNotFoundError(name=package)) is None


def test_what_no_extra_brings_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        import nothing_that_exists  # type: ignore[import-not-found]  # noqa: F401

    monkeypatch.setattr(verb_help, "VERBS", ("broken",))
    monkeypatch.setitem(sys.modules, "trainyard.cli.broken", SimpleNamespace(broken=broken))  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="nothing_that_exists"):
        main(["broken"])


EDITABLE, COPIED = '{"editable": true}', "{}"


@pytest.mark.parametrize(
    ("url", "how", "where", "expected"),
    [
        ("", "", "elsewhere", "'trainyard-gpt[train]'"),
        ("file://HERE", EDITABLE, "my checkout", "-e '.[train]'"),
        ("file://HERE", EDITABLE, "elsewhere", "-e 'HERE[train]'"),
        ("file://HERE", COPIED, "my checkout", "'.[train]'"),
        ("file:///gone", COPIED, "elsewhere", "'trainyard-gpt[train]'"),
        ("https://a/b.whl", "", "elsewhere", "'trainyard-gpt[train]'"),
    ],
)
def test_the_command_is_that_of_the_installation(
    url: str, how: str, where: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "my checkout"
    installed = tmp_path / "site" / "trainyard_gpt-1.0.dist-info"
    for folder in (checkout, tmp_path / "elsewhere", installed):
        folder.mkdir(parents=True)
    facts = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n"
    (installed / "METADATA").write_text(facts)
    url = url.replace("HERE", str(checkout).replace(" ", "%20"))
    kind = f'"dir_info": {how}' if how else '"archive_info": {}'
    (installed / "direct_url.json").write_text(f'{{"url": "{url}", {kind}}}' if url else "")
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.chdir(tmp_path / where)
    assert install_command("train").endswith(" " + expected.replace("HERE", str(checkout)))
