"""CompleteP, written down a second time: weights, outputs and updates of each kind of parameter."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch
from tests.training.small import build_small_context, build_small_run, take_steps
from torch import Tensor, nn

from trainyard.architecture import (
    Multipliers,
    find_layer,
    padded_vocabulary_size,
    parameters_of,
    stage_layers,
)
from trainyard.config.precisions import MASTER, stored
from trainyard.config.run import Model, Optimizer
from trainyard.model.gpt import GPT, initialize
from trainyard.optim.adamw import AdamW, LowPrecisionAdamW
from trainyard.optim.muon import ADAMW_SIZE, Muon, orthogonalize
from trainyard.parallel.model import LocalParameter
from trainyard.parallel.placement import whole
from trainyard.training.state import State, TrainContext

ONE, NO = torch.ones(()), torch.zeros(())
# 3 times as wide and 5 times as deep as the base: no factor is another's power.
SHAPE: dict[str, Any] = {
    **{"n_layers": 10, "d_model": 96, "n_heads": 2, "d_ff": 192, "sequence_length": 8},
    **{"vocabulary_size": 500, "vocabulary_multiple": 4, "init_std": 0.1},
}
SCALED = {"parametrization": "complete_p", "base_d_model": 32, "base_n_layers": 2}
N, L = 3.0, 5.0
EXPERTS = {
    **{"bias": False, "mlp": "swiglu", "n_experts": 4, "n_active_experts": 2, "d_expert": 64},
    "n_shared_experts": 1,
}
MODERN = {"norm": "rms", "mlp": "swiglu", "bias": False, "query_key_norm": "head"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt3": {},
    "untied, norm after": {"tied_embeddings": False, "norm_place": "after"},
    "modern": MODERN | {"positions": "rotary", "n_key_value_heads": 1},
    "experts that grow": EXPERTS,
    "experts that stay": EXPERTS | {"base_d_expert": 64},
    "experts that double": EXPERTS | {"base_d_expert": 32},
}


def expected(name: str, model: Model) -> tuple[float, Multipliers]:
    """What the paper's table says: the growth of the initial deviation, and all else."""
    layer, _, kind = name.rpartition(".")
    after = model.norm_place == "after"
    ends = ("attention_norm", "mlp_norm") if after else (".out", ".down")
    output = 1 / L if "blocks" in name and layer.endswith(ends) else 1.0
    if "blocks" not in name:
        return 1.0, Multipliers(epsilon=1 / N, output=1 / N if "final_norm" in name else 1.0)
    if kind in ("bias", "balance") or "norm" in name:
        return 0.0, Multipliers(epsilon=1 / (N * L), output=output)
    n_in, size = N, N
    muon_rate = 1 / math.sqrt(N)
    if "router" in name:  # (4, 96), from (4, 32)
        muon_rate = 1 / N
    if model.base_d_expert and ("experts" in name or "shared" in name):
        features = model.d_expert / model.base_d_expert
        n_in, n_out = (features, N) if "down" in name else (N, features)
        size = 96 / max(32, model.base_d_expert)
        muon_rate = math.sqrt(n_out / n_in / size)
    std = 1 / math.sqrt(n_in) * (math.sqrt(L) if layer.endswith((".out", ".down")) else 1.0)
    return std, Multipliers(1 / n_in, muon_rate, n_in, 1 / (N * L), output)


@pytest.mark.parametrize("name", MODELS)
def test_multipliers_are_those_of_the_table(name: str) -> None:
    model, standard = Model(**SHAPE, **MODELS[name], **SCALED), Model(**SHAPE, **MODELS[name])
    found, before = (parameters_of(stage_layers(each, 500)) for each in (model, standard))
    for each, spec in found.items():
        std, multipliers = expected(each, model)
        assert asdict(spec.multipliers) == pytest.approx(asdict(multipliers)), each
        assert spec.std == pytest.approx(before[each].std * std), each
        assert before[each].multipliers == Multipliers()
        assert find_layer(model, each).parameters[each] == spec


@pytest.mark.parametrize("name", MODELS)
def test_the_base_shape_has_the_standard_layers(name: str) -> None:
    fields = SHAPE | MODELS[name] | {"base_d_model": 96, "base_n_layers": 10}
    fields |= {"base_d_expert": 64} if "n_experts" in fields else {}
    model = Model(**fields)
    assert stage_layers(model, 500) == stage_layers(
        model.model_copy(update={"parametrization": "complete_p"}), 500
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_in_the_base_shape_training_is_bitwise_the_standard(kind: str) -> None:
    losses = []
    for parametrization in ("standard", "complete_p"):
        base = {"base_d_model": 16, "base_n_layers": 4, "parametrization": parametrization}
        model = build_small_run().model.model_dump() | base
        context = build_small_context(model=model, optimizer={"kind": kind})
        losses.append(
            [result.loss.item() for result in take_steps(context, State.at_start(context), 3)]
        )
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["gpt3", "untied, norm after", "modern", "experts that stay"])
def test_outputs_are_those_of_a_standard_model_with_scaled_weights(name: str) -> None:
    fields = SHAPE | MODELS[name]
    model, standard = GPT(Model(**fields, **SCALED), 500), GPT(Model(**fields), 500)
    initialize(model, seed=1)
    values = dict(model.named_parameters())
    with torch.no_grad():
        for each, parameter in standard.named_parameters():
            _, m = expected(each, Model(**fields, **SCALED))
            values[each].add_(0.01)  # biases too
            parameter.copy_(values[each] * m.output)
    tokens = torch.arange(16).view(2, 8) * 31 % 500
    found, wanted = (each.logits(each(tokens)) for each in (model, standard))
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def local(name: str, parameter: nn.Parameter, multipliers: Multipliers) -> LocalParameter:
    formats = stored("fp8_lowbit", "adamw", name != "embedding", parameter.ndim)
    return LocalParameter(
        name, parameter, None, is_copy=False, stored=formats, multipliers=multipliers
    )


