"""`trainyard generate`: samples text from a trained model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from trainyard.cli.names import Trained, find_trained
from trainyard.errors import UserError


def generate(
    source: Trained,
    prompt: list[str] | None = None,
    tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 0.95,
    samples: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
) -> None:
    """Generate text from prompts.

    Example: trainyard generate runs/tiny --prompt "It was a dark" --tokens 50

    Example: trainyard generate runs/tiny --temperature 0

    Example: trainyard generate runs/tiny --prompt "It was" --prompt "The king" --samples 3

    Sampling:
        temperature: 0: greedy decoding.
        top_k: Sample from the top k tokens; 0: all.
        top_p: Nucleus sampling: total probability.
        samples: Number of samples of each prompt.
        seed: Random seed; the same seed repeats the text.

    Options:
        prompt: Text to continue; repeated: all in one batch; empty: a new document; absent: a
            terminal asks for one after another.
        tokens: Maximum new tokens of each text.
    """
    source = find_trained(source)
    from trainyard.evaluation.generate import Sampling, generate_steps
    from trainyard.evaluation.generate import generate as generate_ids
    from trainyard.evaluation.trained import read_trained_run

    sampling = Sampling(temperature, top_k, top_p, seed)
    trained = read_trained_run(source)
    tokenizer, model = trained.require_tokenizer(), trained.load_model()
    sampling = replace(sampling, vocabulary_size=tokenizer.vocabulary_size)
    prompts = [text for text in prompt or [""] for _ in range(samples)]

    def stream(text: str, seed: int) -> None:
        typer.echo(text, nl=False)
        own = replace(sampling, seed=seed)
        ids = [tokenizer.encode(text)]
        steps = generate_steps(model, ids, tokens, own, tokenizer.eod_id)
        found = (int(step[0]) for step in steps)
        try:
            for piece in stream_text(found, tokenizer.decode, tokenizer.eod_id):
                typer.echo(piece, nl=False)
        finally:  # Ctrl-C leaves the shell's prompt on a line of its own
            typer.echo()

    if len(prompts) == 1 and sys.stdout.isatty():
        if prompt is None and sys.stdin.isatty():
            _ask(stream, seed)
        else:
            stream(prompts[0], seed)
        return
    prompt_ids = [tokenizer.encode(text) for text in prompts]
    continuations = generate_ids(model, prompt_ids, tokens, sampling, tokenizer.eod_id)
    for number, (text, ids_of_text) in enumerate(zip(prompts, continuations, strict=True)):
        if len(prompts) > 1:
            typer.echo(f"--- {_describe(number, len(prompts) // samples, samples)}")
        typer.echo(text + tokenizer.decode(ids_of_text))


def _ask(stream: Callable[[str, int], None], seed: int) -> None:
    """Asks for prompts and continues each, until Ctrl-D, or Ctrl-C instead of a prompt."""
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys edit the line
    typer.echo("Type a prompt. Ctrl-C stops an answer; Ctrl-D ends.", err=True)
    with suppress(EOFError, KeyboardInterrupt):
        for number in itertools.count(seed):
            text = input("> ")
            with suppress(KeyboardInterrupt):
                try:
                    stream(text, number)
                except UserError as error:
                    typer.echo(f"error: {error}", err=True)


def _describe(number: int, n_prompts: int, n_samples: int) -> str:
    prompt = f"prompt {number // n_samples + 1} of {n_prompts}" if n_prompts > 1 else ""
    sample = f"sample {number % n_samples + 1} of {n_samples}" if n_samples > 1 else ""
    return ", ".join(filter(None, (prompt, sample)))


def stream_text(
    ids: Iterable[int], decode: Callable[[list[int]], str], eod_id: int
) -> Iterator[str]:
    """Yields decoded text as ids arrive; holds back incomplete characters."""
    seen: list[int] = []
    shown = ""
    for token_id in ids:
        if token_id == eod_id:
            break
        seen.append(token_id)
        text = decode(seen)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield decode(seen)[len(shown) :]
