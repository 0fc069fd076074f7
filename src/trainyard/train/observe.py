"""Evaluation during training: held-out loss and text samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainyard.data.loader import held_out_batches
from trainyard.evaluate.generate import Sampling, generate
from trainyard.evaluate.loss import evaluate_sequences
from trainyard.train.metrics import Metrics
from trainyard.train.state import State, TrainContext

SAMPLING = Sampling(temperature=0.6, top_k=50, top_p=1.0, seed=0)


def evaluate(
    context: TrainContext, state: State, metrics: Metrics, show: Callable[[int, str], None]
) -> float | None:
    """Measures and shows the loss on a fixed set of held-out sequences, if there are any."""
    context.heartbeat.enter("evaluate", state.step)
    train, vocabulary_size = context.run.train, context.run.model.vocabulary_size
    order = context.valid_order
    if order is None:
        show(state.step, "no evaluation: the valid split is empty, or evaluate.batches is 0")
        return None
    # As many as the order was built for: whole batches, split equally over ranks.
    n_sequences = context.run.evaluate.batches * train.global_batch_size
    batches = held_out_batches(order, n_sequences, train.global_batch_size, vocabulary_size)
    loss_of = context.model.held_out_loss
    found = evaluate_sequences(loss_of, batches, vocabulary_size, context.tokenizer)
    consumed = context.batches.consumed(state.step) * context.run.model.sequence_length
    values = {"step": state.step, "tokens": consumed, "split": "valid", **found.as_dict()}
    metrics.write("evaluate", values)
    line = f"step {state.step}: held-out loss {found.mean_loss:.4f}"
    line += f" | perplexity {found.perplexity:.2f}"
    bits = found.bits_per_byte
    show(state.step, line if bits is None else f"{line} | {bits:.3f} bits per byte")
    return found.mean_loss


def sample(context: TrainContext, state: State, metrics: Metrics) -> str:
    """Continues each prompt; returns the texts."""
    context.heartbeat.enter("evaluate", state.step)
    model = context.model.whole_model
    if context.tokenizer is None:
        return "no samples: tokenizer.path is empty"
    if model is None:
        return "no samples: the model is sharded; run trainyard generate on a checkpoint"
    texts = []
    sampling = replace(SAMPLING, vocabulary_size=context.tokenizer.vocabulary_size)
    for prompt in context.run.evaluate.sample_prompts:
        ids = context.tokenizer.encode(prompt)
        n_tokens, end = context.run.evaluate.sample_tokens, context.tokenizer.eod_id
        (new,) = generate(model, ids, n_tokens, sampling, end)
        text = context.tokenizer.decode(new)
        metrics.write("sample", {"step": state.step, "prompt": prompt, "text": text})
        texts.append(f"sample: {prompt}{text}")
    return "\n".join(texts)
