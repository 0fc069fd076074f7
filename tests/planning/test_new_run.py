"""The first run for a text: sizes that follow the text and the machine, always a valid run."""

from __future__ import annotations

import pytest

from trainyard.config.load import build_run
from trainyard.layout.resolve import resolve
from trainyard.planning.hardware import LocalMachine
from trainyard.planning.new_run import FIRST_RUN_SECONDS, choose_local_run

LAPTOP = LocalMachine("2 CPU cores", 1, False, 60e9, "fp32")
SERVER = LocalMachine("64 CPU cores", 1, False, 2e12, "bf16")
GPU = LocalMachine("H100", 1, True, 2e14, "bf16")
NODE = LocalMachine("6 x H100", 6, True, 1.2e15, "bf16")
TEXTS = {20: 257, 5_000: 512, 75_000: 1024, 400_000: 2048, 10**7: 4096, 25 * 10**9: 50257}


@pytest.mark.parametrize("machine", [LAPTOP, SERVER, GPU, NODE], ids=lambda machine: machine.name)
@pytest.mark.parametrize("n_tokens", TEXTS)
def test_every_suggestion_is_a_run(machine: LocalMachine, n_tokens: int) -> None:
    suggestion = choose_local_run(n_tokens, TEXTS[n_tokens], machine)
    run = build_run(suggestion.tables)
    plan = resolve(run, machine.count)
    assert plan.n_parameters == suggestion.parameters
    assert plan.data_parallel_size == machine.count
    assert plan.warmup_sequences < plan.decay_sequences == plan.n_sequences
    assert plan.n_steps >= 20
    assert suggestion.seconds < 1.1 * FIRST_RUN_SECONDS
    assert suggestion.passes <= 21 or plan.n_steps == 20
    assert run.evaluate.interval <= plan.n_steps
    assert run.evaluate.batches >= 1


@pytest.mark.parametrize(
    ("machine", "n_tokens", "least", "most"),
    [
        (LAPTOP, 5_000, 0.05, 0.3),
        (GPU, 5_000, 0.05, 0.3),  # tens of kB are little text for any machine
        (LAPTOP, 75_000, 0.3, 0.8),
        (LAPTOP, 10**7, 0.8, 3),
        (LAPTOP, 25 * 10**9, 0.8, 10),  # nor does a laptop read 100 GB
        (SERVER, 10**7, 3, 10),
        (GPU, 10**7, 20, 40),
        (NODE, 25 * 10**9, 80, 400),
    ],
)
def test_text_and_machine_decide_the_size(
    machine: LocalMachine, n_tokens: int, least: float, most: float
) -> None:
    millions = choose_local_run(n_tokens, TEXTS[n_tokens], machine).parameters / 1e6
    assert least <= millions <= most


def test_dropout_is_for_text_seen_often() -> None:
    dropouts = [
        choose_local_run(n_tokens, 1024, LAPTOP).values["model.dropout"]
        for n_tokens in (75_000, 10**9)
    ]
    assert dropouts == [0.2, 0.0]
