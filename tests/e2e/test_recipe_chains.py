"""Every recipe by its whole chain of jobs, from an empty folder to the last step of training.

`launch --stages all` with the cluster of its guide, below a stand-in for its scheduler that really
runs the jobs; the corpora come from a server on this machine. Models and amounts are small, and
ranks are CPUs; scripts, stages, files and run files are as they are shipped.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.mirror import DUMP, publish_corpora, texts
from tests.cluster.stand_in import Queue
from tests.command import trainyard
from tests.corpus.fetching.test_fetch import Server, serving
from tests.corpus.sources.test_wikipedia import page, write
from tests.e2e.test_recipes_data import SMALL
from tests.e2e.test_recipes_planned import commands
from tests.golden.render_jobs import RECIPES

from trainyard.config.load import load_run

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
CORPORA = {
    "msamp": ["wikipedia"],
    "azure": ["slimpajama"],
    "benchmark64": ["openwebtext", "wikipedia"],
    "lumi": ["oscar"],
    "polaris": [],
}
CHAINS = {name: cluster for name, (cluster, *_) in RECIPES.items() if cluster != "local"}
EMULATED = ["precision.fp8.emulate=true", "precision.fp8.precise_blocks=0"]
# The cluster of a guide, with nodes of one CPU. Its Python knows a mirror of what is fetched.
CLUSTER = """\
extends = "{cluster}"
gpu = "cpu"
devices_per_node = 1

[launch]
python = "{python}"
scratch = "{scratch}"

[launch.prepare]
tasks = 2
workers = 1
"""
PYTHON = """\
#!/bin/bash
case " $* " in *" --fetch "*) set -- "$@" --mirror {mirror};; esac
exec {python} "$@"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The corpora that `prepare --fetch` knows, small."""
    folder: Path = tmp_path_factory.mktemp("corpora")
    with serving() as server:
        publish_corpora(server, folder)
        yield server


def write_inputs(project: Path, guide: str) -> None:
    """Writes what the guide expects to be there, and nothing else."""
    if guide == "polaris":  # it prepares none
        lines = "\n".join(json.dumps({"sequence": text}) for text in texts(4))
        (project / "mine.jsonl").write_text(lines)
        made = trainyard(
            "prepare", "mine.jsonl", "-o", "data/genslm_subsample_200k", "--tokenizer", "gpt2",
            "--json-key", "sequence", folder=project,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    if guide == "azure":  # 72 files of as many shards, not of 59,166
        path = project / "recipes/azure/data/slimpajama.toml"
        text = path.read_text()
        assert "files_per_output = 822" in text
        path.write_text(text.replace("files_per_output = 822", "files_per_output = 1"))


def write_cluster(project: Path, cluster: str, mirror: str) -> None:
    python = project / "python"
    python.write_text(PYTHON.format(mirror=mirror, python=sys.executable))
    python.chmod(0o755)
    scratch = project / "scratch"
    scratch.mkdir()
    text = CLUSTER.format(cluster=cluster, python=python, scratch=scratch)
    (project / "here.toml").write_text(text)


def assert_trained(folder: Path) -> None:
    assert json.loads((folder / "outcome.json").read_text())["exit_code"] == 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]


# The stages of PBS too, which Polaris has no use for.
@pytest.mark.parametrize(
    ("recipe", "cluster"), [*CHAINS.items(), ("lumi/125m", "polaris")], ids=lambda text: text
)
def test_a_chain_of_jobs(recipe: str, cluster: str, tmp_path: Path, server: Server) -> None:
    guide = recipe.partition("/")[0]
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    write_inputs(tmp_path, guide)
    write_cluster(tmp_path, cluster, server.address)
    queue = Queue(tmp_path / "queue")
    options = ["--cluster", "here.toml", "--nodes", "1", "name=chain"]
    if cluster != "polaris":
        (tmp_path / "any.image").touch()
        options += ["--image", "./any.image"]
    overrides = [*SMALL, "train.batch_ramp=none", "log.interval=1"]
    if "fp8" in recipe:
        overrides += EMULATED
    stages = ["--stages", "all"] if CORPORA[guide] else []
    done = trainyard(
        "launch", f"recipes/{recipe}.toml", *overrides, *options, *stages,
        folder=tmp_path, PATH=queue.path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    queue.run()
    names = {"oscar": "oscar-1gb"}
    if guide == "benchmark64":
        names["wikipedia"] = "wikipedia-20220301"
    fetched = [f"download-{names.get(name, name)}: 1 task, ended with 0" for name in CORPORA[guide]]
    made = [f"prepare-{name}: 2 tasks, ended with 0" for name in CORPORA[guide]]
    expected = [line for pair in zip(fetched, made, strict=True) for line in pair]
    assert queue.log == [*expected, "train: 1 task, ended with 0"], queue.said()
    assert_trained(tmp_path / "runs" / "chain")
    print(f"{recipe} on {cluster}: {'; '.join(queue.log)}")  # noqa: T201  shown by pytest -rP


def test_the_laptop(tmp_path: Path) -> None:
    """The commands of its README, in their order."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts/mine.txt").write_text("\n".join(texts(4)))
    (tmp_path / "corpora/wikipedia").mkdir(parents=True)
    words = texts(2)  # the recipe drops short articles
    pages = [page(f"Page {n}", " ".join(words[n : n + 10])) for n in range(0, len(words), 10)]
    write(tmp_path / "corpora/wikipedia" / DUMP, pages)
    python = Path(sys.executable).parent
    for words in commands((ROOT / "recipes/laptop/README.md").read_text(encoding="utf-8")):
        small = [*SMALL, "log.interval=1"] if words[1] == "launch" else []
        words = ["320" if word in ("8192", "4096") else word for word in words]
        path = f"{python}:{os.environ['PATH']}"
        done = trainyard(*words[1:], *small, folder=tmp_path, PATH=path)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        if small:
            named = [word.removeprefix("name=") for word in words if word.startswith("name=")]
            name = (named or [load_run(str(tmp_path / words[2])).run.name])[0]
            assert_trained(tmp_path / "runs" / name)
            print(f"laptop: launch {words[2]} as {name}")  # noqa: T201
