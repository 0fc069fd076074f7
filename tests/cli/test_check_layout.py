"""`trainyard check layout`, as a user meets it; what it starts are processes of their own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.command import trainyard

from trainyard.cli.check import refuse_differences, render_results
from trainyard.config.load import load_run
from trainyard.errors import MachineError
from trainyard.simulate.layout_check import Result
from trainyard.simulate.parity import Difference

PLANT = """
import os
if "TRAINYARD_RANK" in os.environ:
    import pytest
    from tests.parity import test_mutations
    test_mutations.{fault}(pytest.MonkeyPatch())
"""
RING = ("parallel.context=2", "parallel.context_method=ring", "model.dropout=0")
FP8 = ("precision.kind=fp8", "precision.fp8.precise_blocks=0")
ALONE = "parallel.zero_stage=0"
HYBRID = ("parallel.data_replicate=2", "train.micro_batch_size=1", "--ranks", "4")
FAULTS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "missing_all_reduce": (("parallel.tensor=2", ALONE, *FP8), ["1 fp64 D", "1 fp8 D"]),
    "ring_sends_its_own_keys_again": (
        *((*RING, ALONE), ["1 fp64 s", "2 fp64 D", "3 fp64 D", "1 fp32 s"]),
    ),
    "second_rank_reads_one_further": ((), ["1 fp64 D", "1 fp32 D"]),
    "gradients_of_replicas_not_added_up": (
        *(HYBRID, ["1 fp64 DIFFERENT: embedding.weight has no gr"]),
    ),
}
"""What to check, and the beginnings of the rows that it prints, without their numbers."""


def check_layout(*arguments: str, folder: Path, python_path: str = "") -> CompletedProcess[str]:
    paths = filter(None, [python_path, os.environ.get("PYTHONPATH", "")])
    return trainyard(
        "check", "layout", *arguments, folder=folder, PYTHONPATH=os.pathsep.join(paths)
    )


def test_a_layout_is_proven_and_what_was_made_smaller_is_said(tmp_path: Path) -> None:
    result = check_layout(
        "mds-125m", "parallel.tensor=4", "parallel.sequence=true", "--ranks", "4", folder=tmp_path
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "run         mds-125m on 4 ranks: tensor 4 (sequence)"
    assert lines[1] == "tested with 2 processes on this machine"
    assert lines[2] == "layout 1    tensor 2 (sequence)"
    assert "n_layers 12 -> 2, d_model 768 -> 32" in result.stdout
    verdicts = [line for line in lines if line.endswith("same")]
    assert [line.split()[2] for line in verdicts] == ["fp64", "bf16"]
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_and_the_exit_code_says_so(fault: str, tmp_path: Path) -> None:
    # Python imports this module, if there is one, at its start: here in every rank.
    (tmp_path / "sitecustomize.py").write_text(PLANT.format(fault=fault))
    arguments, expected = FAULTS[fault]
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    result = check_layout("tiny", *arguments, folder=tmp_path, python_path=paths)
    assert result.returncode == 2, result.stderr
    rows = re.findall(r"^layout (\d) +(\w+) (?: +[-+.e\d]+){5}   (.*)", result.stdout, re.MULTILINE)
    assert len(rows) == len(expected), result.stdout
    assert all(map(str.startswith, map(" ".join, rows), expected)), result.stdout
    assert "tiny: the layout does not compute what a single device computes" in result.stderr
    assert "Traceback" not in result.stderr


def test_one_process_is_compared_with_itself(tmp_path: Path) -> None:
    result = check_layout("tiny", "--ranks", "1", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 process on this machine: no axis is sharded; --ranks N checks" in result.stdout
    assert re.search(r"fp64 ( +0.0e\+00){4} +1.0e-10   same$", result.stdout, re.MULTILINE)


def test_ranks_that_cannot_be_are_refused_with_what_can(tmp_path: Path) -> None:
    result = check_layout("tiny", "parallel.tensor=2", "--ranks", "3", folder=tmp_path)
    assert result.returncode == 2
    assert "3 ranks cannot be divided by parallel.tensor=2" in result.stderr
    assert "hint: nearest that works: 2 ranks" in result.stderr


def test_what_is_no_number_or_not_equal_on_all_ranks_is_different() -> None:
    tiny, nan = load_run("tiny").run, float("nan")
    same, inexact, no_number, copies = (
        Difference(*numbers)
        for numbers in (
            (1e-12, 1e-12, 1e-12, 1e-12, 0.0),
            (0.0, 0.0, 1e-7, 0.0, 0.0),
            (0.0, nan, 0.0, 0.0, 0.0),
            (0.0, 0.0, 0.0, 0.0, 1e-20),
        )
    )
    results = [Result(tiny, "fp64", each) for each in (same, inexact, no_number, copies)]
    results.append(Result(tiny, "fp32", inexact))
    assert [result.is_same for result in results] == [True, False, False, False, True]
    shown = render_results(results).splitlines()
    assert shown[-3].endswith("DIFFERENT")
    assert shown[-2].endswith("DIFFERENT, copies on two ranks by 1.0e-20")
    refuse_differences(tiny, [results[0], results[-1]])
    run = load_run("mds-125m", ["parallel.pipeline=4", "parallel.zero_stage=0"]).run
    wrong = [results[1], results[2], Result(tiny, "fp32", Difference(1.0, 0.0, 0.0, 0.0, 0.0))]
    with pytest.raises(MachineError, match=r"single device computes \(fp64, fp32\)") as raised:
        refuse_differences(run, wrong)
    assert "repeat with parallel.pipeline=1" in raised.value.hint
