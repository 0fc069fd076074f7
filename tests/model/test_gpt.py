from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.config.run import Model
from trainyard.model.gpt import GPT, Recompute, compile_blocks
from trainyard.model.init import initialise
from trainyard.model.loss import summed_cross_entropy

SHAPE = Model(
    n_layers=2,
    d_model=32,
    n_heads=4,
    d_ff=128,
    sequence_length=16,
    vocabulary_size=61,
    dropout=0.0,
    init_std=0.2,
)


def build(
    shape: Model = SHAPE, dtype: torch.dtype = torch.float32, recompute: Recompute = "none"
) -> GPT:
    model = GPT(shape, 64, dtype, recompute)
    initialise(model, shape, seed=3)
    # Biases and norms too, so that nothing is trivially right.
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.train()


def some_tokens(n_tokens: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 61, (3, n_tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(model: GPT) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = some_tokens()
    torch.manual_seed(6)
    loss = summed_cross_entropy(model(tokens), model.head_weight, labels, 61)
    loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def as_transformers(model: GPT, shape: Model) -> torch.nn.Module:
    """The same weights in the GPT-2 of Hugging Face."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=shape.vocabulary_size,
        n_positions=shape.sequence_length,
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=shape.tied_embeddings,
    )
    peer = transformers.GPT2LMHeadModel(config)
    ours = model.state_dict()
    names = {"wte": "embedding", "wpe": "positions", "ln_f": "final_norm"}
    for index in range(shape.n_layers):
        names |= {
            f"h.{index}.{theirs}": f"blocks.{index}.{mine}"
            for theirs, mine in {
                "ln_1": "attention_norm",
                "attn.c_attn": "attention.qkv",
                "attn.c_proj": "attention.out",
                "ln_2": "mlp_norm",
                "mlp.c_fc": "mlp.up",
                "mlp.c_proj": "mlp.down",
            }.items()
        }
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if name == "lm_head.weight":
                parameter.copy_(ours["head.weight"][:61])
                continue
            stem, kind = name.removeprefix("transformer.").rsplit(".", 1)
            value = ours[f"{names[stem]}.{kind}"]
            if stem.endswith("c_attn"):  # rows (H, 3, K) here, (3, H, K) there
                heads = value.unflatten(0, (shape.n_heads, 3, -1))
                value = heads.transpose(0, 1).flatten(0, 2)
            if ".c_" in stem and value.ndim == 2:
                value = value.t()
            parameter.copy_(value[:61] if stem == "wte" else value)
    return peer.train()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_are_those_of_hugging_face_gpt2(tied: bool) -> None:
    shape = SHAPE.model_copy(update={"tied_embeddings": tied})
    model = build(shape)
    peer = as_transformers(model, shape)
    tokens, labels = some_tokens()
    expected = peer(tokens).logits
    torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=1e-5, atol=1e-5)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    _, gradients = loss_and_gradients(model)
    theirs = peer.transformer
    pairs = [
        (gradients["embedding.weight"][:61], theirs.wte.weight.grad),
        (gradients["positions.weight"], theirs.wpe.weight.grad),
        (gradients["blocks.0.mlp.up.weight"], theirs.h[0].mlp.c_fc.weight.grad.t()),
        (gradients["blocks.1.attention.out.bias"], theirs.h[1].attn.c_proj.bias.grad),
        (gradients["final_norm.weight"], theirs.ln_f.weight.grad),
    ]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert gradients["embedding.weight"][61:].count_nonzero() == 0


def test_an_untied_head_is_a_matrix_of_its_own() -> None:
    tied, untied = build(), build(SHAPE.model_copy(update={"tied_embeddings": False}))
    assert tied.head_weight is tied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert untied.head_weight is dict(untied.named_parameters())["head.weight"]


@pytest.mark.parametrize("recompute", ["attention", "block"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_gives_the_same_gradients(recompute: Recompute, dropout: float) -> None:
    shape = SHAPE.model_copy(update={"dropout": dropout})
    loss, gradients = loss_and_gradients(build(shape))
    again, same = loss_and_gradients(build(shape, recompute=recompute))
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name]), name


def test_recomputing_stores_less() -> None:
    assert n_stored("block") < n_stored("attention") < n_stored("none")


def n_stored(recompute: Recompute) -> int:
    """Activations that wait for the backward pass."""
    model = build(recompute=recompute)
    stored: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(some_tokens()[0])
    assert hidden.requires_grad
    return len(stored.keys() - {p.untyped_storage().data_ptr() for p in model.parameters()})


def test_bf16_stays_near_fp32_and_gradients_are_fp32() -> None:
    loss, gradients = loss_and_gradients(build())
    low, low_gradients = loss_and_gradients(build(dtype=torch.bfloat16))
    assert low.item() == pytest.approx(loss.item(), rel=1e-2)
    for name, gradient in gradients.items():
        found = low_gradients[name]
        assert found.dtype == torch.float32
        assert (found - gradient).norm() / gradient.norm() < 0.05, name


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 8], [16]])
def test_a_cache_gives_the_logits_of_the_whole_sequence(pieces: list[int]) -> None:
    model = build().eval()
    tokens, _ = some_tokens()
    caches = model.build_caches(3, 16)
    parts = [model.logits(model(part, caches)) for part in tokens.split(pieces, 1)]
    expected = model.logits(model(tokens))
    assert expected.shape == (3, 16, 61)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    model = build().eval()
    tokens, _ = some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_dropout_acts_in_training_alone() -> None:
    model = build(SHAPE.model_copy(update={"dropout": 0.3}))
    tokens, _ = some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
def test_compiled_blocks_equal_eager_ones(recompute: Recompute) -> None:
    loss, gradients = loss_and_gradients(build())
    model = build(recompute=recompute)
    names = list(model.state_dict())
    compile_blocks(model)
    assert list(model.state_dict()) == names
    again, same = loss_and_gradients(model)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-4, atol=1e-5)
