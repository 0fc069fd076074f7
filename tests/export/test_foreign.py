"""What other software wrote is recognized, or named with the way to convert it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trainyard.api.running import convert_start
from trainyard.cli.main import app
from trainyard.config.load import load_run
from trainyard.data.indexed import IndexedDataset
from trainyard.errors import CheckpointError, UserError
from trainyard.export.foreign import recognize

DOCS = Path(__file__).parents[2] / "docs" / "importing.md"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n"
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_positions": 8}
GPT2 |= {"n_embd": 8, "n_layer": 1, "n_head": 1}
FOREIGN = {
    "ckpt.pt": "nanoGPT.*exact GELU",
    "lit_model.pth": "LitGPT.*litgpt convert_from_litgpt",
    "__0_0.distcp": "torchtitan.*convert_to_hf.py",
    "checkpoint_metadata.json": "nanotron.*convert_nanotron_to_hf.py",
    "model.nemo": "NeMo 1.*checkpoint_converters",
    "context/model.yaml": "NeMo 2.*export_ckpt",
    "model.gguf": "GGUF.*gguf_file=NAME",
    "consolidated.00.pth": "Meta or Mistral.*files for transformers",
    "iter_0000007/metadata.json": "torch_dist.*--ckpt-format torch",
}


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    return f"{result.exception.problem}; {result.exception.hint}"


@pytest.mark.parametrize("file", FOREIGN)
@pytest.mark.parametrize("beside", ["", "config.json"])
def test_formats_of_others_are_named(tmp_path: Path, file: str, beside: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    folder = (tmp_path / file).parent if file.startswith("iter") else tmp_path
    given = [folder] if file.startswith("context") else [folder, tmp_path / file]
    if beside:
        (folder / beside).write_text(json.dumps(GPT2))
        given = [folder]
    for path in given:
        said = refusal("import", str(path), "--output", str(tmp_path / "mine"))
        assert re.search(FOREIGN[file], said), said


def test_a_run_does_not_start_from_formats_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lit_model.pth").touch()
    run = load_run("tiny", [f"train.start_from={tmp_path}"]).run
    with pytest.raises(CheckpointError, match="a checkpoint of LitGPT"):
        convert_start(run, tmp_path / "mine")
    convert_start(load_run("tiny", []).run, tmp_path / "mine")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("train.sh", "megatron-args"),
        ("jobs/train.slurm bf16", "megatron-args"),
        ("torchrun pretrain_gpt.py \\\n --num-layers 2", "megatron-args"),
        ("latest_checkpointed_iteration.txt", "megatron"),
        ("mp_rank_00", "megatron"),
        ("config.json", "huggingface"),
    ],
)
def test_the_source_format_is_recognized(tmp_path: Path, source: str, kind: str) -> None:
    if kind != "megatron-args":
        (tmp_path / source).touch()
        source = str(tmp_path)
    assert recognize(source) == kind


@pytest.mark.parametrize("name", ["openai-community/gpt2", "gpt2"])
def test_a_name_of_the_hub_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = name if "/" in name else "OWNER/NAME"
    assert f"no folder {name}; for a model of the Hub: hf download {shown}" in refusal(
        "import", name, "--output", "mine"
    )


@pytest.mark.parametrize(
    "file", ["model.safetensors", "mp_rank_00_model_states.pt", "a.idx", "a.txt"]
)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(POINTER)
    if file == "a.txt":
        said = refusal("prepare", str(tmp_path / file), "-o", str(tmp_path / "mine"))
    elif file == "a.idx":
        (tmp_path / "a.bin").write_bytes(bytes(8))
        said = refusal("show", str(tmp_path / "a"))
    else:
        if file == "model.safetensors":
            (tmp_path / "config.json").write_text(json.dumps(GPT2))
        said = refusal("import", str(tmp_path), "--output", str(tmp_path / "mine"))
    assert f"{tmp_path / file} is a pointer of Git LFS, not the file itself; git lfs pull" in said


@pytest.mark.parametrize("words", [["show", "train.bin"], ["prepare", "train.bin", "-o", "mine"]])
@pytest.mark.parametrize("head", [0, 1024])
def test_raw_token_ids_are_named_and_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], head: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = np.array([50256, 5, 6, 50256, 7, 50256] if head else [5, 6, 50256, 7, 50256], np.uint16)
    Path("train.bin").write_bytes(bytes(head) + ids.tobytes())
    assert "docs/importing.md converts raw token ids, as of nanoGPT and llm.c" in refusal(*words)
    code = re.search(r"```python\n(import numpy.*?)```", DOCS.read_text(), re.DOTALL)
    assert code
    script = code[1]
    if head:
        script = script.replace("np.uint16)", "np.uint16, offset=1024)[1:]")
    subprocess.run([sys.executable, "-c", script], check=True)
    made = IndexedDataset("mine_text_document")
    assert [list(made.tokens(i)) for i in range(len(made))] == [[5, 6, 50256], [7, 50256]]
