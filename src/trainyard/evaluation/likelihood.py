"""Answers questions by the likelihood of their choices, and scores the answers.

A worked example: two choices after "The sky is", one token per word, for a model of sequence_length
4. | is the end-of-document token, the context of a text that has none.

    context and continuation     model reads     predicts
    The sky is  blue             The sky is      . . blue
    The sky is  very dark red    sky is very dark    . very dark red     (cut at its start)

The choice with the largest sum of log probabilities is the answer; normalized, the one with the
largest per character. Pairs of similar length share a batch, and logits are computed only of
continuations. All this is as in lm-eval, so that scores can be compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import CheckpointError, DataError
from trainyard.evaluation.loss import Predictor, Window, stack, window
from trainyard.evaluation.tasks import Question, Task

Update = Callable[[float, float], None]


@dataclass(frozen=True)
class Answer:
    """What a model makes of a question.

    Attributes:
        log_likelihoods: one for each choice, in nats.
        greedy: whether greedy decoding gives the choice.
        correct: whether the right choice is the likeliest; if it is the only one, whether it is
            greedy.
        correct_normalized: whether it is the likeliest per character; None: not a score of this
            task.
    """

    log_likelihoods: list[float]
    greedy: list[bool]
    correct: bool
    correct_normalized: bool | None


@dataclass(frozen=True)
class TaskScores:
    """The scores of a task; each with its standard error, None of a single item."""

    n_items: int
    step: int
    """The checkpoint's."""
    accuracy: float
    accuracy_stderr: float | None
    normalized_accuracy: float | None = None
    normalized_accuracy_stderr: float | None = None
    perplexity: float | None = None
    """LAMBADA's, of the last words."""
    perplexity_stderr: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the known scores, as in evaluation.json."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def answer_tasks(
    predictor: Predictor, tokenizer: Tokenizer, tasks: Sequence[Task], update: Update
) -> list[list[Answer]]:
    """Answers the questions of each task.

    Args:
        predictor: the model.
        tokenizer: the model's.
        tasks: with questions.
        update: is told how many pairs of how many are done.

    Raises:
        DataError: a continuation is longer than the model's sequences, or has no token.
        CheckpointError: the model's weights have diverged.
    """
    questions = [question for task in tasks for question in task.questions]
    windows = encode_questions(tokenizer, questions, predictor.sequence_length)
    scores = iter(score_windows(predictor, windows, update))
    return [[_answer(question, scores) for question in task.questions] for task in tasks]


def _answer(question: Question, scores: Iterator[NDArray[np.float64]]) -> Answer:
    """Answers by the next scores, one pair for each choice."""
    log_likelihoods, ranks = np.array([next(scores) for _ in question.pairs]).T
    if np.isnan([log_likelihoods, ranks]).any():
        raise CheckpointError(
            f"the scores of {question.place} are not numbers (NaN): the weights have diverged",
            "use a checkpoint from before training diverged",
        )
    greedy = ranks == 0
    correct = bool(np.argmax(log_likelihoods) == question.gold)
    if len(greedy) == 1:
        correct = bool(greedy[0])
    normalized = None
    if question.lengths:
        with np.errstate(divide="ignore"):  # an empty choice is never chosen
            per_character = log_likelihoods / np.array(question.lengths, float)
        normalized = bool(np.argmax(per_character) == question.gold)
    return Answer(log_likelihoods.tolist(), greedy.tolist(), correct, normalized)


def encode_questions(
    tokenizer: Tokenizer, questions: Sequence[Question], sequence_length: int
) -> list[Window]:
    """Encodes every pair of every question, as the window that predicts its continuation.

    Spaces at the end of a context belong to the continuation, and the ids of a continuation are
    those that the whole has after as many as the context alone. Special tokens written in a text
    are parsed.

    Raises:
        DataError: a continuation has no token, or more than `sequence_length`; names its place.
    """
    tokenizer = Tokenizer(tokenizer.vocabulary, tokenizer.name, "parse")
    places = [question.place for question in questions for _ in question.pairs]
    pairs = [pair for question in questions for pair in question.pairs]
    contexts = _encode(tokenizer, [context.rstrip() for context, _ in pairs])
    wholes = _encode(tokenizer, [context + continuation for context, continuation in pairs])
    encoded = []
    for place, context, whole in zip(places, contexts, wholes, strict=True):
        ids, n_context = whole, len(context)
        if not context:
            ids, n_context = [tokenizer.eod_id] * (whole[:1] != [tokenizer.eod_id]) + whole, 1
        n_predicted = len(ids) - n_context
        if not 0 < n_predicted <= sequence_length:
            raise DataError(
                f"{place}: a choice has {max(n_predicted, 0)} tokens; the model predicts 1 to "
                f"{sequence_length}",
                "leave out this line, or train a model with a larger model.sequence_length",
            )
        ids = ids[-sequence_length - 1 :]
        encoded.append(window(np.array(ids), len(ids) - n_predicted))
    return encoded


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    tokens, lengths = tokenizer.encode_batch(texts)
    ends = np.cumsum([0, *lengths])
    return (tokens[start:end].tolist() for start, end in pairwise(ends))


def score_windows(
    predictor: Predictor, windows: Sequence[Window], update: Update
) -> NDArray[np.float64]:
    """Scores windows as `GPT.score_sequences`, (windows, 2), the longest first."""
    scores = np.empty((len(windows), 2))
    order = sorted(range(len(windows)), key=lambda index: -len(windows[index][0]))
    done = 0
    while done < len(order):
        longest = len(windows[order[done]][0])
        length = predictor.sequence_length if predictor.is_fixed_length else longest
        n_rows = predictor.batch_size * (predictor.sequence_length // length)
        batch = order[done : done + n_rows]
        tokens, labels = stack([windows[index] for index in batch], length)
        scores[batch] = predictor.score_of(tokens, labels).cpu().numpy()
        done += len(batch)
        update(done, len(order))
    return scores


def score_answers(answers: Sequence[Answer], step: int) -> TaskScores:
    """Scores the answers of one task, of one item or more."""
    accuracy = [float(answer.correct) for answer in answers]
    answered = [answer.correct_normalized for answer in answers]
    normalized = [float(correct) for correct in answered if correct is not None]
    scores: dict[str, Any] = {}
    if normalized:
        scores["normalized_accuracy"], scores["normalized_accuracy_stderr"] = _mean(normalized)
    if len(answers[0].log_likelihoods) == 1:
        mean, error = _mean([-answer.log_likelihoods[0] for answer in answers])
        perplexity = math.exp(mean) if mean < 700 else None
        scores["perplexity"] = perplexity
        # By the delta method: the derivative of exp is exp.
        scores["perplexity_stderr"] = perplexity * error if perplexity and error else None
    return TaskScores(len(answers), step, *_mean(accuracy), **scores)


def _mean(values: list[float]) -> tuple[float, float | None]:
    """Returns the mean and its standard error."""
    mean = statistics.fmean(values)
    n = len(values)
    return mean, statistics.stdev(values, mean) / math.sqrt(n) if n > 1 else None
