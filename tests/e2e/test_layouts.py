"""Training in every kind of layout, from the run folder to text: all is as with one process.

Most ranks here are forks of this process, which has imported torch already: the environment and the
store file are those `trainyard train --ranks` gives them, the worker is the real one. Tests of the
command itself, and of what it does when a rank dies, start real ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.command import Fork, call
from tests.layouts import read_layout
from tests.training.conftest import lines_of, newest, stop_at
from tests.training.conftest import losses_of as losses

from trainyard.checkpoint.load import load_tensors
from trainyard.cli.evaluate import evaluate
from trainyard.cli.export import export
from trainyard.cli.generate import generate
from trainyard.config.corpus import load_corpus
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.launch.environment import Process, rank_environment
from trainyard.training import worker
from trainyard.training.run_folder import open_run, write_run_folder

pytestmark = pytest.mark.exhaustive

DOCUMENTS = Path(__file__).parent.parent.parent / "docs"
N_STEPS = 8
SEQUENCE_LENGTH = 64
# Of a loss: sums of some thousand fp32 numbers in another order.
CLOSE = 3e-6
LAYOUTS = ("dp2 zero0", "dp2 zero3", "tp2 pp2 sequence", "cp2", "dp2 tp2 pp2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name a small real corpus, its tokenizer and its cache."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("**/*.md"))]
    tokenizer = train_tokenizer(texts, 512, folder / "tokenizer").parent
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    inputs = sorted(str(path) for path in folder.glob("*.txt"))
    output = {"inputs": inputs, "output": f"{folder}/tokens", "tokenizer": str(tokenizer)}
    prepare(load_corpus(None, output))
    return [
        f"data.blend.prefixes=['{folder}/tokens_text_document']",
        f"data.cache_folder='{folder}/cache'",
        f"tokenizer.path='{tokenizer}'",
    ]


def run_of(corpus: list[str], *overrides: str) -> Run:
    fields = [
        *("name=run", "model.n_layers=4", "model.dropout=0.1", "data.split='80,10,10'"),
        *(f"train.length='{N_STEPS} steps'", "train.micro_batch_size=2"),
        *(f"schedule.decay='{N_STEPS} steps'", "schedule.warmup='2 steps'"),
        *("evaluate.batches=1", "evaluate.interval=4", "evaluate.sample_interval=4"),
        *("evaluate.sample_prompts=['The rank']", "evaluate.sample_tokens=8"),
        # With 1e-8, Adam's update has a jump where a gradient is 0: rounding is not small there.
        *("optimizer.epsilon=1e-6", "log.interval=1", "log.tensorboard=false"),
    ]
    return load_run("tiny", [*corpus, *fields, *overrides]).run


def train(
    folder: Path,
    run: Run,
    n_ranks: int = 1,
    prepare_rank: Callable[[int], None] = lambda _rank: None,
) -> list[int]:
    """Trains in forks of this process, each with a log of its own; gives their exit codes."""
    write_run_folder(open_run(folder, run=run), "auto")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    reading, writing = os.pipe()

    def be_rank(number: int) -> None:
        os.close(writing)
        place = Process(
            number, n_ranks, number, n_ranks, store_file=folder / "store", parent_pipe=reading
        )
        os.environ.update(rank_environment(place, 1) if n_ranks > 1 else {})
        prepare_rank(number)
        sys.argv = ["worker", str(folder)]
        worker.main()

    try:
        ranks = [Fork(partial(be_rank, number)) for number in range(n_ranks)]
        ended = [rank.wait() for rank in ranks]
    finally:
        os.close(reading)
        os.close(writing)
    for number, rank in enumerate(ended):
        with (folder / "logs" / f"{number}.log").open("a") as log:
            log.write(rank.stdout + rank.stderr)
    return [rank.returncode for rank in ended]


def said(folder: Path, rank: int) -> str:
    return (folder / "logs" / f"{rank}.log").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def alone(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, to which all others are compared."""
    folder = tmp_path_factory.mktemp("alone")
    assert train(folder, run_of(corpus)) == [0], said(folder, 0)
    return folder


