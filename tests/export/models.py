"""Small random models of transformers, every weight of which shows in their logits."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_LLAMA = {"intermediate_size": 48, "max_position_embeddings": 96}
OF_GPT2 = {"n_positions": 48}


def random_model(family: str, **options: Any) -> Any:
    """Builds a `GPT2`, `Llama`, `Qwen3`, .. with a language model's head."""
    import transformers

    sizes = SIZES | (OF_GPT2 if family == "GPT2" else OF_LLAMA)
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    torch.manual_seed(5)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens_of(model: Any) -> torch.Tensor:
    """Returns two sequences of random tokens, as long as the model takes."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    shape = (2, config.max_position_embeddings)
    return torch.randint(config.vocab_size, shape, generator=generator)


def require_equal_logits_of(model: Any, ours: Any, limit: float) -> None:
    """Compares the logits of both models, relative to the largest."""
    tokens = tokens_of(model)
    with torch.no_grad():
        expected, found = model(tokens).logits, ours.logits(ours(tokens))
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() <= limit * expected.abs().max()
