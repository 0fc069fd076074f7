"""The load of experts in metrics: of every block in every layout, and of experts that die."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.config.run import Run
from trainyard.training.metrics import DEAD_TOKENS, ExpertLoad, Metrics, summarize_load
from trainyard.training.state import State
from trainyard.training.step import train_step

from .conftest import lines_of, start, with_fields
from .small import BATCH, SECTIONS, build_small_context, take_steps

E, ACTIVE, N_STEPS = 4, 2, 3
EXPERTS = {"n_experts": E, "n_active_experts": ACTIVE, "bias": False, "mlp": "swiglu"}
MODEL = SECTIONS["model"] | EXPERTS | {"n_dense_blocks": 1}
PER_BLOCK = N_STEPS * BATCH * MODEL["sequence_length"] * ACTIVE


def load_of_steps(parallel: dict[str, Any], n_ranks: int = 1) -> list[list[int]]:
    context = build_small_context(n_ranks, model=MODEL, parallel=parallel)
    counted, state = ExpertLoad(context), State.at_start(context)
    for _ in range(N_STEPS):
        take_steps(context, state, 1)
        counted.add()
    found, dead = counted.read()
    assert not dead
    table: list[list[int]] = found["expert_load"]
    return table


@pytest.mark.parametrize(
    "parallel",
    [{"expert": 2}, {"pipeline": 2}, {"tensor": 2, "sequence": True}, {"context": 2}],
    ids=str,
)
def test_every_rank_knows_the_load_of_all_blocks(
    parallel: dict[str, Any], run_ranks: Callable[..., list[Any]]
) -> None:
    alone = load_of_steps({})
    assert len(alone) == MODEL["n_layers"] - 1
    assert [sum(block) for block in alone] == [PER_BLOCK] * len(alone)
    assert max(map(max, alone)) > PER_BLOCK / E
    assert run_ranks(2, load_of_steps, parallel, 2) == [alone, alone]


def test_imbalance_and_entropy() -> None:
    found = summarize_load(np.array([[10.0, 20, 30, 40], [25, 25, 25, 25]]))
    entropy = -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4)) / math.log(4)
    assert found["expert_imbalance"] == pytest.approx(1.6)
    assert found["expert_entropy"] == pytest.approx((entropy + 1) / 2)
    collapsed = summarize_load(np.array([[0.0, 0, 8, 0]]))
    assert collapsed == {"expert_imbalance": 4, "expert_entropy": 0}
    assert summarize_load(np.array([[8.0]])) == {"expert_imbalance": 1, "expert_entropy": 1}


def test_an_expert_that_dies_is_named_once(tmp_path: Path) -> None:
    """Expert 3 of block 2 gets no token; expert 1 of block 1 gets one between."""
    log = {"interval": 1, "tensorboard": False}
    context = replace(build_small_context(model=MODEL, log=log), folder=tmp_path)
    state, metrics = State.at_start(context), Metrics(context)
    texts = []
    for step in range(8):
        with metrics.timing():
            result = train_step(context, state)
        for router in context.model.routers.values():
            router.load.fill_(0.4 * DEAD_TOKENS)
        context.model.routers[2].load[3] = 0
        context.model.routers[1].load[1] = step == 2
        state.step += 1
        metrics.add(result, BATCH)
        texts.append(metrics.write_steps(state, result))
    metrics.close()
    named = {number: text for number, text in enumerate(texts, 1) if "warning" in text}
    assert "no token chose expert 3 of block 2 while" in named.pop(3)
    assert "no token chose expert 1 of block 1 while" in named.pop(6)
    assert not named
    found = [(line["step"], line["experts"]) for line in lines_of(context.folder, "dead experts")]
    assert found == [(3, {"2": [3]}), (6, {"1": [1]})]


def test_a_run_logs_the_load_of_each_interval(
    tiny_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainyard")
    log = {"interval": 4, "tensorboard": True}
    start(tmp_path, with_fields(tiny_run, model=EXPERTS, log=log))
    lines = lines_of(tmp_path, "train")
    assert [line["step"] for line in lines] == [4, 8, 12]
    for line in lines:
        load = np.array(line["expert_load"])
        assert load.shape == (tiny_run.model.n_layers, E)
        assert (load.sum(1) == 4 * 8 * tiny_run.model.sequence_length * ACTIVE).all()
        assert line["expert_imbalance"] == pytest.approx((load / load.mean(1)[:, None]).max())
        assert 0.5 < line["expert_entropy"] < 1
        assert f"| imbalance {line['expert_imbalance']:.2f} |" in caplog.text
