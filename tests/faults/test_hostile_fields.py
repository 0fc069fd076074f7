"""Every text field and every value of a file that somebody else may have made."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command import on_terminal, trainyard
from tests.faults.test_hostile_files import STEP, good

__all__ = ["good"]

HOSTILE = "\x1b]0;title\x07\x1b[31mred\u202e\u2066\u2028\x9b2J\r\n"
OBEYED = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
RUN = "runs/demo"
EVENTS = [
    {"kind": "start", "step": 0, "resumed": False, "device": "cpu", "attention": "flash"},
    {"kind": "sample", "step": 4, "prompt": "The", "text": "trains"},
    {"kind": "save failed", "step": 4, "problem": "disk full"},
    {"kind": "restart", "step": 4, "reason": "killed"},
    {"kind": "end", "step": 4, "reason": "done"},
]
COMMANDS = [
    *(f"show {RUN}", f"status {RUN}", "status", f"status {RUN} --json", f"status {RUN} --follow"),
    *(f"report {RUN}", f"check checkpoint {RUN}", f"generate {RUN} --tokens 2", "show corpus.toml"),
    *("show tokens_text_document --tokenizer tok", "check data tokens_text_document", "show tok"),
    *("import hf --output runs/new", "show cluster mine.toml", "plan run.toml --cluster mine.toml"),
    *(f"show {HOSTILE}", f"plan tiny {HOSTILE}=1", f"plan tiny name={HOSTILE}", "show run.toml"),
    *("launch run.toml --cluster mine.toml --dry-run", f"export {RUN} --output hf2", HOSTILE),
]


def poison(value: Any) -> Any:
    """Appends what a terminal would obey to every text."""
    if isinstance(value, dict):
        return {key: poison(each) for key, each in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [poison(each) for each in value]
    return value + HOSTILE if isinstance(value, str) else value


def seal(path: Path, manifest: dict[str, Any]) -> None:
    del manifest["sha256"]
    body = json.dumps(manifest).encode()[1:]
    path.write_bytes(b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)


@pytest.fixture
def folder(good: Path) -> Iterator[Path]:
    work = good.with_name("work")
    shutil.copytree(good, work)
    lines = (work / RUN / "metrics.jsonl").read_text().splitlines()
    lines += [json.dumps({"time": 2.0, **event}) for event in EVENTS]
    (work / RUN / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    yield work
    shutil.rmtree(work)


def test_what_a_terminal_obeys_is_escaped(folder: Path) -> None:
    run = folder / RUN
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{**poison(line), "kind": line["kind"]} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = {"reason": HOSTILE, "exit_code": 0, "step": 4}
    (run / "outcome.json").write_text(json.dumps(outcome))
    for name in ("plan.json", "versions.json", "evaluation.json"):
        facts = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(poison(facts)))
    for place in (run / "run.toml", folder / "run.toml"):
        text = re.sub(r"(?m)^description = .*$", "", place.read_text())
        place.write_text(f"description = {json.dumps(HOSTILE)}\n{text}")
    manifest = json.loads((folder / STEP / "manifest.json").read_text())
    manifest["run"]["description"] = HOSTILE
    for key in ("versions", "training", "plan"):
        manifest[key] = poison(manifest[key])
    seal(folder / STEP / "manifest.json", manifest)
    sidecar = json.loads((folder / "tokens_text_document.json").read_text())
    sidecar["trainyard"] = HOSTILE
    (folder / "tokens_text_document.json").write_text(json.dumps(sidecar))
    config = json.loads((folder / "hf/config.json").read_text())
    (folder / "hf/config.json").write_text(json.dumps({**config, HOSTILE: HOSTILE}))
    (folder / "mine.toml").write_text(f"extends = 'lumi'\ndescription = {json.dumps(HOSTILE)}\n")
    shown = []
    for command in COMMANDS:
        done = trainyard(*command.split(" "), folder=folder)
        printed = done.stdout + done.stderr
        assert done.returncode in (0, 2), (command, printed)
        assert "Traceback" not in printed, (command, printed)
        assert not OBEYED.search(printed), (command, printed)
        shown += [command] if r"\u202e" in printed else []
    assert not OBEYED.search((run / "report.html").read_text())
    assert {f"show {RUN}", f"check checkpoint {RUN}", f"status {RUN} --follow"} <= {*shown}


def test_own_styles_reach_a_terminal(folder: Path) -> None:
    text = re.sub(r"(?m)^description = .*$", "", (folder / "run.toml").read_text())
    (folder / "run.toml").write_text(f"description = {json.dumps(HOSTILE)}\n{text}")
    code, printed = on_terminal("show", "run.toml", folder=folder)
    assert code == 0
    assert "\x1b[1mdemo" in printed, printed
    assert r"\x1b[31mred\u202e" in printed, printed
    assert "\x1b[31m" not in printed


def test_generate_asks_for_prompts_on_a_terminal(folder: Path) -> None:
    words = ("generate", RUN, "--tokens")
    typed = [("> ", "the tra\n"), ("> ", "noon\n"), ("> ", "at " * 40 + "\n"), ("> ", "\x04")]
    code, printed = on_terminal(*words, "3", folder=folder, typed=typed)
    assert code == 0, printed
    answers = printed.split("> ")[1:]
    assert answers[0].splitlines()[0] == "the tra"
    assert answers[0].splitlines()[1].startswith("the tra")
    assert answers[1].splitlines()[1].startswith("noon")
    assert "error: the prompt has" in answers[2]


def test_ctrl_c_ends_the_answer_then_the_questions(folder: Path) -> None:
    # The likeliest tokens of this model never end a document.
    words = ("generate", RUN, "--tokens", "1000000", "--temperature", "0")
    typed = [("> ", "noon\n"), ("noon\r\nnoon", "\x03"), ("> ", "\x03")]
    code, printed = on_terminal(*words, folder=folder, typed=typed)
    assert (code, printed.count("> ")) == (0, 2), printed
