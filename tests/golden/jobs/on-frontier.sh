#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster frontier --nodes 2 --account ABC123
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/lumi-125m/job.sh
#SBATCH --job-name=lumi-125m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --account=ABC123
#SBATCH --partition=batch
#SBATCH --time=02:00:00
#SBATCH --output=/project/me/runs/lumi-125m/job-%j.log
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH -S 8
#SBATCH --network=disable_rdzv_get
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180

cd /project/me || exit 2

# Setup of the cluster.
module load PrgEnv-gnu/8.7.0
module load cpe/26.03
module load miniforge3/23.11.0-0
module load rocm/7.1.1
module load rccl-net-plugin
module load craype-accel-amd-gfx90a
export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH

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
  NCCL_NET_GDR_LEVEL=PHB
  NCCL_CROSS_NIC=1
  HSA_FORCE_FINE_GRAIN_PCIE=1
  FI_MR_CACHE_MONITOR=kdreg2
  FI_CXI_DISABLE_HOST_REGISTER=1
  FI_CXI_DEFAULT_CQ_SIZE=131072
  FI_CXI_DEFAULT_TX_SIZE=2048
  FI_CXI_RDZV_PROTO=alt_read
  FI_CXI_RDZV_EAGER_SIZE=0
  FI_CXI_RDZV_THRESHOLD=0
  FI_CXI_RDZV_GET_MIN=0
  FI_CXI_RX_MATCH_MODE=hybrid
  OMP_NUM_THREADS=7
)
scratch=/tmp
device_variable=ROCR_VISIBLE_DEVICES
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli train runs/lumi-125m/run.toml)
is_torchrun=''
step_options=(
  --cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000
)