@pytest.fixture(scope="module")
def trained(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the run folder of a layout, trained once."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("layout")
            n_ranks = read_layout(name).n_ranks
            codes = train(folder, run_of(corpus, *read_layout(name).overrides), n_ranks)
            assert codes == [0] * n_ranks, said(folder, 0)
            folders[name] = folder
        return folders[name]

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process(
    trained: Callable[[str], Path], alone: Path, name: str
) -> None:
    folder, n_ranks = trained(name), read_layout(name).n_ranks
    assert [line["step"] for line in lines_of(folder, "train")] == list(range(1, N_STEPS + 1))
    for kind in ("train", "evaluate"):
        assert losses(folder, kind) == pytest.approx(losses(alone, kind), rel=CLOSE)
    splits = [(line["split"], line["step"]) for line in lines_of(folder, "evaluate")]
    assert splits == [("valid", 4), ("valid", 8), ("test", 8)]
    for line in lines_of(folder, "train"):
        tokens_per_second = line["sequences_per_second"] * SEQUENCE_LENGTH
        assert line["tokens_per_second_per_device"] * n_ranks == pytest.approx(tokens_per_second)
    assert len(lines_of(folder, "end")) == 1
    expected, found = (load_tensors(newest(each), "") for each in (alone, folder))
    assert found.keys() == expected.keys()
    for tensor, whole in expected.items():
        torch.testing.assert_close(found[tensor], whole, rtol=1e-4, atol=2e-5, msg=tensor)


def test_only_rank_0_speaks(trained: Callable[[str], Path]) -> None:
    folder = trained("tp2 pp2 sequence")
    screen = said(folder, 0)
    width = len(str(N_STEPS))
    assert [screen.count(f"step {step:>{width}} of {N_STEPS} |") for step in (1, N_STEPS)] == [1, 1]
    assert screen.count("no samples: the model is sharded") == 2
    assert [said(folder, rank) for rank in (1, 2, 3)] == ["", "", ""]


@pytest.mark.parametrize("name", ["dp2 zero0", "dp2 zero3"])
def test_samples_are_those_of_one_process(
    trained: Callable[[str], Path], alone: Path, name: str
) -> None:
    ours, texts = (
        [line["text"] for line in lines_of(folder, "sample")] for folder in (trained(name), alone)
    )
    assert len(texts) == 2 and ours == texts


def stop_one(n_steps: int, rank: int) -> Callable[[int], None]:
    """Lets one rank of a run ask to stop."""

    def prepare_rank(number: int) -> None:
        if number == rank:
            stop_at(pytest.MonkeyPatch(), n_steps)

    return prepare_rank


def test_one_run_in_three_layouts(corpus: list[str], alone: Path, tmp_path: Path) -> None:
    first = run_of(corpus, *read_layout("tp2 pp2 sequence").overrides)
    assert train(tmp_path, first, 4, stop_one(3, rank=2)) == [75] * 4
    assert "told to: saved step 3 in" in said(tmp_path, 0)
    second = run_of(corpus, "parallel.zero_stage=3", "train.micro_batch_size=1")
    assert train(tmp_path, second, 2, stop_one(3, rank=1)) == [75] * 2
    assert "parallel.tensor: 2 in the checkpoint, now 1" in said(tmp_path, 0)
    third = run_of(corpus, "parallel.zero_stage=3")
    assert train(tmp_path, third) == [0]
    assert [line["step"] for line in lines_of(tmp_path, "train")] == list(range(1, N_STEPS + 1))
    assert [line["step"] for line in lines_of(tmp_path, "start")] == [0, 3, 6]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=CLOSE)


@pytest.mark.parametrize("name", ["tp2 pp2 sequence", "dp2 zero3"])
def test_what_is_done_with_a_checkpoint(
    trained: Callable[[str], Path], alone: Path, name: str, tmp_path: Path
) -> None:
    def answers(folder: Path) -> tuple[float, str, dict[str, torch.Tensor]]:
        loss = json.loads(call(evaluate, folder, "--json"))["loss"]
        text = call(generate, folder, "--prompt", "The", "--temperature", "0")
        output = tmp_path / folder.name
        call(export, folder, "--output", output, "--no-verify")
        return loss, text, load_file(output / "model.safetensors")

    expected, found = answers(alone), answers(trained(name))
    assert found[0] == pytest.approx(expected[0], rel=CLOSE)
    assert found[1] == expected[1]
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=2e-5)
