from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from trainyard.config.cluster import Launch, cluster_names, cluster_texts, read_cluster
from trainyard.errors import ConfigError, MachineError, UserError

OWN = """\
extends = "lumi"
description = "LUMI, our project"

[launch]
account = "project_465000000"
time = "12:00:00"

[launch.environment]
NCCL_DEBUG = "WARN"

[launch.container]
image = "/projappl/project_465000000/trainyard.sif"
"""
SLURM = ("azure-ndv5", "azure-ndv5-h200", "frontier", "lumi", "perlmutter", "slurm")
SCHEDULERS = {
    **dict.fromkeys(SLURM, "slurm"),
    **{"local": "local", "mpi": "mpi", "pbs": "pbs", "polaris": "pbs", "ssh": "ssh"},
}


def write(path: Path, **launch: Any) -> str:
    path.write_text(tomli_w.dumps({"gpu": "h100", "launch": launch}), encoding="utf-8")
    return str(path)


def test_all_clusters_are_there() -> None:
    assert cluster_names() == sorted(SCHEDULERS)


@pytest.mark.parametrize("name", cluster_names())
def test_a_shipped_cluster_names_its_sources_and_starts_jobs_as_it_should(name: str) -> None:
    sources = ("github.com/", "docs.nersc.gov", "datasheet", "Measured")
    for _, text in cluster_texts(name):
        assert text.startswith("# ") and any(word in text for word in sources)
    cluster = read_cluster(name)
    assert cluster.launch.scheduler == SCHEDULERS[name]
    assert not cluster.launch.cpu_lists or (
        len(cluster.launch.cpu_lists) == cluster.devices_per_node
    )


def test_a_file_that_extends_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    own, lumi = read_cluster(str(path)), read_cluster("lumi")
    assert own.description == "LUMI, our project"
    assert own.gpu == lumi.gpu
    assert own.launch.account == "project_465000000"
    assert own.launch.partition == lumi.launch.partition == "standard-g"
    assert own.launch.container.mounts == lumi.launch.container.mounts
    assert own.launch.container.runtime == "singularity"
    assert own.launch.environment == lumi.launch.environment | {"NCCL_DEBUG": "WARN"}
    assert [place for place, _ in cluster_texts(str(path))] == [str(path), "cluster lumi"]

    path = tmp_path / "more.toml"
    path.write_text('extends = "own.toml"\n[launch]\ntime = "01:00:00"\n')
    launch = read_cluster(str(path)).launch
    fields = (launch.time, launch.account, launch.partition)
    assert fields == ("01:00:00", "project_465000000", "standard-g")


def test_files_that_extend_each_other(tmp_path: Path) -> None:
    path = tmp_path / "ring.toml"
    path.write_text('extends = "ring.toml"')
    with pytest.raises(ConfigError, match=r"ring\.toml: a chain of more than 4 files"):
        read_cluster(str(path))


def test_the_command_line_comes_last() -> None:
    launch = read_cluster("lumi", {"time": "00:30:00", "container": {"image": "x.sif"}}).launch
    assert (launch.time, launch.container.image) == ("00:30:00", "x.sif")
    assert launch.container.runtime == "singularity"


@pytest.mark.parametrize(
    ("text", "time"),
    [("24 hours", "24:00:00"), ("90 minutes", "1:30:00"), ("1-12:30:05", "36:30:05")],
)
def test_times_as_people_and_slurm_write_them(text: str, time: str) -> None:
    assert read_cluster("slurm", {"time": text}).launch.time == time


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("lumii", "no cluster named 'lumii'", "did you mean lumi?"),
        ("azure", "no cluster named 'azure'", "did you mean azure-ndv5 or azure-ndv5-h200?"),
        ("missing.toml", "cannot read the cluster file missing.toml", "known: "),
    ],
)
def test_no_such_cluster(name: str, problem: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        read_cluster(name)
    assert problem in caught.value.problem
    assert hint in caught.value.hint
    assert isinstance(caught.value, MachineError | ConfigError)


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"scheduler": "lsf"}, "launch.scheduler"),
        ({"qos": "debug"}, "launch.qos: unknown field"),
        ({"account": "a;touch marker"}, "'a;touch marker' is not a name"),
        ({"partition": "gpu\n#SBATCH --mail"}, "is not a name"),
        ({"partition": "'"}, "is not a name"),
        ({"hosts": ["n1", "n2 n3"]}, "'n2 n3' is not a name"),
        ({"hosts": ["-oProxyCommand=touch marker"]}, "is not a name"),
        ({"time": "12"}, "'12' is not a time: write 12:00:00"),
        ({"time": "12:60:00"}, "'12:60:00' is not a time"),
        ({"time": "00:00:00"}, "'00:00:00' leaves the job no time"),
        ({"options": ["exclusive"]}, "is not a scheduler option: those begin with -"),
        ({"options": ["--a\nrm -rf x"]}, "a line break"),
        ({"options": ["--nodes={n}"]}, "{n} in '--nodes={n}' is unknown: use {nodes} or {ranks}"),
        ({"options": ["--comment='x"]}, "unbalanced quotes in"),
        ({"setup": ["module load a\nmodule load b"]}, "a line break"),
        ({"environment": {"A B": "1"}}, "'A B' is not the name of an environment variable"),
        ({"environment": {"A": "1\n2"}}, "a line break"),
        ({"cpu_lists": ["0-7;8"]}, "'0-7;8' is not a list of CPUs"),
        ({"device_variable": "A=1"}, "'A=1' is not the name of an environment variable"),
        ({"scratch": "/tmp\n"}, "a line break"),
        ({"container": {"runtime": "docker"}}, "launch.container.runtime"),
        ({"container": {"mounts": ["/a:/b:ro:x"]}}, "is not a mount"),
        ({"container": {"mounts": ["/a,/b"]}}, "is not a mount"),
        ({"prepare": {"tasks": 0}}, "launch.prepare.tasks"),
    ],
)
def test_mistakes_in_the_table(tmp_path: Path, launch: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "own.toml", **launch)
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    assert says in caught.value.problem
    assert path in caught.value.problem
    assert "its [launch] table scheduler, start, " in caught.value.hint


def test_every_field_of_the_table_is_documented() -> None:
    from trainyard.config.schema import field_manuals

    assert [name for name, text in field_manuals(Launch).items() if len(text) < 9] == []
