#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster mpi --nodes 2 --hosts n1,n2
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
local_rank=MPI_LOCALRANKID
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli train runs/lumi-125m/run.toml)
mpi=mpich
mpiexecs=(mpiexec.hydra mpiexec)
mpiexec_options=()
binding=()
all_hosts=(n1 n2)
