#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster ssh --nodes 2 --hosts me@n1,me@n2,me@n3
# Started again by hand, it continues the run:
#     bash /project/me/runs/lumi-125m/job.sh

cd /project/me || exit 2

folder=runs/lumi-125m
is_stage=''
is_array=''
n_nodes=2
tasks_per_node=8
restart_limit=3
needs=()
environment=(TRAINYARD_DEVICES=8)
scratch=/tmp
device_variable=''
local_rank=LOCAL_RANK
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli train runs/lumi-125m/run.toml)
script=/project/me/runs/lumi-125m/job.sh
ssh_options=()
all_hosts=(me@n1 me@n2 me@n3)
