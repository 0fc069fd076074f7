"""One golden checkpoint of each format, made by the code of its time, is read and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoint.golden_run import N_STEPS, golden_overrides, write_golden_tokens

from trainyard.checkpoint.format import FORMAT, Facts, read_manifest
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.save import save_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.config.load import RENAMED, all_fields, load_run, render_run
from trainyard.training.run_folder import open_run, write_run_folder
from trainyard.training.stop import DONE
from trainyard.training.worker import run_worker

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoints"
FORMATS = {
    **{"format-1": 1, "format-2": 2, "format-3": 3},
    **{"format-3-ranks": 3, "current": FORMAT},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_golden_tokens(tmp_path)
    return tmp_path


def train(folder: Path) -> dict[str, torch.Tensor]:
    """Trains the run of a folder to its end; returns the weights and moments."""
    run = load_run("tiny", ["name=golden", *golden_overrides(N_STEPS)]).run
    write_run_folder(open_run(folder, run=run), "auto")
    assert run_worker(open_run(folder)) == DONE
    return load_tensors(folder / "checkpoints" / f"step-{N_STEPS:08d}", "")


def write_anew(golden: Path, folder: Path) -> None:
    """Saves what a checkpoint holds as one of today."""
    manifest = read_manifest(golden)
    facts = {name: getattr(manifest, name) for name in Facts.model_fields}
    facts["run"] = manifest.build_run().model_dump(mode="json")
    folder.mkdir(parents=True)
    save_checkpoint(folder, Facts(**facts), load_tensors(golden, ""))


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_every_format_resumes_to_the_last_bit(folder: Path, name: str) -> None:
    """As what it holds does in today's format; and, but for another CPU, as a whole run today."""
    (golden,) = (GOLDEN / name).iterdir()
    assert check_checkpoint(golden).manifest.format == FORMATS[name]
    shutil.copytree(golden, folder / "old" / "checkpoints" / golden.name)
    write_anew(golden, folder / "new" / "checkpoints")
    found, expected = train(folder / "old"), train(folder / "new")
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    torch.testing.assert_close(found, train(folder / "whole"), rtol=0, atol=1e-5)


def test_an_old_run_file_is_read_with_todays_names(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last of preset, file and command line counts, by either name."""
    text = "[parallel]\nreplicas = 2\n[kernels]\ncuda_graph = true\n"
    (folder / "old.toml").write_text(f'extends = "tiny"\n{text}')
    run = load_run("old.toml").run
    assert run.parallel.data_replicate == 2
    said = caplog.text.splitlines()
    assert [line.partition("old.toml: ")[2] for line in said] == [
        "parallel.replicas is now parallel.data_replicate",
        "kernels.cuda_graph no longer exists: it did nothing",
    ]
    assert load_run("old.toml", ["parallel.data_replicate=4"]).run.parallel.data_replicate == 4
    (folder / "new.toml").write_text('extends = "old.toml"\n')
    (folder / "old.toml").write_text("[parallel]\ndata_replicate = 2\n")
    assert load_run("new.toml", ["parallel.replicas=8"]).run.parallel.data_replicate == 8
    assert "replicas =" not in render_run(run)


def test_the_table_of_renamed_fields() -> None:
    fields = all_fields()
    for old, new in RENAMED.items():
        assert old not in fields
        assert not new or (new in fields and new.rpartition(".")[0] == old.rpartition(".")[0])
