"""When ranks exchange: collectives of tensor parallelism run beside matmuls, compiled too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.layouts import Sections, read_layout
from torch._dynamo.utils import counters

from trainyard import architecture
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.model import linear
from trainyard.model.positions import Positions
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel

SMALL = (
    *("precision.kind=bf16", "model.n_layers=1", "model.dropout=0"),
    "train.micro_batch_size=1",
)
LETTERS = {
    "_c10d_functional::all_gather_into_tensor_out": "g",
    "_c10d_functional::reduce_scatter_tensor": "r",
    "_c10d_functional::all_reduce": "r",
    "_c10d_functional::wait_tensor": "w",
    "aten::mm": "m",
    "aten::addmm": "m",
    "_c10d_functional::all_to_all_single": "s",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "c",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "c",
    "add to a gradient": "v",
}


class _Watch:
    """Notes the start of gathers (g) and reductions (r), waits (w) and matmuls (m).

    And matmuls that add to gradients (v), shifts of a ring (s) and attention to some keys (c). By
    the profiler: Dynamo runs code without compiling it where a dispatch mode is active.
    """

    order = ""

    def __enter__(self) -> _Watch:
        self._multiply_into = multiply_into = linear._multiply_into

        def noted(*arguments: Any, **options: Any) -> None:
            with torch.profiler.record_function("add to a gradient"):
                multiply_into(*arguments, **options)

        linear._multiply_into = noted
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profiler.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._profiler.__exit__(*details)
        linear._multiply_into = self._multiply_into
        end = 0.0
        for event in sorted(self._profiler.events(), key=lambda event: event.time_range.start):
            letter = LETTERS.get(event.name)
            if letter and event.time_range.start >= end:  # not inside another
                self.order += letter
                end = event.time_range.end


def orders(run: Run, n_ranks: int, is_later: bool) -> tuple[str, str]:
    """Runs the second forward and backward pass of a block; sums of gradients may wait."""
    plan = resolve(run, n_ranks)
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    model = ParallelModel(run, plan, mesh, torch.bfloat16).stages[0]
    (block,) = model.blocks.values()
    tokens, B = model.position_table.residual, run.train.micro_batch_size
    counters.clear()  # of what this process compiled before
    x = torch.ones(B, len(tokens), run.model.d_model, dtype=torch.bfloat16, requires_grad=True)
    layers = [each for each in block.modules() if isinstance(each, linear.Layer)]
    for watch in (nullcontext, _Watch):  # blocks compile in the first pass, where nothing watches
        if is_later:
            linear.add_to_gradients(layers, is_ahead=True)
        with watch() as forward:
            out = block(x, Positions(tokens, tokens))
        with watch() as backward, linear.defer_sums(for_exchange=True):
            out.sum().backward()
    assert not counters["graph_break"]
    return forward.order, backward.order


# Column-parallel and row-parallel layer, of attention and of the MLP; in the backward pass the
# other way round: the weight's gradient comes last, beside what is still under way. It may wait for
# the next exchange.
FORWARD = 2 * "m mrw", 2 * "m mrmrww", 2 * "gwm mrw", 2 * "ggwmwm mrmrww"
CASES = {
    "tp2": (FORWARD[0], 2 * "mm mrmw"),
    "tp2 sequence": (FORWARD[2], 2 * "gwmm gmrwmw"),
    "tp2, pieces": (FORWARD[1], 2 * "mm mrmrmww"),
    "tp2 sequence, pieces": (FORWARD[3], 2 * "ggwmwmm ggmrmrwwmww"),
    "tp2 sequence, sequences": (FORWARD[3], 2 * "ggwmwmm gmrmrwmww"),
    "tp2, later": (FORWARD[0], "m mrv w m mrvv w v"),
    "tp2 sequence, later": (FORWARD[2], "gwm gmrv ww gv wm gmrv ww v"),
    "tp2 sequence, later pieces": (FORWARD[3], "ggwwm ggmrmrv wwww ggv wwm ggmrmrv wwww v"),
}
WORDS: dict[str, Sections] = {
    **{"pieces": {}, "later": {}},
    "sequences": {"train": {"micro_batch_size": 2}},
}


@pytest.mark.parametrize("compiled", everyday(["never", "always"], ["never"]))
@pytest.mark.parametrize("name", CASES)
def test_tensor_ranks_exchange_beside_matmuls(
    name: str,
    compiled: str,
    run_ranks: Callable[..., list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = read_layout(name, WORDS)
    run = load_run("tiny", [*SMALL, *layout.overrides, f"train.compile={compiled}"]).run
    if "pieces" in name or "sequences" in name:
        n_tokens = run.model.sequence_length // (3 - run.train.micro_batch_size)
        monkeypatch.setattr(architecture, "PIECE_TOKENS", n_tokens)
    ranks = run_ranks(2, partial(orders, run, 2, "later" in name))
    found = [tuple(order.replace("c", "") for order in each) for each in ranks]
    assert found == [tuple(order.replace(" ", "") for order in CASES[name])] * 2


@pytest.mark.parametrize("compiled", everyday(["never", "always"], ["never"]))
def test_a_ring_sends_beside_attention(
    compiled: str, run_ranks: Callable[..., list[tuple[str, str]]]
) -> None:
    layout = read_layout("cp4 ring", WORDS)
    small = (*SMALL, *layout.overrides, "model.sequence_length=64", "model.mlp=swiglu")
    run = load_run("tiny", [*small, "model.norm=rms", f"train.compile={compiled}"]).run
    ring = "scc wsc s wsc ws wc ws c w".replace(" ", "")  # own keys in two parts
    found = run_ranks(4, partial(orders, run, 4, False))
    for forward, backward in found:
        assert backward.strip("m") == ring
        # Compiled, attention's parts may be merged later, and so messages sent.
        assert forward == "mscwscwscwcmmm" or (compiled == "always" and "scwsc" in forward)
