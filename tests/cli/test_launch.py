from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.command import call
from tests.faults.small_run import small_overrides, write_tokens

from trainyard.api.launching import Request, makes, plan_jobs
from trainyard.cli.launch import launch
from trainyard.cli.show import show
from trainyard.config.corpus import Corpus
from trainyard.config.load import load_run, render_run
from trainyard.data.patterns import find_token_files
from trainyard.errors import (
    ConfigError,
    DataError,
    GuardError,
    LaunchError,
    MachineError,
    UserError,
)
from trainyard.jobs.status import read_submission
from trainyard.launch.lock import hold

ROOT = Path(__file__).parents[2]
SBATCH = """#!/bin/bash
echo "$@" >> said
echo $((4711 + $(wc -l < said)))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a small corpus, on a machine whose sbatch writes down what it is told."""
    write_tokens(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(
        'gpu = "cpu"\ndevices_per_node = 2\n[launch]\nscheduler = "slurm"\n'
    )
    return tmp_path


def run(*arguments: str) -> str:
    return call(launch, *arguments)


def small(project: Path) -> list[str]:
    overrides = small_overrides(project / "corpus_text_document", 4)
    return ["tiny", "name=small", *overrides, "--cluster", "own.toml"]


def files(project: Path) -> set[str]:
    found = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    return {name for name in found if name.startswith("runs") or name == "said"}


def test_a_dry_run_prints_the_script_and_nothing_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "the-key-of-mine")
    text = run("recipes/lumi/13b.toml", "--cluster", "lumi", "--nodes", "2", "--image", "no.sif",
               "log.wandb_project=the-key-of-mine", "--account", "project_1", "--dry-run",
               "precision.kind=fp8", "--force",
    )  # fmt: skip
    assert "log.wandb_project=*** precision.kind=fp8 --cluster lumi" in text
    assert "no.sif --force\n" in text
    assert "the-key-of-mine" not in text
    assert text.startswith("#!/bin/bash\n# lumi-13b: 2 nodes of 8 ranks. Made by\n#     trainyard ")
    assert text.endswith('run_job "$SLURM_JOB_NODELIST"\n')
    assert "#SBATCH --account=project_1\n" in text
    assert files(project) == set(), "and writes nothing"


def test_a_launch(project: Path) -> None:
    text = run(*small(project), "--nodes", "2", "--time", "00:10:00")
    folder = project / "runs" / "small"
    assert files(project) == {
        "said", "runs/small/job.sh", "runs/small/job.toml", "runs/small/run.toml"
    }  # fmt: skip
    assert (project / "said").read_text() == f"--parsable {folder}/job.sh\n"
    assert stat.S_IMODE((folder / "job.sh").stat().st_mode) == 0o700, "it may have a password"
    assert "#SBATCH --time=00:10:00" in (folder / "job.sh").read_text()
    record = read_submission(folder)
    assert record is not None
    assert (record.cluster, record.scheduler, record.n_nodes, record.job) == (
        "own.toml", "slurm", 2, "4712"
    )  # fmt: skip
    assert "job 4712" in text
    assert "trainyard status small" in text
    assert str(folder / "job-4712.log") in text
    # What each rank reads, it writes again word for word.
    written = (folder / "run.toml").read_text()
    assert render_run(load_run(str(folder / "run.toml")).run) == written


def test_a_second_launch_forgets_vain_starts_and_a_damaged_record(project: Path) -> None:
    vain = project / "runs" / "small" / "logs" / "vain"
    vain.parent.mkdir(parents=True)
    vain.write_text("3 \n")
    (vain.parents[1] / "job.toml").write_text("[[[")
    run(*small(project))
    assert not vain.exists()


def test_stages_wait_for_each_other(project: Path) -> None:
    text = run("recipes/benchmark64/full.toml", "--cluster", "slurm", "--nodes", "8",
               "--stages", "all")  # fmt: skip
    jobs = project / "runs" / "benchmark64-full"
    after = "--kill-on-invalid-dep=yes"
    assert (project / "said").read_text().splitlines() == [
        f"--parsable {jobs}/jobs/download-openwebtext.sh",
        f"--parsable --dependency=afterok:4712 {after} {jobs}/jobs/prepare-openwebtext.sh",
        f"--parsable {jobs}/jobs/download-wikipedia-20220301.sh",
        f"--parsable --dependency=afterok:4714 {after} {jobs}/jobs/prepare-wikipedia.sh",
        f"--parsable --dependency=afterok:4713:4715 {after} {jobs}/job.sh",
    ]
    script = (jobs / "jobs" / "prepare-wikipedia.sh").read_text()
    assert "#SBATCH --array=0-3\n" in script
    assert "prepare recipes/benchmark64/data/wikipedia.toml --workers 32" in script
    assert "data/wikipedia_20220301_en_text_document.json" in (jobs / "job.sh").read_text()
    assert "after prepare-wikipedia: job 4715" in text


