"""Help, names, messages, exit codes, completion, encodings and pipes of the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.command import on_terminal, trainyard
from tests.faults.small_run import write_tokens
from typer.main import get_command

from trainyard import __version__
from trainyard.cli import __main__
from trainyard.cli.help import VERBS
from trainyard.cli.main import app
from trainyard.config.load import load_run, render_run
from trainyard.data.loader import build_orders
from trainyard.layout.resolve import resolve

START = (sys.executable, "-m", "trainyard.cli")
LONG = "a" * 300
RUN_FILE = """
name = "mine"
extends = "tiny"
data = {split = "90,10,0", cache_folder = "cache", blend = {prefixes = ["corpus_text_document"]}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_folder = tmp_path / "runs" / "small"
    run_folder.mkdir(parents=True)
    (run_folder / "run.toml").write_text(render_run(load_run("tiny").run))
    return tmp_path


def start(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    found = {**os.environ, **environment}
    return subprocess.run([*START, *words], capture_output=True, cwd=folder, env=found)


def complete(words: str, folder: Path) -> list[str]:
    environment = {
        "_TRAINYARD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return trainyard(folder=folder, **environment).stdout.split()


def test_verbs_in_the_order_of_the_work(tmp_path: Path) -> None:
    shown = trainyard("-h", folder=tmp_path)
    assert shown.returncode == 0
    lines = shown.stdout.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in lines if line[:3].strip()] == [*VERBS]
    assert trainyard(folder=tmp_path).stdout == shown.stdout
    assert trainyard("--version", folder=tmp_path).stdout == f"trainyard {__version__}\n"


def test_a_run_is_shown_alike_by_name_and_by_folder(folder: Path) -> None:
    for has_trained in (False, True):
        if has_trained:  # a damaged checkpoint is one all the same
            (folder / "runs/small/checkpoints/step-00000004").mkdir(parents=True)
        by_name, by_folder = (
            trainyard("show", name, folder=folder) for name in ("small", "runs/small")
        )
        assert (by_name.returncode, by_name.stdout) == (by_folder.returncode, by_folder.stdout)
        assert ("2 blocks of width 64" in by_name.stdout) != has_trained
        assert ("no checkpoint in runs/small" in by_name.stderr) == has_trained


def test_every_option_has_help_and_examples_are_of_their_verb() -> None:
    group = get_command(app)
    verbs = {name: group.get_command(None, name) for name in VERBS}  # type: ignore[attr-defined]
    verbs |= {f"check {name}": verb for name, verb in verbs["check"].commands.items()}
    for name, verb in verbs.items():
        assert [option.name for option in verb.params if not option.help] == []
        assert name == "check" or f"trainyard {name}" in verb.help


@pytest.mark.parametrize("columns", ["30", "200"])
def test_examples_are_one_a_line(tmp_path: Path, columns: str) -> None:
    shown = trainyard("plan", "-h", folder=tmp_path, COLUMNS=columns, TERMINAL_WIDTH=columns)
    assert "\n  trainyard plan gpt3-13b --gpu h100-80g --gpus 64 --search\n" in shown.stdout
    assert shown.stdout.index("Devices:") < shown.stdout.index("Searching:")
    assert "list[str]" not in shown.stdout


def test_debug_anywhere(tmp_path: Path) -> None:
    for words in (["show", "--debug", "nope"], ["show", "nope", "--debug"]):
        assert "Traceback" in trainyard(*words, folder=tmp_path).stderr
    assert "Traceback" not in trainyard("show", "nope", folder=tmp_path).stderr
    shown = trainyard("show", "--", "--debug", folder=tmp_path)
    assert "no preset named '--debug'" in shown.stderr and "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan laptop --debuk", "error: no such option: --debuk\nhint: trainyard plan --help"),
        ("traiin laptop", "error: no such command 'traiin'"),
        ("train", "error: missing argument 'run_file'\nhint: trainyard train --help"),
        ("train mine.toml --resume maybe", "'maybe' is not one of 'auto', 'must'"),
        ("train notes", "notes is not a run file"),
        ("show gtp3-13b", "'gtp3-13b'\nhint: did you mean the preset gpt3-13b?"),
        ("show nowhere.toml", "error: no run file nowhere.toml"),
        ("show --fields traiin", "hint: did you mean train?"),
        ("show order mine.toml --split holdout", "--split 'holdout' is not one of"),
        ("show order mine.toml --start 9000", "sequences 9000 to 9003 requested"),
        ("generate smalll", "no folder smalll, and no run of that name in runs/\n"),
        ("status smalll", "hint: did you mean small?"),
        ("report smalll", "hint: did you mean small?"),
        ("evaluate runs/small", "error: no checkpoint in runs/small"),
        (f"import {LONG} --output x", "File name too long"),
        (f"import . --output {LONG}", "File name too long"),
        (f"show {LONG}", "File name too long"),
        (f"prepare {LONG} --output x", "File name too long"),
        ("prepare nothing.txt --output x --train-tokenizer 300", "nothing.txt"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    folder: Path, words: str, message: str
) -> None:
    (folder / "notes").write_text("hello")
    (folder / "mine.toml").write_text(RUN_FILE)
    write_tokens(folder)
    before = sorted(folder.rglob("*"))
    refused = trainyard(*words.split(), folder=folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr and "Traceback" not in refused.stderr
    assert [path for path in sorted(folder.rglob("*")) if "cache" not in path.parts] == before


def test_show_order_writes_exactly_what_training_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("mine.toml").write_text(RUN_FILE)
    write_tokens(folder)
    words = "show order mine.toml --split train --start 5 --count 20 --output order.npz"
    result = trainyard(*words.split(), folder=folder)
    assert result.returncode == 0, result.stderr
    run = load_run("mine.toml").run
    order = build_orders(run, resolve(run))["train"]
    assert order is not None
    with np.load("order.npz", allow_pickle=False) as found:
        np.testing.assert_array_equal(found["sequences"], order.sequences(5, 20))


def test_train_and_show(folder: Path) -> None:
    (folder / "mine.toml").write_text(RUN_FILE)
    write_tokens(folder)
    short = ("train.length='4 steps'", "evaluate.batches=1")
    trained = start("train", "mine.toml", *short, folder=folder)
    assert trained.returncode == 0, trained.stderr
    assert b"step 4 of 4 | loss" in trained.stderr
    assert "both moments of every weight" in trainyard("show", "mine", folder=folder).stdout


@pytest.mark.parametrize(
    "words",
    ["generate nowhere", "evaluate nowhere", "export nowhere --output x", "report nowhere",
     "status nowhere", "train tiny", "train tiny data.blend.prefixes=['nowhere']",
     "train tiny tokenizer.path=nowhere", "plan nowhere", "show nowhere", "launch nowhere"],
)  # fmt: skip
def test_nothing_imports_torch_before_input_is_checked(folder: Path, words: str) -> None:
    code = (
        "import sys\n"
        "from trainyard.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'matplotlib', 'pyarrow'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *words.split()]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert (refused.returncode, refused.stdout) == (2, "[]\n"), refused.stderr


def test_names_and_paths_alike(folder: Path) -> None:
    for name in ("small", "runs/small"):
        assert trainyard("status", name, folder=folder).returncode == 0
        assert "runs/small/metrics.jsonl" in trainyard("report", name, folder=folder).stderr
        assert trainyard("plan", name, folder=folder).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainyard sta", ["status"]),
        ("trainyard status sm", ["small"]),
        ("trainyard report runs/", ["runs/small/"]),
        ("trainyard train gpt3-1", ["gpt3-1.3b", "gpt3-125m", "gpt3-13b", "gpt3-175b"]),
        ("trainyard train mine", ["mine.toml"]),
        ("trainyard train tiny train.len", ["train.length="]),
        ("trainyard plan tiny --cluster lu", ["lumi"]),
        ("trainyard show cl", ["cluster"]),
        ("trainyard show cluster lu", ["lumi"]),
        ("trainyard show tiny train.len", ["train.length="]),
        ("trainyard show order min", ["mine.toml"]),
        ("trainyard plan tiny --gpu rtx-4", ["rtx-4090"]),
        ("trainyard plan tiny --simu", ["--simulate"]),
    ],
)
def test_completion(folder: Path, words: str, expected: list[str]) -> None:
    (folder / "mine.toml").write_text("")
    assert complete(words, folder) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(tmp_path: Path, shell: str) -> None:
    printed = trainyard("completion", shell, folder=tmp_path)
    assert printed.returncode == 0
    assert f"_TRAINYARD_COMPLETE=complete_{shell}" in printed.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding(folder: Path, encoding: str) -> None:
    (folder / "run.toml").write_text(
        'name = "r"\nextends = "tiny"\ndescription = "na\u00efve \u2013 \u4e2d"\n', encoding="utf-8"
    )
    shown = start("show", "run.toml", folder=folder, PYTHONIOENCODING=encoding)
    assert (shown.returncode, shown.stderr) == (0, b"")
    kept = {"ascii": b"na?ve ? ?", "latin-1": b"na\xefve ? ?"}
    assert kept.get(encoding, "na\u00efve \u2013 \u4e2d".encode()) in shown.stdout


def test_bars_in_an_encoding_without_them(folder: Path) -> None:
    shown = start("plan", "tiny", "--gpu", "h100", folder=folder, PYTHONIOENCODING="latin-1")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b" ##" in shown.stdout and b"?" not in shown.stdout


def test_ctrl_c_during_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.start()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_verb_of_verbs_alone_lists_them(folder: Path) -> None:
    done = trainyard("check", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: trainyard check") and "layout" in done.stdout


def test_a_closed_pipe_leaves_no_traceback(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*START, "show", "--fields"], stdout=writer, stderr=subprocess.PIPE, cwd=folder
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_show_by_family(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes" / "lumi"
    recipes.mkdir(parents=True)
    for name in ("13b", "125m"):
        (recipes / f"{name}.toml").write_text("")
    shown = trainyard("show", "lumi", folder=tmp_path, COLUMNS="80").stdout
    assert shown == (
        "recipes  recipes/lumi/125m.toml, recipes/lumi/13b.toml\n"
        "cluster  trainyard show cluster lumi\n"
    )
    table = trainyard("show", folder=tmp_path, COLUMNS="80").stdout
    assert "\nmsamp     msamp-345m, msamp-6.7b, msamp-13b\n" in table
    assert max(map(len, table.splitlines())) <= 80


def test_fields_of_a_section(tmp_path: Path) -> None:
    shown = trainyard("show", "--fields", "train", folder=tmp_path).stdout
    assert "train.length" in shown and "model." not in shown.partition("\n")[2].split(" = ")[0]
    assert "\nextends\n" in trainyard("show", "--fields", folder=tmp_path).stdout


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "show gpt3-125m",
        "show --fields schedule",
        "plan gpt3-125m --gpu h100-80g",
        "plan gpt3-1.3b --gpu h100-80g --gpus 64 --search",
        "plan gpt3-1.3b --gpu rtx-4090 --gpus 8 --deadline 1week",
    ],
)
def test_lines_fit_the_terminal_and_no_word_is_broken(
    tmp_path: Path, command: str, columns: int
) -> None:
    code, printed = on_terminal(*command.split(), folder=tmp_path, COLUMNS=str(columns))
    printed = re.sub("\x1b\\[[0-9;]*m", "", printed)
    assert code == 0, printed
    too_long = [line for line in printed.splitlines() if len(line) > columns]
    assert not [line for line in too_long if not line.startswith("arguments for")]
    piped = trainyard(*command.split(), folder=tmp_path, COLUMNS="200").stdout
    assert "..." not in printed.replace("[ARGS]...", "")
    assert [word for word in printed.split() if "█" not in word] == [
        word for word in piped.split() if "█" not in word
    ]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    """A file opened next would get the number of a closed stream, and what is written there."""
    command = f"exec {sys.executable} -m trainyard show tiny {closed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
