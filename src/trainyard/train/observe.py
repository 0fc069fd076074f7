"""Looks at the model while it trains: loss on held-out sequences, and text samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainyard.data.loader import held_out_batches
from trainyard.evaluate.generate import Sampling, generate
from trainyard.evaluate.loss import evaluate_sequences
from trainyard.train.metrics import Metrics
from trainyard.train.state import Parts, State

SAMPLING = Sampling(temperature=0.6, top_k=50, top_p=1.0, seed=0)


def evaluate(
    parts: Parts, state: State, metrics: Metrics, show: Callable[[int, str], None]
) -> float | None:
    """Measures and shows the loss on the same held-out sequences each time, if there are any."""
    parts.pulse.enter("evaluate", state.step)
    train, vocabulary_size = parts.run.train, parts.run.model.vocabulary_size
    order = parts.valid_order
    if order is None:
        show(state.step, "no evaluation: the valid split is empty, or evaluate.batches is 0")
        return None
    # As many as the order was built for: whole batches, which every rank has an equal share of.
    n_sequences = parts.run.evaluate.batches * train.global_batch_size
    batches = held_out_batches(order, n_sequences, train.global_batch_size, vocabulary_size)
    loss_of = parts.replica.held_out_loss
    found = evaluate_sequences(loss_of, batches, vocabulary_size, parts.tokenizer)
    consumed = parts.batches.consumed(state.step) * parts.run.model.sequence_length
    values = {"step": state.step, "tokens": consumed, "split": "valid", **found.as_dict()}
    metrics.write("evaluate", values)
    line = f"step {state.step}: held-out loss {found.mean_loss:.4f}"
    line += f" | perplexity {found.perplexity:.2f}"
    bits = found.bits_per_byte
    show(state.step, line if bits is None else f"{line} | {bits:.3f} bits per byte")
    return found.mean_loss


def sample(parts: Parts, state: State, metrics: Metrics) -> str:
    """Continues each prompt; returns the texts."""
    parts.pulse.enter("evaluate", state.step)
    model = parts.replica.whole_model
    if parts.tokenizer is None:
        return "no samples: tokenizer.path is empty"
    if model is None:
        return "no samples while ranks share a model; trainyard generate takes a checkpoint of it"
    texts = []
    sampling = replace(SAMPLING, vocabulary_size=parts.tokenizer.vocabulary_size)
    for prompt in parts.run.evaluate.sample_prompts:
        ids = parts.tokenizer.encode(prompt)
        n_tokens, end = parts.run.evaluate.sample_tokens, parts.tokenizer.eod_id
        (new,) = generate(model, ids, n_tokens, sampling, end)
        text = parts.tokenizer.decode(new)
        metrics.write("sample", {"step": state.step, "prompt": prompt, "text": text})
        texts.append(f"sample: {prompt}{text}")
    return "\n".join(texts)