def test_stages_mount_nothing_of_the_nodes_with_gpus(project: Path) -> None:
    text = run("recipes/azure/175b.toml", "--cluster", "azure-ndv5", "--nodes", "128",
               "--image", "a#b:c", "--stages", "all", "--dry-run")  # fmt: skip
    mounts = re.findall(r"--container-mounts=(\S+)", text)
    assert [mount.count("/opt/microsoft") for mount in mounts] == [0, 0, 2]


def test_training_names_the_stages_it_waits_for(project: Path) -> None:
    def after(stages: str) -> Sequence[str]:
        request = Request("recipes/lumi/13b.toml", cluster="slurm", stages=stages)
        return plan_jobs(request, project)[1]["train"].after

    assert after("all") == ["prepare-oscar"]
    assert after("download,train") == ["download-oscar-1gb"]
    assert list(after("train")) == []


def test_stages_in_an_allocation_use_its_cpus(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    for is_here, workers in ((True, "3"), (False, "32")):
        request = Request(
            "recipes/lumi/13b.toml", cluster="slurm", stages="prepare", is_here=is_here
        )
        job = plan_jobs(request, project)[1]["prepare-oscar"]
        assert job.arguments[-2:] == ["--workers", workers]


def test_some_stages(project: Path) -> None:
    text = run("recipes/lumi/13b.toml", "--cluster", "slurm", "--stages", "prepare,download",
               "--contact", "me@example.org; touch marker")  # fmt: skip
    assert text == "download-oscar-1gb: job 4712\nprepare-oscar: job 4713\n"
    script = (project / "runs/lumi-13b/jobs/download-oscar-1gb.sh").read_text()
    command = [line for line in script.splitlines() if not line.startswith("#")]
    assert "me@example.org; touch marker" in "\n".join(command)
    said = (project / "runs/lumi-13b/jobs/prepare-oscar.sh").read_text().splitlines()
    assert not [line for line in said if "--contact" in line and not line.startswith("#")]
    run("recipes/lumi/125m.toml", "--cluster", "frontier", "--stages", "prepare")
    script = next((project / "runs" / "lumi-125m" / "jobs").iterdir()).read_text()
    assert "#SBATCH --cpus-per-task=48\n" in script, "a CPU for each worker, unless options say"


@pytest.mark.parametrize(
    ("arguments", "kind", "problem", "hint"),
    [
        (["--cluster", "lumii"], MachineError, "no cluster named 'lumii'", "did you mean lumi?"),
        (["--cluster", "own.toml", "--nodes", "3"], ConfigError,
         "small cannot run on 3 x 2 ranks: ", "--nodes 2"),
        (["--cluster", "own.toml", "--ranks-per-node", "3"], LaunchError,
         "3 ranks per node, but a node has 2 devices", "one rank per device"),
        (["--cluster", "own.toml", "--account", "a;touch marker"], ConfigError,
         "--account: 'a;touch marker' is not a name", "launch --help describes"),
        (["--cluster", "own.toml", "--account", "$(touch marker)"], ConfigError,
         "is not a name", ""),
        (["--cluster", "own.toml", "--partition", "a\nb"], ConfigError,
         "--partition: 'a\\nb' is not a name", ""),
        (["--cluster", "own.toml", "--hosts", "n1,-x"], ConfigError, "--hosts: '-x' is no", ""),
        (["--cluster", "own.toml", "--image", "a\tb"], ConfigError, "contains a line break", ""),
        (["--cluster", "own.toml", "--time", "an hour"], ConfigError,
         "--time: 'an hour' is not a time: write 12:00:00", ""),
        (["--cluster", "own.toml", "--image", "x.sif"], LaunchError,
         "the image x.sif needs a runtime", ""),
        (["--cluster", "own.toml", "name=a;touch marker"], ConfigError, "name: ", ""),
        (["--cluster", "own.toml", "name=$(touch marker)"], ConfigError, "name: ", ""),
        (["--cluster", "own.toml", "name='`touch marker`'"], ConfigError, "name: ", ""),
        (["--cluster", "own.toml", 'name=a"; touch marker; "'], ConfigError, "name: ", ""),
        (["--cluster", "own.toml", "name=a\ntouch marker"], ConfigError, "name: ", ""),
        (["--cluster", "own.toml", "--stages", "tokenize"], LaunchError,
         "no stage named 'tokenize'", "all, or some of download, prepare, train"),
        (["--cluster", "own.toml", "--here"], LaunchError,
         "--here: this shell is not inside an allocation",
         "start one (salloc --nodes=1 and your options), or omit --here to submit a job"),
        (["--cluster", "pbs", "--ranks-per-node", "1", "--nodes", "2", "--here"], LaunchError,
         "--here: this shell is not inside an allocation", "qsub -I -l select=2"),
        (["--cluster", "local", "--here"], LaunchError,
         "--here is for the allocations of Slurm and PBS", "omit --here"),
        (["--cluster", "own.toml", "--stages", "all"], ConfigError, "no data file in data", ""),
        (["--cluster", "lumi", "--ranks-per-node", "2", "--image", "no.sif",
          "model.d_model=262144"], MachineError,
         "small does not fit: ", "larger devices; to launch anyway: --force"),
        (["--cluster", "lumi", "--ranks-per-node", "2", "--image", "no.sif",
          "precision.kind=fp8", "precision.fp8.precise_blocks=0"], MachineError,
         "MI250X GCD has no known peak for fp8 matmuls", "--force"),
        (["--cluster", "local", "--nodes", "2"], LaunchError, "only this machine", ""),
        (["--cluster", "ssh", "--nodes", "2", "--ranks-per-node", "1", "--hosts", "n1"],
         LaunchError, "hosts has 1", ""),
        (["--cluster", "lumi", "--ranks-per-node", "1"], LaunchError,
         "singularity needs an image", "--image"),
    ],
)  # fmt: skip
def test_what_is_refused(
    project: Path, arguments: list[str], kind: type[UserError], problem: str, hint: str
) -> None:
    overrides = small_overrides(project / "corpus_text_document", 4)
    with pytest.raises(kind) as caught:
        run("tiny", "name=small", *overrides, "train.global_batch_size=8", *arguments)
    assert caught.value.exit_code == 2
    assert problem in caught.value.problem
    assert hint in caught.value.hint
    assert files(project) == set()
    assert not list(project.rglob("marker"))


def test_no_word_of_a_script_ends_what_bash_is_to_read(project: Path) -> None:
    folder = project / "a\nTASK\ntouch marker\nIFS= read -r task <<'TASK'"
    shutil.copytree(ROOT / "recipes" / "lumi", folder)
    with pytest.raises(LaunchError, match="has a control character, and would be a word of a job"):
        run(f"{folder.name}/13b.toml", "--cluster", "slurm", "--stages", "prepare")
    assert files(project) == set()


def test_the_stages_make_the_files_that_training_needs(project: Path) -> None:
    run("recipes/azure/175b.toml", "--cluster", "slurm", "--nodes", "16", "--stages", "all")
    assert (project / "data" / "slimpajama").is_dir()
    # Patterns stay until their files are there.
    kept = load_run(str(project / "runs/azure-175b/run.toml")).run.data
    assert kept.valid.prefixes == ("data/slimpajama/train_chunk_*_text_document[-15:]",)
    assert "_text_document" not in (project / "runs/azure-175b/job.sh").read_text()
    run("recipes/benchmark64/tgs.toml", "--cluster", "slurm", "--nodes", "8", "--stages", "all")
    script = (project / "runs/benchmark64-tgs/job.sh").read_text()
    made = re.findall(r"data/\w+_text_document.json", script)
    assert made == [
        "data/wikipedia_20220301_en_text_document.json",
        "data/openwebtext_Skylion007_text_document.json",
    ]


def test_stages_of_a_run_that_has_trained_keep_its_files(project: Path) -> None:
    (project / "data/slimpajama").mkdir(parents=True)
    for number in range(40):
        name = f"data/slimpajama/train_chunk_{number:02d}_text_document.bin"
        (project / name).write_bytes(bytes(8))
    begun = find_token_files(load_run("recipes/azure/175b.toml").run)
    (project / "runs/azure-175b/checkpoints/step-00000004").mkdir(parents=True)
    (project / "runs/azure-175b/run.toml").write_text(render_run(begun))
    (project / "data/slimpajama/train_chunk_40_text_document.bin").write_bytes(bytes(8))
    run("recipes/azure/175b.toml", "--cluster", "slurm", "--nodes", "16", "--stages", "all")
    kept = load_run(str(project / "runs/azure-175b/run.toml")).run
    assert kept.data == begun.data
    assert len(kept.data.train.prefixes) == 10


def test_a_missing_image_is_found_before_the_queue(project: Path) -> None:
    with (project / "own.toml").open("a") as file:
        file.write('[launch.container]\nruntime = "apptainer"\n')
    with pytest.raises(LaunchError, match=f"there is no image {project}/x.sif"):
        run(*small(project), "--image", "x.sif")
    assert files(project) == set()


def test_missing_data_is_found_before_the_queue(project: Path) -> None:
    (project / "corpus_text_document.bin").unlink()
    with pytest.raises(DataError, match="corpus_text_document"):
        run(*small(project))
    assert not (project / "said").exists()


def test_a_missing_tokenizer_is_found_before_the_queue(project: Path) -> None:
    (project / "recipes").unlink()
    shutil.copytree(ROOT / "recipes", project / "recipes")
    oscar = project / "recipes/lumi/data/oscar.toml"
    oscar.write_text(oscar.read_text().replace('"gpt2"', '"data/mine"'))
    with pytest.raises(
        DataError, match=r"oscar.toml: the tokenizer data/mine does not exist"
    ) as caught:
        run("recipes/lumi/13b.toml", "--cluster", "slurm", "--stages", "all", "--nodes", "2")
    assert "gpt2 means GPT-2's, which ships" in caught.value.hint
    assert f"trainyard prepare {oscar.relative_to(project)} --train-tokenizer" in caught.value.hint
    assert files(project) == set()


def test_a_run_that_is_training(project: Path) -> None:
    with hold(project / "runs" / "small"), pytest.raises(LaunchError, match="is in use: "):
        run(*small(project))


@pytest.mark.parametrize(("state", "is_refused"), [("PENDING", 1), ("RUNNING", 1), ("FAILED", 0)])
def test_a_run_that_has_a_job(project: Path, state: str, is_refused: bool) -> None:
    run(*small(project))
    squeue = project / "bin" / "squeue"
    squeue.write_text(f"#!/bin/bash\n[[ $* = *--jobs=4712* ]] && printf '%-32s' {state}\n")
    squeue.chmod(0o755)
    with pytest.raises(LaunchError) if is_refused else nullcontext() as caught:
        run(*small(project))
    assert (project / "said").read_text().count("job.sh") == 1 + (not is_refused)
    if caught:
        assert caught.value.problem.endswith(f"small already has job 4712 on own.toml: {state}")
        assert "cancel it (scancel 4712), or launch under another name" in caught.value.hint


def test_a_run_that_is_to_stay_down(project: Path) -> None:
    (project / "runs" / "small").mkdir(parents=True)
    (project / "runs" / "small" / "STOP").touch()
    with pytest.raises(GuardError, match="there is a file"):
        run(*small(project))
    assert not (project / "said").exists()


def test_a_folder_that_cannot_be_written(project: Path) -> None:
    (project / "runs").write_text("in the way")
    with pytest.raises(MachineError, match="cannot be written: Not a directory"):
        run(*small(project))


def test_show_cluster(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    show(["cluster", "lumi"])
    said = capsys.readouterr().out
    assert "8 x MI250X GCD a node" in said
    assert "CPUs 49-55, mask 0xfe000000000000" in said
    assert "# Figures: github.com/Lumi-supercomputer, lumi-userguide (October 2024)" in said
    assert "Slurm, srun, singularity with an image of yours" in said
    (project / "mine.toml").write_text('extends = "lumi"\n[launch]\naccount = "project_1"\n')
    show(["cluster", "mine.toml"])
    said = capsys.readouterr().out
    assert said.index('account = "project_1"') < said.index("# Figures: github.com/Lumi")
    show(["cluster"])
    assert capsys.readouterr().out.startswith("clusters: azure-ndv5, azure-ndv5-h200, frontier")
    with pytest.raises(MachineError, match="no cluster named 'lumy'"):
        show(["cluster", "lumy"])


@pytest.mark.parametrize(
    ("prefix", "is_made"),
    [
        ("data/web_text_document", True),
        ("data/web_*_document", True),
        ("./data/*_text_document[:-1]", True),
        ("dat*/**/web_text_*", True),
        ("data/sub*/*_text_document", False),
        ("data/web_x_text_document", False),
        ("data/web_[0-9]*_text_document", False),
        ("*_text_document", False),
    ],
)
def test_which_prefixes_a_data_file_makes(prefix: str, is_made: bool) -> None:
    corpus = Corpus(inputs=("web",), output="data/web", tokenizer="gpt2")
    assert makes(corpus, prefix) == is_made
    # Several outputs have numbers.
    corpus = corpus.model_copy(update={"files_per_output": 2})
    assert makes(corpus, "data/web_[0-9]*_text_document[:5]")
    assert makes(corpus, "data/web_1?_text_document")
    assert makes(corpus, "data/web_999_text_document")
    assert not makes(corpus, "data/web_text_document")
    assert not makes(corpus, "data/we_[0-9]*_text_document")
