"""Models pass through in less memory than they have weights: the kernel refuses any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import Agreement

from trainyard.architecture import padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import SavingRank, save_checkpoint
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.export.huggingface import import_huggingface
from trainyard.parallel.placement import whole

from .megatron_folder import Theirs, random_gpt2, save_megatron
from .models import random_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive

# RLIMIT_DATA counts all private memory that can be written, so nothing hides in mapped files.
LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from trainyard.export.huggingface import import_huggingface
from trainyard.export.from_megatron import import_megatron
from trainyard.export.huggingface import export_huggingface

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
if not (folder / "megatron").exists():
    del steps["import megatron"]
for name, step in steps.items():
    step()
    peaks[name] = used("VmHWM") - before
try:
    torch.empty(allowance, dtype=torch.uint8)
except RuntimeError:
    print(json.dumps(peaks))
"""


def write_two_ranks(folder: Path, run: Run) -> None:
    """Saves the model as two ranks that have a half of each tensor."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    agreement = Agreement(2)
    shapes = parameter_shapes(run.model, padded_vocabulary_size(run.model))
    facts = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json"))

    def save(rank: int) -> None:
        places = {f"model.{name}": whole(shape).cut(0, rank, 2) for name, shape in shapes.items()}
        tensors = {name: torch.full(place.local_shape, 0.5) for name, place in places.items()}
        ranks = SavingRank(rank, 2, partial(agreement.agree, rank))
        save_checkpoint(folder, facts, tensors, places, ranks)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the /proc of Linux")
@pytest.mark.parametrize("has_experts", [False, True])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, has_experts):
    d_model = 256 if has_experts else 512
    sizes = {"vocab_size": 2000, "hidden_size": d_model}
    if has_experts:
        sizes |= {"num_local_experts": 8, "intermediate_size": d_model, "head_dim": 32}
        model = random_model("Mixtral", **sizes, num_hidden_layers=15, num_key_value_heads=4)
        largest_bytes = 4 * 8 * 2 * d_model * d_model
    else:
        model = random_gpt2(**sizes, n_positions=64, num_hidden_layers=8)  # 106 MB
        save_megatron(tmp_path / "megatron", model, Theirs(rows=2048))
        largest_bytes = 4 * d_model * 4 * d_model
    model.save_pretrained(tmp_path / "theirs")
    import_huggingface(tmp_path / "theirs", tmp_path / "mine")
    write_two_ranks(tmp_path / "chunked", load_run(str(tmp_path / "mine" / "run.toml")).run)
    model_bytes = (tmp_path / "theirs" / "model.safetensors").stat().st_size
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
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert theirs.keys() == back.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.items())
    assert len(list((tmp_path / "joined").glob("model-*-of-*.safetensors"))) > 1
