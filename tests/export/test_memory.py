"""Models pass through in less memory than they have weights: the kernel refuses any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import Ranks, save_checkpoint
from trainyard.config.load import load_run
from trainyard.config.run import Model, Run
from trainyard.export.gpt2 import config_of, their_name, their_shape
from trainyard.export.stream import outline, write_tensors
from trainyard.parallel.placement import whole
from trainyard.plan.size import padded_vocabulary_size, parameter_shapes

pytestmark = pytest.mark.exhaustive

# RLIMIT_DATA counts all private memory that can be written, so nothing hides in mapped files.
LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from trainyard.export.from_huggingface import import_huggingface
from trainyard.export.from_megatron import import_megatron
from trainyard.export.to_huggingface import export_huggingface

def used(field):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024

folder, allowance, shard_limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
limit = used("VmData") + allowance
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before = used("VmHWM")
steps = {
    "import huggingface": lambda: import_huggingface(folder / "theirs", folder / "imported"),
    "export": lambda: export_huggingface(
        folder / "imported/checkpoints/step-00000000", folder / "back"
    ),
    "export of two ranks": lambda: export_huggingface(
        folder / "chunked/step-00000001", folder / "joined", torch.bfloat16, shard_limit
    ),
    "import megatron": lambda: import_megatron(folder / "megatron", folder / "from-megatron"),
}
peaks = {}
for name, step in steps.items():
    step()
    peaks[name] = used("VmHWM") - before
try:
    torch.empty(allowance, dtype=torch.uint8)
except RuntimeError:
    print(json.dumps(peaks))
"""


def build_run(n_layers: int, d_model: int) -> Run:
    return load_run(
        "tiny",
        [
            f"model.n_layers={n_layers}",
            f"model.d_model={d_model}",
            f"model.d_ff={4 * d_model}",
            "model.n_heads=4",
            "model.vocabulary_size=2000",
            "model.sequence_length=64",
        ],
    ).run


def values_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """Makes values that can be made again."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.02


def write_huggingface(folder: Path, model: Model) -> None:
    folder.mkdir()
    config = config_of(model, None, "float32").model_dump_json()
    (folder / "config.json").write_text(config)
    shapes = {
        their_name(name): their_shape(name, shape, model)
        for name, shape in parameter_shapes(model, 0).items()
    }
    outlines = outline(shapes, torch.float32)
    write_tensors(
        folder / "model.safetensors", outlines, lambda name: values_of(name, shapes[name])
    )


def write_two_ranks(folder: Path, run: Run) -> None:
    """Saves the model as two ranks that have a half of each tensor."""
    barrier = threading.Barrier(2)
    shapes = parameter_shapes(run.model, padded_vocabulary_size(run.model))
    facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json"))

    def save(rank: int) -> None:
        places = {f"model.{name}": whole(shape).cut(0, rank, 2) for name, shape in shapes.items()}
        tensors = {name: torch.full(place.local_shape, 0.5) for name, place in places.items()}
        save_checkpoint(folder, facts, tensors, places, Ranks(rank, 2, barrier.wait))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_megatron(folder: Path, model: Model) -> None:
    path = folder / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    D, F = model.d_model, model.d_ff
    body = OrderedDict({"final_layernorm.weight": torch.ones(D)})
    body["final_layernorm.bias"] = torch.zeros(D)
    block = {
        "input_layernorm": (D,),
        "self_attention.query_key_value": (3 * D, D),
        "self_attention.dense": (D, D),
        "post_attention_layernorm": (D,),
        "mlp.dense_h_to_4h": (F, D),
        "mlp.dense_4h_to_h": (D, F),
    }
    for number in range(model.n_layers):
        for part, shape in block.items():
            body[f"layers.{number}.{part}.weight"] = torch.full(shape, 0.5)
            body[f"layers.{number}.{part}.bias"] = torch.zeros(shape[0])
    embedding = {
        "word_embeddings": {"weight": torch.ones(2048, D)},
        "position_embeddings": {"weight": torch.ones(model.sequence_length, D)},
    }
    args = {
        "num_layers": model.n_layers,
        "hidden_size": D,
        "num_attention_heads": model.n_heads,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocabulary_size,
    }
    language_model = {"embedding": embedding, "encoder": body}
    state = {"args": args, "checkpoint_version": 0, "model": {"language_model": language_model}}
    torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the /proc of Linux")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    d_model = 512
    run = build_run(8, d_model)  # 106 MB
    write_huggingface(tmp_path / "theirs", run.model)
    write_two_ranks(tmp_path / "chunked", run)
    write_megatron(tmp_path / "megatron", run.model)
    model_bytes = (tmp_path / "theirs" / "model.safetensors").stat().st_size
    largest_bytes = 4 * d_model * run.model.d_ff
    # The C library keeps up to 8 MiB for each thread, and what is freed in parts below 32 MiB.
    kept_bytes = 9 * 2**20 * (os.cpu_count() or 1) + 4 * min(largest_bytes, 32 * 2**20)
    allowance = 3 * largest_bytes + kept_bytes + 24 * 2**20
    assert allowance < model_bytes
    shard_limit = model_bytes // 4
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(allowance), str(shard_limit)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert max(peaks.values()) < allowance
    theirs = (tmp_path / "theirs" / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == theirs
    assert len(list((tmp_path / "joined").glob("model-*-of-*.safetensors"))) > 1
