#!/bin/bash
# wikipedia: on this machine. Made by
#     trainyard launch recipes/laptop/wikipedia.toml --cluster local --nodes 1
# Started again by hand, it continues the run:
#     bash /project/me/runs/wikipedia/job.sh

cd /project/me || exit 2

folder=runs/wikipedia
is_stage=''
is_array=''
n_nodes=1
tasks_per_node=1
restart_limit=3
needs=()
environment=()
scratch=/tmp
device_variable=''
local_rank=''
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli train runs/wikipedia/run.toml)
