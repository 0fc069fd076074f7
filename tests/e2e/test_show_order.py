"""`trainyard show order` on Megatron-LM's golden cases: the sequences a run file will see."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.cli.show_data import show_order

CASES = ["synth_949_50_1", "synth_969_30_1", "synth_949_50_1_seq128", "synth_no_weights"]
CASES += ["synth_single", "synth_per_split"]


def blend(folder: Path, names: list[str], weights: list[float] | None) -> str:
    prefixes = [str(folder / "data" / name) for name in names]
    text = f"prefixes = {json.dumps(prefixes)}\n"
    return text + (f"weights = {weights}\n" if weights else "")


def run_file(golden: Path, case: dict[str, Any], evaluated: int) -> str:
    """A run whose length and evaluations ask for sequences as the case does."""
    lines = [
        'name = "golden"\n[model]\nd_model = 8\nn_heads = 1\nn_layers = 1',
        f"sequence_length = {case['seq']}\n[train]\nlength = '{case['sizes'][0]} sequences'",
        f"seed = {case['seed']}\nglobal_batch_size = 1",
        f"[evaluate]\ninterval = 1000000\nbatches = {evaluated}\n[data]",
    ]
    if case["blend_per_split"]:
        lines.append('cache_folder = "cache"')
        for split, each in zip(("train", "valid", "test"), case["blend_per_split"], strict=True):
            if each:
                lines.append(f"[data.{split}]\n{blend(golden, *each)}")
    else:
        lines.append(f'cache_folder = "cache"\nsplit = "{case["split"]}"')
        lines.append(f"[data.blend]\n{blend(golden, *case['blend'])}")
    return "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_sequences_are_megatrons(
    name: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = shared_data / "golden"
    case = json.loads((golden / f"{name}.json").read_text())
    monkeypatch.chdir(tmp_path)
    with np.load(golden / f"{name}.npz", allow_pickle=False) as expected:
        splits = [key.split("_")[0] for key in expected if key.endswith("tokens_sha256_16")]
        assert splits
        for split in splits:
            evaluated = case["sizes"][("train", "valid", "test").index(split)]
            if evaluated is None:
                continue  # one pass over the split, which no run file asks for
            (tmp_path / "run.toml").write_text(run_file(golden, case, evaluated))
            wanted = expected[f"{split}_tokens_sha256_16"]
            show_order(["run.toml"], split, 0, len(wanted), Path("order.npz"))
            with np.load("order.npz", allow_pickle=False) as found:
                rows = found["sequences"][:, :-1].astype("<i8")
            digests = [hashlib.sha256(row.tobytes()).digest()[:16] for row in rows]
            assert np.array_equal(
                np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16), wanted
            )
