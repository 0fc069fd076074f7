"""Secrets that are near at hand while training: none of them is ever written down.

They are in the environment, in the path of the run file (which the record of the command line
repeats) and in URLs. Afterwards every byte that was written is searched, and what was printed.
"""

from __future__ import annotations

import base64
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.command import trainyard
from tests.faults.small_run import small_overrides, write_tokens

ENVIRONMENT = {
    "WANDB_API_KEY": "wandb-seeded-5f1c09aa",
    "HF_TOKEN": "hf_seededQmZpUxV",
    "AWS_SECRET_ACCESS_KEY": "aws/seeded+kUyTr45",
    "MY_PASSWORD": "seeded hunter 2",
}
LOGIN = "seeded-letmein"
SECRETS = [*ENVIRONMENT.values(), LOGIN]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run on a small corpus, in a folder that has a token as its name."""
    overrides = small_overrides(write_tokens(tmp_path), 4)
    path = tmp_path / ENVIRONMENT["HF_TOKEN"] / "run.toml"
    path.parent.mkdir()
    settings = ['extends="tiny"', 'name="seeded"', *overrides]
    text = "\n".join(settings).replace("tensorboard=false", "tensorboard=true")
    path.write_text(text, encoding="utf-8")
    return path


def train(run_file: Path | str, *arguments: str, folder: Path) -> CompletedProcess[str]:
    words = ("train", str(run_file), *arguments)
    return trainyard(*words, folder=folder, **ENVIRONMENT, OMP_NUM_THREADS="1")


def forms(secret: str) -> list[bytes]:
    """The ways in which a secret is commonly written."""
    raw = secret.encode()
    return [raw, secret.replace("/", "%2F").replace("+", "%2B").encode(), base64.b64encode(raw)]


def written_secrets(folder: Path) -> list[str]:
    """Names every file below a folder that holds a secret, and which."""
    return [
        f"{path.relative_to(folder)}: {secret}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for secret in SECRETS
        if any(form in path.read_bytes() for form in forms(secret))
    ]


def printed_secrets(done: CompletedProcess[str]) -> list[str]:
    return [secret for secret in SECRETS if secret in done.stdout + done.stderr]


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_training_writes_no_secret(run_file: Path, tmp_path: Path, n_ranks: int) -> None:
    (tmp_path / "work").mkdir()
    done = train(run_file, "--ranks", str(n_ranks), folder=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    run_folder = tmp_path / "work" / "runs" / "seeded"
    kinds = {path.name.partition(".")[0] for path in run_folder.rglob("*") if path.is_file()}
    assert {"run", "plan", "versions", "metrics", "manifest", "events"} <= kinds
    versions = (run_folder / "versions.json").read_text(encoding="utf-8")
    assert "***/run.toml" in versions, "the command is recorded, without the token"
    assert written_secrets(tmp_path / "work") == []
    assert printed_secrets(done) == []


@pytest.mark.parametrize(
    "field, value",
    [
        ("description", f"made from https://me:{LOGIN}@host/page"),
        ("data.cache_folder", f"s3://{LOGIN}@bucket/cache"),
        ("tokenizer.path", f"https://host/tokenizer?sig={LOGIN}"),
        ("log.wandb_project", f"https://me:{LOGIN}@wandb.example/project"),
        ("data.blend.prefixes", [f"https://me:{LOGIN}@host/tokens"]),
        ("evaluate.sample_prompts", ["a", f"see ftp://me:{LOGIN}@host"]),
    ],
)
@pytest.mark.parametrize("place", ["run file", "command line"])
def test_a_run_with_a_login_is_refused_without_repeating_it(
    run_file: Path, tmp_path: Path, place: str, field: str, value: str | list[str]
) -> None:
    from trainyard.config.load import load_run
    from trainyard.errors import ConfigError

    setting = f"{field}={value!r}"
    overrides = [setting] if place == "command line" else []
    if place == "run file":
        text = run_file.read_text(encoding="utf-8")
        kept = [line for line in text.splitlines() if field not in line]
        run_file.write_text("\n".join([*kept, setting]), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run(str(run_file), overrides)
    assert f"{field} holds a URL with a login or a key" in caught.value.problem
    assert LOGIN not in str(caught.value)


def test_errors_do_not_repeat_secrets(run_file: Path, tmp_path: Path) -> None:
    """Texts that are not even a run: what they repeat is hidden where it is printed."""
    for arguments in (
        [f"https://me:{LOGIN}@host/run.toml"],
        [str(run_file), f"https://me:{LOGIN}@host/x"],
        [str(run_file), f"data.blend.prefixes=['/data/{ENVIRONMENT['MY_PASSWORD']}/x']"],
        [str(run_file), f"nomen={ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}"],
        [str(run_file), f"train.length={ENVIRONMENT['WANDB_API_KEY']}"],
    ):
        done = train(arguments[0], *arguments[1:], folder=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stderr.startswith("error: ")
        assert printed_secrets(done) == [], arguments
    assert written_secrets(tmp_path / "runs") == []


@pytest.mark.parametrize("field", ["description", "log.wandb_project", "evaluate.sample_prompts"])
def test_a_run_with_a_secret_of_the_environment_is_refused(
    run_file: Path, tmp_path: Path, field: str
) -> None:
    secret = f"for {ENVIRONMENT['MY_PASSWORD']}"
    setting = f"{field}={[secret] if 'prompts' in field else secret!r}"
    done = train(run_file, setting, folder=tmp_path)
    assert done.returncode == 2
    assert f"error: {field} holds a password or key of the environment" in done.stderr
    assert printed_secrets(done) == []
    assert written_secrets(tmp_path / "runs") == []
