from __future__ import annotations

from collections.abc import Callable

import pytest

from trainyard.bench.measure import OurTraining
from trainyard.bench.peers import TransformersTraining, refuse_peer
from trainyard.bench.timeline import Timeline
from trainyard.config.load import load_run
from trainyard.errors import ConfigError, LaunchError, MachineError
from trainyard.train.state import Parts

Build = Callable[..., tuple[Parts, Timeline]]


@pytest.mark.parametrize("overrides", [(), ("model.tied_embeddings=false", "model.d_ff=128")])
def test_transformers_trains_as_ours_does(build: Build, overrides: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    parts, timeline = build("model.dropout=0.0", "model.vocabulary_size=500", *overrides)
    ours = OurTraining(parts)
    theirs = TransformersTraining(parts.run, parts.plan, parts.device, timeline)
    for _ in range(4):
        assert theirs.step().item() == pytest.approx(ours.step().item(), rel=2e-6)


def test_transformers_tells_the_same_parts(build: Build) -> None:
    pytest.importorskip("transformers")
    parts, timeline = build()
    theirs = TransformersTraining(parts.run, parts.plan, parts.device, timeline)
    theirs.step()
    with timeline.recording(theirs.models) as marks:
        theirs.step()
    assert all(seconds > 0 for seconds in timeline.add_up(marks).values())


@pytest.mark.parametrize(
    ("peer", "overrides", "n_ranks", "kind", "problem"),
    [
        ("nanogpt", [], 1, ConfigError, "--against 'nanogpt' is no peer"),
        ("megatron-core", [], 1, MachineError, "--against megatron-core: this version has no"),
        ("gpt2-transformers", [], 2, LaunchError, "--against gpt2-transformers trains on one rank"),
        (
            "gpt2-transformers",
            ["precision.kind=fp8"],
            1,
            ConfigError,
            "precision.kind='fp8' is none",
        ),
    ],
)
def test_a_peer_that_cannot_be(
    peer: str, overrides: list[str], n_ranks: int, kind: type[Exception], problem: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(kind, match=problem) as error:
        refuse_peer(peer, load_run("tiny", overrides).run, n_ranks)
    assert getattr(error.value, "hint", "")