RATES = Multipliers(rate=0.5, decay=2.0, epsilon=0.125)
OTHERS = Optimizer(epsilon=0.125 * 1e-2, weight_decay=2 * 0.1)
"""What stands for these multipliers with a rate half as large."""


def test_adamw_is_that_of_other_settings() -> None:
    values = [torch.randn(4, 6), torch.randn(6)]
    found, wanted = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    ours = AdamW(found, Optimizer(epsilon=1e-2), [RATES, RATES])
    theirs = AdamW(wanted, OTHERS)
    for parameter in (*found, *wanted):
        parameter.grad = torch.full_like(parameter, 0.02)
    for _ in range(3):
        ours.step(0.1, ONE, NO)
        theirs.step(0.05, ONE, NO)
    assert all(map(torch.equal, found, wanted))


def test_low_precision_adamw_is_that_of_other_settings() -> None:
    masters: list[list[Tensor]] = []
    for settings, multipliers, rate in (
        (Optimizer(epsilon=1e-2), RATES, 0.1),
        (OTHERS, Multipliers(), 0.05),
    ):
        torch.manual_seed(0)
        shapes = {"qkv": (32, 64), "norm": (64,), "embedding": (20, 64)}
        locals_ = [
            local(n, nn.Parameter(torch.randn(s).to(torch.bfloat16)), multipliers)
            for n, s in shapes.items()
        ]
        places = [(each, whole(each.parameter.shape)) for each in locals_]
        optimizer = LowPrecisionAdamW(places, settings, seed=5, may_compile=False)
        for each in locals_:
            each.parameter.grad = torch.full_like(each.parameter, 0.02)
            if each.stored.converts_gradient:
                each.convert_gradient()
        optimizer.step(rate, ONE, NO)
        masters.append([optimizer.matrices["qkv"].states[MASTER].values.view(torch.int16)])
        masters[-1] += [each.parameter.detach() for each in locals_]
    assert all(map(torch.equal, *masters))


def build(kind: str, **fields: Any) -> TrainContext:
    model = SHAPE | {"n_layers": 2} | fields | SCALED | {"base_n_layers": 1}
    return build_small_context(model=model, optimizer={"kind": kind, "weight_decay": 0.5})


@pytest.mark.parametrize("name", ["gpt3", "experts that stay"])
def test_muon_scales_the_rate_and_not_the_decay(name: str) -> None:
    context = build("muon", **MODELS[name])
    assert isinstance(context.optimizer, Muon)
    before, updates = {}, {}
    for each in context.model.local_parameters:
        each.parameter.grad = torch.randn_like(each.parameter)
        if each.name in context.optimizer.matrices:
            before[each.name] = each.parameter.detach().clone()
            gradient = each.parameter.grad.to(torch.float32)
            fused = find_layer(context.run.model, each.name).fused
            shaped = gradient if gradient.ndim == 2 else gradient.flatten(0, -3)
            fused = fused if gradient.ndim == 2 else (1, ())
            updates[each.name] = orthogonalize(shaped, fused).view_as(gradient)
    context.optimizer.step(0.01, ONE, NO)
    for each in context.model.local_parameters:
        if each.name in before:
            rows, columns = find_layer(context.run.model, each.name).matrices[0][-2:]
            size = ADAMW_SIZE * math.sqrt(max(rows, columns))
            _, m = expected(each.name, context.run.model)
            wanted = before[each.name] * (1 - 0.01 * 0.5)
            wanted -= 0.01 * size * m.muon_rate * updates[each.name]
            torch.testing.assert_close(each.parameter.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_every_parameter_of_a_rank_gets_its_multipliers() -> None:
    for kind, name in product(("adamw", "muon"), ("gpt3", "experts that stay")):
        context = build(kind, **MODELS[name])
        padded = padded_vocabulary_size(context.run.model)
        specs = parameters_of(stage_layers(context.run.model, padded))
        of_model = {each.name: each.multipliers for each in context.model.local_parameters}
        assert of_model == {n: specs[n].multipliers for n in of_model}
        adamw: Any = context.optimizer
        adamw = adamw.rest if kind == "muon" else adamw
        of_groups = {p: m for (_, m), group in adamw._groups.items() for p in group}
        by_parameter = {each.parameter: each.multipliers for each in context.model.local_parameters}
        assert of_groups.items() <= by_parameter.items()
