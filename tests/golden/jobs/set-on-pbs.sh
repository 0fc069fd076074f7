#!/bin/bash -l
# rates: 2 tasks of a node each. Made by
#     trainyard sweep recipes/lumi/125m.toml --cluster pbs --nodes 2
# Started again by hand, it continues the run:
#     qsub /project/me/runs/rates/job.sh
#PBS -N rates
#PBS -l select=1:ngpus=8:mpiprocs=8
#PBS -l place=scatter:excl
#PBS -l walltime=12:00:00
#PBS -J 0-1
#PBS -j oe
#PBS -o /project/me/runs/rates/
#PBS -r y

cd /project/me || exit 2

folder=runs/rates
is_stage=''
is_array=yes
n_nodes=1
tasks_per_node=1
restart_limit=3
needs=()
environment=()
scratch=/tmp
device_variable=''
local_rank=MPI_LOCALRANKID
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli sweep runs/rates --stop-hopeless)
mpi=mpich
mpiexecs=(mpiexec.hydra mpiexec)
mpiexec_options=()
binding=()
job_variable=PBS_JOBID
hosts_variable=PBS_NODEFILE
limit_seconds=43200
requeue=(qrerun)
resubmit=(false)
