#!/bin/bash
# rates: 3 tasks of a node each. Made by
#     trainyard sweep recipes/lumi/125m.toml --cluster slurm --nodes 3
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/rates/job.sh
#SBATCH --job-name=rates
#SBATCH --array=0-2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=02:00:00
#SBATCH --output=/project/me/runs/rates/job-%A_%a.log
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180

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
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli sweep runs/rates --stop-hopeless)
is_torchrun=''
step_options=()
