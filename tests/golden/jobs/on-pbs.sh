#!/bin/bash -l
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster pbs --nodes 2 --time 12:00:00
# Started again by hand, it continues the run:
#     qsub /project/me/runs/lumi-125m/job.sh
#PBS -N lumi-125m
#PBS -l select=2:ngpus=8:mpiprocs=8
#PBS -l place=scatter:excl
#PBS -l walltime=12:00:00
#PBS -j oe
#PBS -o /project/me/runs/lumi-125m/
#PBS -r y

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
job_variable=PBS_JOBID
hosts_variable=PBS_NODEFILE
limit_seconds=43200
requeue=(qrerun)
resubmit=(qsub /project/me/runs/lumi-125m/job.sh)
