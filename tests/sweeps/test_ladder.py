"""A ladder: its sizes, rules and stages, and what it predicts of a world whose law is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.faults.small_run import small_overrides, write_tokens

from trainyard.config import rules
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.errors import ConfigError, DataError
from trainyard.layout.resolve import resolve
from trainyard.planning.ladder import find_minimum
from trainyard.sweeps.ladder import (
    Ladder,
    LadderSizes,
    Rung,
    block_parameters,
    choose_ladder,
    count_parameters,
    family_of,
    fit_rates,
    price_rungs,
    scale_model,
    training_flops,
)
from trainyard.sweeps.prediction import (
    PREDICTION,
    TARGET,
    describe_expected,
    grow_ladder,
    predict_target,
    to_json,
    write_ladder,
)

ASKED = LadderSizes(1.0, 5, held_out=1000)
FAMILIES = ("gpt3-1.3b", "modern-1.3b", "llama-3.1-8b", "olmo-2-1b", "qwen3-30b-a3b", "gpt3-175b")


def target(name: str) -> Run:
    return load_run(name).run


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_of_the_family_and_cost_the_share(name: str) -> None:
    run = target(name)
    ladder = choose_ladder(run, ASKED, training_flops, 0.02)
    members = {rung: ladder.build(rung) for rung in price_rungs(ladder, training_flops)}
    cost = sum(map(training_flops, members.values())) / training_flops(run)
    assert 0.01 < cost <= 0.02
    counts = [count_parameters(members[Rung(size, 0.5)]) for size in range(5)]
    assert counts == sorted(counts, reverse=True)
    whole = run.model
    for rung, member in members.items():
        model = member.model
        assert not rules.broken_rules(member)
        assert family_of(member) == family_of(run)
        assert model.d_model % model.n_heads == 0
        ratio = whole.n_heads * whole.d_head / whole.d_model
        assert model.n_heads * model.d_head == round(model.d_model * ratio)
        assert model.n_heads % model.n_key_value_heads == 0
        assert model.d_ff / model.d_model == pytest.approx(whole.d_ff / whole.d_model, rel=0.1)
        shape = model.d_model / model.n_layers / (whole.d_model / whole.n_layers)
        assert 0.4 < shape < 2.5, (rung, model.n_layers, model.d_model)


@pytest.mark.parametrize(("n_layers", "least"), [(4, 2), (1, 1)])
def test_a_small_target_has_no_sizes_of_one_block_unless_it_is_one(
    n_layers: int, least: int
) -> None:
    shape = {"d_model": 80, "n_heads": 5, "n_key_value_heads": 5, "d_head": 16, "d_ff": 320}
    small = target("tiny").model.model_copy(update={**shape, "n_layers": n_layers})
    sizes = [scale_model(small, block_parameters(small) * share) for share in (0.3, 0.1, 0.03)]
    assert min(model.n_layers for model in sizes) == least


def test_length_batch_rate_and_schedule_follow_the_rules() -> None:
    run = target("gpt3-1.3b")
    ladder, whole = choose_ladder(run, ASKED, training_flops, 0.02), resolve(run)
    for rung in (Rung(0, 0.5), Rung(3), Rung(4, 2.0)):
        member = ladder.build(rung)
        plan = resolve(member)
        n = block_parameters(member.model) / block_parameters(run.model)
        d = plan.n_tokens / whole.n_tokens
        assert d == pytest.approx(rung.length * n, rel=0.01)
        batch = run.train.global_batch_size * d**0.571
        assert member.train.global_batch_size == pytest.approx(batch, rel=0.3)
        rate = run.optimizer.learning_rate * n**-0.713 * d**0.307
        assert member.optimizer.learning_rate == pytest.approx(rate, rel=0.01)
        lowest = member.schedule.minimum_learning_rate / member.optimizer.learning_rate
        assert lowest == pytest.approx(
            run.schedule.minimum_learning_rate / run.optimizer.learning_rate, rel=0.01
        )
        for name in ("warmup_sequences", "decay_sequences"):
            share = getattr(whole, name) / whole.n_sequences
            assert getattr(plan, name) / plan.n_sequences == pytest.approx(share, rel=0.02)
        held_out = member.evaluate.batches * member.train.global_batch_size
        assert 1000 - member.train.global_batch_size < held_out <= 1000


def world(
    ladder: Ladder, best_rate: Callable[[float], float], best_batch: float = 1.0
) -> Callable[[Rung], float]:
    """Gives losses by a known law, plus what a wrong rate and a wrong batch cost."""
    whole = block_parameters(ladder.target.model)

    def loss(rung: Rung) -> float:
        run = ladder.build(rung)
        n, d = count_parameters(run), resolve(run).n_tokens
        of_batch = math.log(rung.batch / best_batch) if rung.batch != 1 or best_batch != 1 else 0.0
        # The rate that is best at another batch has been scaled with it.
        off = math.log(rung.rate / best_rate(block_parameters(run.model) / whole))
        return 1.7 + 400 * n**-0.34 + 1500 * d**-0.36 + 0.05 * off**2 + 0.01 * of_batch**2

    return loss


def climb(ladder: Ladder, loss: Callable[[Rung], float]) -> dict[Rung, list[float]]:
    losses: dict[Rung, float] = {}
    n_stages = 0
    while rungs := ladder.next_rungs(losses):
        losses |= {rung: loss(rung) for rung in rungs}
        n_stages += 1
        assert n_stages < 10
    return {rung: [value] for rung, value in losses.items()}


@pytest.mark.parametrize("factor", [0.2, 1.0, 1.4, 5.0])
def test_a_known_world_is_predicted(factor: float) -> None:
    run = target("gpt3-1.3b")
    ladder = choose_ladder(run, ASKED, training_flops, 0.02)
    known = world(ladder, lambda size: factor * size**-0.05, best_batch=1.3)
    found = predict_target(ladder, climb(ladder, known))
    n, d = count_parameters(run), resolve(run).n_tokens
    truth = 1.7 + 400 * n**-0.34 + 1500 * d**-0.36
    loss = found.law.answer(n, d)["loss"]
    assert loss.value == pytest.approx(truth, rel=0.01)
    assert loss.low < truth < loss.high
    best = factor * run.optimizer.learning_rate
    assert 0.8 < found.learning_rate.value / best < 1.25
    assert found.learning_rate.low < best < found.learning_rate.high
    assert found.batch == pytest.approx(1.3 * run.train.global_batch_size, rel=0.1)


def test_rates_are_tried_beyond_the_last_while_it_is_the_best() -> None:
    ladder = choose_ladder(target("gpt3-1.3b"), ASKED, training_flops, 0.02)
    losses = climb(ladder, world(ladder, lambda _size: 6.0))
    rates = {rung.rate for rung in losses if rung.size == 4 and rung.length == 1}
    assert {0.5, 1.0, 2.0, 4.0, 8.0} <= rates
    assert 0.25 not in rates


def test_a_diverged_run_moves_the_rates_down() -> None:
    ladder = choose_ladder(target("gpt3-1.3b"), ASKED, training_flops, 0.02)
    plain = world(ladder, lambda _size: 0.6)
    losses = climb(ladder, lambda rung: math.inf if rung.rate >= 2 else plain(rung))
    found = predict_target(ladder, losses)
    given = ladder.target.optimizer.learning_rate
    assert 0.8 < found.learning_rate.value / (0.6 * given) < 1.25
    run = ladder.target
    n, d = count_parameters(run), resolve(run).n_tokens
    truth = 1.7 + 400 * n**-0.34 + 1500 * d**-0.36
    assert found.law.predict(n, d).value == pytest.approx(truth, rel=0.01)


def test_a_ladder_that_has_only_begun_predicts_nothing() -> None:
    ladder = choose_ladder(target("gpt3-1.3b"), ASKED, training_flops, 0.02)
    with pytest.raises(DataError, match="7 of the first 9 runs of the ladder are not done"):
        predict_target(ladder, {rung: [3.0] for rung in ladder.rate_rungs({})[:2]})


def test_the_minimum_of_a_parabola() -> None:
    curve = {x: (math.log(x) - 0.3) ** 2 for x in (0.5, 1.0, 2.0)}
    assert math.log(find_minimum(curve)) == pytest.approx(0.3)
    assert find_minimum({0.5: 1.0, 1.0: 2.0, 2.0: 3.0}) == 0.5
    assert find_minimum({0.5: 3.0, 1.0: 2.0, 2.0: math.inf}) == 1.0
    assert find_minimum({0.5: 3.0, 1.0: 2.0, 2.0: 2.0, 4.0: 2.0}) == pytest.approx(2**0.5)


def test_rates_that_scatter_do_not_run_away() -> None:
    steady = fit_rates({0.05: 1.0, 0.02: 1.0, 0.01: 1.0})
    assert math.exp(steady[0]) == pytest.approx(1.0)
    one_off = fit_rates({0.05: 1.0, 0.02: 1.0, 0.01: 1.4})
    assert 0.6 < math.exp(one_off[0]) < 1.05
    steep = fit_rates({0.05: 1.0, 0.02: 2.5, 0.01: 5.0})
    assert math.exp(steep[0]) < 0.6


def test_cost_by_a_plan_corrects_the_sizes() -> None:
    """Small models take longer than their FLOP say, so that the ladder must be smaller."""
    run = target("gpt3-1.3b")

    def cost(one: Run) -> float:
        return training_flops(one) * (count_parameters(run) / count_parameters(one)) ** 0.3

    ladder = choose_ladder(run, ASKED, cost, 0.02)
    assert 0.016 < sum(price_rungs(ladder, cost).values()) / cost(run) <= 0.02
    assert ladder.sizes.share < choose_ladder(run, ASKED, training_flops, 0.02).sizes.share


def test_seeds_make_the_ladder_smaller() -> None:
    run = target("gpt3-1.3b")
    one, three = (
        choose_ladder(run, replace(ASKED, n_seeds=n_seeds), training_flops, 0.02)
        for n_seeds in (1, 3)
    )
    assert three.sizes.share < one.sizes.share
    cost = sum(price_rungs(three, training_flops).values()) / training_flops(run)
    assert 0.016 < cost <= 0.02


def test_a_target_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="no ladder of 5 sizes below tiny"):
        choose_ladder(target("tiny"), ASKED, training_flops, 0.02)


def test_what_a_family_shares() -> None:
    run = target("gpt3-1.3b")
    same = {"model.n_layers": 3, "optimizer.learning_rate": 1e-3, "parallel.tensor": 2}
    assert family_of(rules.change(run, same)) == family_of(run)
    for field, value in {"model.mlp": "swiglu", "optimizer.weight_decay": 0.0}.items():
        assert family_of(rules.change(run, {field: value})) != family_of(run)


def test_a_ladder_of_other_rules_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ["model.n_layers=4", "model.d_model=80", "model.d_ff=320", "model.n_heads=10"]
    run = load_run("tiny", [*small_overrides(write_tokens(tmp_path), 400), *shape]).run
    ladder = choose_ladder(run, LadderSizes(1.0, 5, 1.5, 10), training_flops, 1.0)
    run_set = write_ladder(ladder)
    assert write_ladder(ladder).members == run_set.members
    assert len(run_set.members) == 9
    file = run_set.run_file(run_set.members[3])
    n_layers = ladder.models[3].n_layers
    file.write_text(file.read_text().replace(f"n_layers = {n_layers}\n", "n_layers = 7\n"))
    with pytest.raises(DataError, match=r"tiny-ladder-04 has another shape than the sizes of"):
        grow_ladder(run_set.folder)


def test_a_plan_expects_the_loss_of_its_family_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = target("gpt3-1.3b")
    ladder = choose_ladder(run, ASKED, training_flops, 0.02)
    found = predict_target(ladder, climb(ladder, world(ladder, lambda _size: 1.0)))
    folder = tmp_path / "runs" / "gpt3-1.3b-ladder"
    folder.mkdir(parents=True)
    (folder / TARGET).write_text(render_run(run))
    (folder / PREDICTION).write_text(to_json(found))
    expected, lines = describe_expected(run)
    assert expected["loss"] == found.law.predict(found.parameters, found.tokens)
    assert lines[0].endswith("; by runs/gpt3-1.3b-ladder")
    larger, _ = describe_expected(rules.change(run, {"name": "other", "model.n_layers": 30}))
    assert larger["loss"] < expected["loss"]
    assert describe_expected(rules.change(run, {"model.mlp": "swiglu"})) == ({}, [])
