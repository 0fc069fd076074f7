from __future__ import annotations

import pytest
import torch
from tests.training.small import build_small_context
from torch import Tensor

from trainyard.config.precisions import MOMENTUM
from trainyard.config.run import Model
from trainyard.optim.muon import Muon, orthogonalize
from trainyard.parallel.model import LocalParameter
from trainyard.training.state import TrainContext

SIZES = {"model": {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 160}}
# Queries have more rows than columns: another size than keys and values.
SHARED = {"model": SIZES["model"] | {"d_head": 24, "n_key_value_heads": 2, "mlp": "swiglu"}}
MUON = {"kind": "muon", "learning_rate": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
MATRICES = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def build(kind: str, sizes: dict[str, dict[str, int | str]] = SIZES) -> TrainContext:
    return build_small_context(**sizes, optimizer=MUON, precision={"kind": kind})


def muon_of(context: TrainContext) -> Muon:
    assert isinstance(context.optimizer, Muon)
    return context.optimizer


def draw_gradients(context: TrainContext, step: int) -> None:
    for number, each in enumerate(context.model.local_parameters):
        generator = torch.Generator().manual_seed(100 * step + number)
        each.parameter.grad = 0.1 * torch.randn(each.parameter.shape, generator=generator)


def parts_of(each: LocalParameter, x: Tensor, model: Model) -> list[Tensor]:
    """Takes apart queries, keys and values, in rows (G, H/G + 2, K), and gates and values."""
    K, per_group = model.d_head, model.n_heads // model.n_key_value_heads
    if "qkv" in each.name:
        heads = list(x.split(K))
        of_group = [heads[i : i + per_group + 2] for i in range(0, len(heads), per_group + 2)]
        queries = [head for group in of_group for head in group[:per_group]]
        return [torch.cat(queries), *(torch.cat([g[i] for g in of_group]) for i in (-2, -1))]
    if "mlp.up" in each.name and model.mlp == "swiglu":
        return [x[0::2].clone(), x[1::2].clone()]
    return [x.clone()]


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (64, 64)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = values > 0.02 * values[0]
    found = torch.linalg.multi_dot([u.mT, orthogonalize(1e-6 * matrix), v.mT])
    new = found.diagonal()
    assert ((new[kept] > 0.65) & (new[kept] < 1.25)).all()
    torch.testing.assert_close(found, new.diag(), rtol=0, atol=1e-12)


def test_a_gradient_of_zeros_changes_nothing() -> None:
    assert not orthogonalize(torch.zeros(8, 4)).any()


@pytest.mark.parametrize("sizes", [SIZES, SHARED])
def test_updates_are_those_of_torch(sizes: dict[str, dict[str, int | str]]) -> None:
    """In bf16, in which torch's Muon always iterates: bit for bit, where sizes are equal."""
    context = build("bf16", sizes)
    model = context.run.model
    theirs = {
        each.name: [torch.nn.Parameter(x) for x in parts_of(each, each.parameter.detach(), model)]
        for each in context.model.local_parameters
        if each.name.endswith(tuple(f"{name}.weight" for name in MATRICES))
    }
    assert theirs.keys() == muon_of(context).matrices.keys()
    reference = torch.optim.Muon(
        [part for parts in theirs.values() for part in parts],
        lr=1e-2,
        weight_decay=0.1,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(4):
        draw_gradients(context, step)
        for each in context.model.local_parameters:
            gradient = each.parameter.grad
            assert gradient is not None
            for part, of_part in zip(
                theirs.get(each.name, []), parts_of(each, gradient, model), strict=False
            ):
                part.grad = of_part / 2
        rate = 1e-2 / (step + 1)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        context.optimizer.step(rate, torch.tensor(2.0), torch.zeros(()))
        for each in context.model.local_parameters:
            if each.name in theirs:
                found = parts_of(each, each.parameter.detach(), model)
                for ours, part in zip(found, theirs[each.name], strict=True):
                    is_scaled = sizes is SHARED and "qkv" in each.name
                    rounding = 1e-2 * rate if is_scaled else 0.0
                    torch.testing.assert_close(ours, part.detach(), rtol=0, atol=rounding)


def test_what_is_no_matrix_of_a_block_has_adamw() -> None:
    muon, adamw = build("fp32"), build_small_context(**SIZES)
    states = muon.optimizer.state_of
    for step in range(2):
        for context in (muon, adamw):
            draw_gradients(context, step)
            context.optimizer.step(1e-2, torch.ones(()), torch.zeros(()))
    pairs = zip(muon.model.local_parameters, adamw.model.local_parameters, strict=True)
    for each, other in pairs:
        is_matrix = each.name in muon_of(muon).matrices
        assert is_matrix == (each.name.startswith("blocks.") and each.parameter.ndim == 2)
        assert torch.equal(each.parameter, other.parameter) != is_matrix
        assert list(states(each)) == ([MOMENTUM] if is_matrix else ["exp_avg", "exp_avg_sq"])
        assert states(each).keys() == each.stored.states.keys()


def test_a_skipped_update_keeps_weights_and_momentum() -> None:
    context = build("fp32")
    draw_gradients(context, 0)
    context.optimizer.step(1e-2, torch.ones(()), torch.zeros(()))
    muon = muon_of(context)
    tensors = [t for m in muon.matrices.values() for t in (m.local.parameter, m.momentum)]
    before = [each.detach().clone() for each in tensors]
    for each in context.model.local_parameters:
        each.parameter.grad = torch.full_like(each.parameter, torch.inf)
    context.optimizer.step(1e-2, torch.tensor(torch.nan), torch.ones(()))
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, tensors, strict=True))
