#!/bin/bash
# lumi-125m: 2 nodes of 2 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster tests/golden/clusters/apptainer.toml --nodes 2
# Started again by hand, it continues the run:
#     bash /project/me/runs/lumi-125m/job.sh

cd /project/me || exit 2

folder=runs/lumi-125m
is_stage=''
is_array=''
n_nodes=2
tasks_per_node=2
restart_limit=3
needs=()
environment=(TRAINYARD_DEVICES=2)
scratch=/tmp
device_variable=''
local_rank=OMPI_COMM_WORLD_LOCAL_RANK
cpus_of_rank=(0-7 8-15)
container=(
  apptainer exec --nv
  --bind /project/me:/project/me
  --bind /data
  --pwd /project/me /images/trainyard.sif
)
python=python3
command=(-m trainyard.cli train runs/lumi-125m/run.toml)
mpi=openmpi
mpiexecs=(mpiexec.openmpi mpiexec)
mpiexec_options=(--allow-run-as-root --mca plm_rsh_args '-p 2222')
binding=()
all_hosts=(n1 n2 n3)
