#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster lumi --nodes 2 --account project_465000001 --image /project/me/trainyard.sif
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/lumi-125m/job.sh
#SBATCH --job-name=lumi-125m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --account=project_465000001
#SBATCH --partition=standard-g
#SBATCH --time=48:00:00
#SBATCH --output=/project/me/runs/lumi-125m/job-%j.log
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=480G
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180

cd /project/me || exit 2

folder=runs/lumi-125m
is_stage=''
is_array=''
n_nodes=2
tasks_per_node=8
restart_limit=3
needs=()
environment=(
  TRAINYARD_DEVICES=1
  NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
  GLOO_SOCKET_IFNAME=hsn0
  'NCCL_NET=AWS Libfabric'
  NCCL_NET_GDR_LEVEL=3
  CXI_FORK_SAFE=1
  CXI_FORK_SAFE_HP=1
  FI_CXI_DISABLE_CQ_HUGETLB=1
  OMP_NUM_THREADS=7
)
scratch=/tmp
device_variable=ROCR_VISIBLE_DEVICES
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=(
  singularity exec --rocm
  --bind /project/me:/project/me
  --bind /var/spool/slurmd
  --bind /opt/cray
  --bind /usr/lib64/libcxi.so.1
  --bind /usr/lib64/libjansson.so.4
  --bind /scratch
  --bind /projappl
  --bind /flash
  --bind /appl
  --bind /pfs
  --pwd /project/me /project/me/trainyard.sif
)
python=python3
command=(-m trainyard.cli train runs/lumi-125m/run.toml)
is_torchrun=''
step_options=(
  --cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000
)
