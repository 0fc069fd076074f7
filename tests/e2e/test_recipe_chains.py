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
from tests.cluster.small_recipes import SMALL, shorten_slimpajama, write_python
from tests.cluster.stand_in import Queue
from tests.command import trainyard
from tests.corpus.fetching.test_fetch import Server, serving
from tests.corpus.sources.test_wikipedia import page, write
from tests.e2e.test_recipes_planned import commands
from tests.golden.render_jobs import RECIPES
from tests.training.conftest import lines_of

from trainyard.config.load import load_run

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
CORPORA = {
    "msamp": ["wikipedia"],
    "azure": ["slimpajama"],
    "benchmark64": ["openwebtext", "wikipedia-20220301"],
    "lumi": ["oscar-1gb"],
    "polaris": [],
}
CHAINS = {name: cluster for name, (cluster, *_) in RECIPES.items() if cluster != "local"}
SHORT = (*SMALL, "train.length='3 steps'")
EMULATED = ["precision.fp8.emulate=true", "precision.fp8.precise_blocks=0"]
# The cluster of a guide, with nodes of one CPU.
CLUSTER = """\
extends = "{cluster}"
gpu = "cpu"
devices_per_node = 1

[launch]
python = "{project}/python"
scratch = "{project}/scratch"

[launch.prepare]
tasks = 2
workers = 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The corpora that `prepare --fetch` knows, small."""
    with serving() as server:
        publish_corpora(server, tmp_path_factory.mktemp("corpora"))
        yield server


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the recipes, and with the data that nobody fetches."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shorten_slimpajama(tmp_path)
    lines = "\n".join(json.dumps({"sequence": text}) for text in texts(4))
    (tmp_path / "mine.jsonl").write_text(lines)
    return tmp_path


def run(project: Path, *words: str, **environment: str) -> None:
    done = trainyard(*words, folder=project, **environment)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def assert_trained(folder: Path) -> None:
    assert json.loads((folder / "outcome.json").read_text())["exit_code"] == 0
    assert [line["step"] for line in lines_of(folder, "train")] == [1, 2, 3]


# The stages of PBS too, which Polaris has no use for.
@pytest.mark.parametrize(
    ("recipe", "cluster"), [*CHAINS.items(), ("lumi/125m", "polaris")], ids=lambda text: text
)
def test_a_chain_of_jobs(recipe: str, cluster: str, project: Path, server: Server) -> None:
    corpora = CORPORA[recipe.partition("/")[0]]
    if not corpora:
        output = ("-o", "data/genslm_subsample_200k", "--json-key", "sequence")
        run(project, "prepare", "mine.jsonl", *output, "--tokenizer", "gpt2")
    write_python(project / "python", server.address)
    (project / "scratch").mkdir()
    (project / "here.toml").write_text(CLUSTER.format(cluster=cluster, project=project))
    queue = Queue(project / "queue")
    options = ["--cluster", "here.toml", "--nodes", "1", "name=chain"]
    options += ["--stages", "all"] if corpora else []
    if cluster != "polaris":
        (project / "any.image").touch()
        options += ["--image", "./any.image"]
    overrides = [*SHORT, *(EMULATED if "fp8" in recipe else [])]
    words = ["launch", f"recipes/{recipe}.toml", *overrides, *options]
    run(project, *words, PATH=queue.path, OMP_NUM_THREADS="1")
    queue.run()
    expected = []
    for name in corpora:
        short = {"oscar-1gb": "oscar", "wikipedia-20220301": "wikipedia"}.get(name, name)
        expected += [f"download-{name}: 1 task, ended with 0"]
        expected += [f"prepare-{short}: 2 tasks, ended with 0"]
    assert queue.log == [*expected, "train: 1 task, ended with 0"], queue.said()
    assert_trained(project / "runs" / "chain")


def test_a_sample_of_slimpajama_takes_its_place(project: Path, server: Server) -> None:
    text = (project / "recipes/azure/README.md").read_text(encoding="utf-8")
    for words in commands(text):
        if words[1] == "prepare" and "slimpajama-6b" in " ".join(words):
            mirror = ["--mirror", server.address] if "--fetch" in words else []
            run(project, *words[1:], *mirror)
    run(project, "train", "recipes/azure/64m.toml", *SHORT)
    assert_trained(project / "runs/azure-64m")
    data = load_run(str(project / "runs/azure-64m/run.toml")).run.data
    lists = (data.train.prefixes, data.test.prefixes, data.valid.prefixes)
    assert [len(prefixes) for prefixes in lists] == [18, 15, 15]


def test_the_laptop(project: Path) -> None:
    """The commands of its README, in their order."""
    (project / "my-texts").mkdir()
    (project / "my-texts/mine.txt").write_text("\n".join(texts(4)))
    (project / "corpora/wikipedia").mkdir(parents=True)
    words = texts(2)  # the recipe drops short articles
    pages = [page(f"Page {n}", " ".join(words[n : n + 10])) for n in range(0, len(words), 10)]
    write(project / "corpora/wikipedia" / DUMP, pages)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for words in commands((ROOT / "recipes/laptop/README.md").read_text(encoding="utf-8")):
        is_launch = words[1] == "launch"
        small = ["320" if word in ("8192", "4096") else word for word in words[1:]]
        run(project, *small, *(SHORT if is_launch else ()), PATH=path)
        if is_launch:
            named = [word.removeprefix("name=") for word in words if word.startswith("name=")]
            name = (named or [load_run(str(project / words[2])).run.name])[0]
            assert_trained(project / "runs" / name)
