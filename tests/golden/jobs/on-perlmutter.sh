#!/bin/bash
# lumi-125m: 4 nodes of 4 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster perlmutter --nodes 4 --account m0000_g
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/lumi-125m/job.sh
#SBATCH --job-name=lumi-125m
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --account=m0000_g
#SBATCH --time=12:00:00
#SBATCH --output=/project/me/runs/lumi-125m/job-%j.log
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180

cd /project/me || exit 2

folder=runs/lumi-125m
is_stage=''
is_array=''
n_nodes=4
tasks_per_node=4
restart_limit=3
needs=()
environment=(
  TRAINYARD_DEVICES=4
  'NCCL_NET=AWS Libfabric'
  NCCL_CROSS_NIC=1
  NCCL_SOCKET_IFNAME=hsn
  GLOO_SOCKET_IFNAME=hsn0
  OMP_NUM_THREADS=16
)
scratch=/tmp
device_variable=''
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli train runs/lumi-125m/run.toml)
is_torchrun=''
step_options=(
  --cpu-bind=mask_cpu:0xffff000000000000ffff000000000000,0xffff000000000000ffff00000000,0xffff000000000000ffff0000,0xffff000000000000ffff
)
