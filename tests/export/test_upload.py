"""Tests of the model card and of uploads, against a local Hugging Face Hub."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.export.hub_server import ATTRIBUTES, TOKEN, Hub, Repository
from tests.waiting import WATCHDOG_SECONDS

from trainyard.architecture import parameter_count
from trainyard.checkpoint.format import read_manifest
from trainyard.cli.export import export
from trainyard.errors import CheckpointError, ConfigError, MachineError
from trainyard.report.model_card import render_card

# huggingface_hub passes a file to httpx2 in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NAME = "me/small"
OURS = "Upload by trainyard export"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import close_session, constants

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        close_session()
        try:
            yield server
        finally:
            close_session()
            server.shutdown()
            thread.join()


def run_export(checkpoint: Path, folder: Path, upload: str = f"hf:{NAME}", **options) -> None:
    export(checkpoint, folder, verify=False, upload=upload, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_card_has_the_facts_of_the_run(make_checkpoint, tmp_path):
    checkpoint, model = make_checkpoint("data.blend.prefixes=['/secret/place/wiki_text','b|c']")
    line = {"kind": "evaluate", "time": 1.0, "step": 1, "loss": 2.5, "perplexity": 12.1825}
    line |= {"bits_per_byte": 1.25, "split": "valid"}
    early, late = line | {"step": 0, "loss": 9.0}, line | {"step": 2, "loss": 2.0}
    text = "".join(json.dumps(each) + "\n" for each in (early, line, late))
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    scores = {"n_items": 500, "accuracy": 0.5, "accuracy_stderr": 0.0224}
    tasks = {"piqa/va|lid": scores | {"step": 1}, "arc/older": scores | {"step": 0}}
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps({"tasks": tasks}))
    manifest = read_manifest(checkpoint)
    card = render_card(checkpoint, manifest, "GPT2LMHeadModel", "float32", "mit", "me/x")
    size = read_manifest(checkpoint).build_run().model.vocabulary_size
    n_padding = (model.embedding.weight.shape[0] - size) * model.embedding.weight.shape[1]
    n_parameters = sum(each.numel() for each in model.parameters()) - n_padding
    assert card.startswith("---\nlicense: mit\nlibrary_name: transformers\n")
    for fact in (
        "2.5000 nats per token, perplexity 12.18, 1.2500 bits per byte",
        f"A `GPT2LMHeadModel` of {n_parameters:,} parameters",
        "`wiki_text`, `b_c`",
        "| started from | random weights |\n| piqa/va_lid accuracy | 50.00% ± 2.24%, 500 items |\n",
        'from_pretrained("me/x")',
        "learning_rate = ",
    ):
        assert fact in card
    assert "secret" not in card
    assert "older" not in card


def test_the_card_says_what_a_token_uses(make_checkpoint):
    experts = ("model.n_experts=4", "model.mlp=swiglu", "model.bias=false")
    checkpoint, _ = make_checkpoint(*experts)
    manifest = read_manifest(checkpoint)
    model = manifest.build_run().model
    card = render_card(checkpoint, manifest, "MixtralForCausalLM", "float32", "mit", "me/x")
    n_parameters = parameter_count(model, model.vocabulary_size)
    n_idle = model.n_layers * 2 * 3 * model.d_model * model.d_ff
    assert f"of {n_parameters:,} parameters ({n_parameters - n_idle:,} active), pre" in card
    assert f"| parts | SwiGLU, 4 experts of {model.d_ff}, 2 active, no biases |" in card


def test_an_export_has_a_card_with_its_licence_to_fill_in(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint()
    run_export(checkpoint, tmp_path / "out", upload="")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# license: TO FILL IN\n" in card
    assert "**To fill in**" in card
    assert "not measured at this step" in card


def test_what_arrives_equals_what_was_exported(make_checkpoint, tmp_path, hub, capsys):
    checkpoint, _ = make_checkpoint()
    run_export(checkpoint, tmp_path / "out")
    repository = hub.repositories[NAME]
    assert repository.files == ATTRIBUTES | contents(tmp_path / "out")
    assert hub.blobs  # the weights went through LFS
    assert repository.private
    assert repository.titles == ["initial", OURS]
    assert f"uploaded to {hub.address}/{NAME} (private)" in capsys.readouterr().out
    paths = hub.asked_paths()
    assert paths.index("GET /api/whoami-v2") < paths.index("POST /api/repos/create")


def test_a_second_upload_replaces_the_first_in_one_commit(make_checkpoint, tmp_path, hub):
    checkpoint, _ = make_checkpoint()
    files = ATTRIBUTES | {"model-00001-of-00002.safetensors": b"old"}
    hub.repositories[NAME] = Repository(files, private=False, title=OURS)
    run_export(checkpoint, tmp_path / "out", public=True, licence="mit")
    repository = hub.repositories[NAME]
    assert repository.files == ATTRIBUTES | contents(tmp_path / "out")
    assert repository.titles == [OURS, OURS]
    assert not repository.private


def test_public_is_public(make_checkpoint, tmp_path, hub):
    run_export(make_checkpoint()[0], tmp_path / "out", "hf:team/small", public=True)
    assert not hub.repositories["team/small"].private


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"upload": "me/small"}, "--upload 'me/small' is not hf:OWNER/NAME"),
        ({"upload": "hf:small"}, "is not hf:OWNER/NAME"),
        ({"upload": "", "public": True}, "--public without --upload"),
        ({"upload": "", "licence": "MIT: yes"}, "--license 'MIT: yes'"),
    ],
)
def test_wrong_options_are_refused_first(tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        run_export(tmp_path / "gone", tmp_path / "out", **options)


def held(private: bool, title: str = "initial") -> Callable[[Hub, pytest.MonkeyPatch], None]:
    """Makes a Hub that has the repository already."""
    files = ATTRIBUTES | ({"weights.bin": b"precious"} if title != "initial" else {})

    def change(hub: Hub, _: pytest.MonkeyPatch) -> None:
        hub.repositories[NAME] = Repository(files, private=private, title=title)

    return change


def no_token(_: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")
    patch.setattr("huggingface_hub.hf_api.get_token", lambda: None)


def no_right(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    held(True)(hub, patch)
    hub.faults[f"/api/models/{NAME}/auth-check/write"] = ["403"]


REFUSED: dict[str, tuple[Callable[[Hub, pytest.MonkeyPatch], object], str, str, dict[str, Any]]] = {
    "no token": (no_token, "no token", "set HF_TOKEN", {}),
    "a wrong token": (
        lambda _, patch: patch.setenv("HF_TOKEN", "hf_wrong"), "401|Invalid", "not valid", {}
    ),
    "a token that only reads": (
        lambda hub, _: setattr(hub, "role", "read"), "can only read", "may not write", {}
    ),
    "a repository of others": (
        lambda hub, _: None, "writes to me, team", "yours", {"upload": "hf:other/small"}
    ),
    "no right to write": (no_right, "403", "may not write", {}),
    "other content": (held(True, "Add weights"), "holds 2 files, not last", "another name", {}),
    "private": (held(True), "is private", "settings", {"public": True}),
    "public": (held(False), "is public", "--public", {"public": False}),
    "a server that is down": (
        lambda hub, _: hub.faults.update({"/api/whoami-v2": ["drop"]}),
        "cannot upload to me/small", "HTTPS_PROXY", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_the_work(make_checkpoint, tmp_path, hub, monkeypatch, name):
    change, problem, hint, options = REFUSED[name]
    change(hub, monkeypatch)
    before = {name: dict(each.files) for name, each in hub.repositories.items()}
    with pytest.raises((ConfigError, MachineError), match=problem) as refusal:
        run_export(make_checkpoint()[0], tmp_path / "out", **options)
    assert hint in refusal.value.hint
    assert refusal.value.exit_code == 2
    assert "\n" not in refusal.value.problem
    assert not (tmp_path / "out").exists()
    assert {name: each.files for name, each in hub.repositories.items()} == before
    assert not [path for path in hub.asked_paths() if path.startswith(("POST", "PUT"))]


@pytest.mark.parametrize("fault", ["drop", "403", "500"])
def test_after_a_failed_upload_the_same_command_uploads(make_checkpoint, tmp_path, hub, fault):
    checkpoint, _ = make_checkpoint()
    hub.faults[f"/api/models/{NAME}/commit/main"] = [fault]
    problem = r"nothing was published; the same command uploads .*out again"
    with pytest.raises(MachineError, match=problem) as failure:
        run_export(checkpoint, tmp_path / "out")
    assert ("all or nothing" in str(failure.value)) == (fault == "drop")  # it may have arrived
    assert hub.repositories[NAME].files == ATTRIBUTES
    readme = tmp_path / "out" / "README.md"
    readme.write_text(readme.read_text().replace("# license: TO FILL IN", "license: mit"))
    run_export(checkpoint, tmp_path / "out")
    assert hub.repositories[NAME].files == ATTRIBUTES | contents(tmp_path / "out")
    assert hub.repositories[NAME].files["README.md"].startswith(b"---\nlicense: mit\n")


def test_a_folder_of_another_export_is_not_uploaded(make_checkpoint, tmp_path, hub):
    checkpoint, _ = make_checkpoint()
    run_export(checkpoint, tmp_path / "out", upload="")
    with pytest.raises(CheckpointError, match="already exists"):
        run_export(checkpoint, tmp_path / "out", dtype="bfloat16")
    assert not hub.repositories


def test_a_commit_of_someone_else_meanwhile_is_kept(make_checkpoint, tmp_path, hub):
    repository = hub.repositories[NAME] = Repository(dict(ATTRIBUTES), private=True)
    hub.before_commit = lambda: repository.titles.append("Mine")
    with pytest.raises(MachineError, match="nothing was published") as refusal:
        run_export(make_checkpoint()[0], tmp_path / "out")
    assert "someone else" in refusal.value.hint
    assert repository.files == ATTRIBUTES


def start(hub: Hub, checkpoint: Path, folder: Path, **environment: str) -> subprocess.Popen[str]:
    words = ["export", str(checkpoint), "--output", str(folder), "--upload", f"hf:{NAME}"]
    proxies = {f"{kind}_proxy": "" for kind in ("http", "https", "all", "no")}
    proxies |= {name.upper(): "" for name in proxies}
    settings = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "trainyard.cli", *words, "--no-verify"],
        env={**os.environ, **proxies, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.exhaustive
def test_the_command_goes_through_a_proxy(make_checkpoint, tmp_path, hub):
    checkpoint, _ = make_checkpoint()
    proxy = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.address}
    process = start(hub, checkpoint, tmp_path / "out", **proxy, http_proxy=hub.address)
    output, errors = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 0, errors
    assert "uploaded to http://hub.invalid/me/small (private)" in output
    assert "uploading 4 files" in errors
    assert hub.repositories[NAME].files == ATTRIBUTES | contents(tmp_path / "out")


@pytest.mark.exhaustive
def test_ctrl_c_leaves_nothing_half_published(make_checkpoint, tmp_path, hub):
    checkpoint, _ = make_checkpoint()
    hub.faults[f"/api/models/{NAME}/commit/main"] = ["stall"]
    process = start(hub, checkpoint, tmp_path / "out")
    assert hub.during_upload.wait(WATCHDOG_SECONDS)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 130, errors
    assert "nothing was published" in errors
    assert "Traceback" not in errors
    assert hub.repositories[NAME].files == ATTRIBUTES


@pytest.fixture(autouse=True)
def quiet_hub() -> None:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
