#!/bin/bash
# prepare-wikipedia: 32 tasks. Made by
#     trainyard launch recipes/msamp/345m-bf16.toml --cluster azure-ndv5 --nodes 1 --image /project/me/trainyard.sqsh --stages all
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/msamp-345m-bf16/jobs/prepare-wikipedia.sh
#SBATCH --job-name=prepare-wikipedia
#SBATCH --array=0-31
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=hpc
#SBATCH --output=/project/me/runs/msamp-345m-bf16/jobs/prepare-wikipedia-%A_%a.log
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append

cd /project/me || exit 2

folder=runs/msamp-345m-bf16
is_stage=yes
is_array=''
n_nodes=32
tasks_per_node=1
restart_limit=3
needs=()
environment=(
  NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml
  NCCL_IB_PCI_RELAXED_ORDERING=1
  NCCL_IGNORE_CPU_AFFINITY=1
  NCCL_SOCKET_IFNAME=eth0
  GLOO_SOCKET_IFNAME=eth0
  CUDA_DEVICE_ORDER=PCI_BUS_ID
  NCCL_PXN_DISABLE=1
  NCCL_MIN_NCHANNELS=32
  NCCL_P2P_NET_CHUNKSIZE=2097152
  NCCL_IB_QPS_PER_CONNECTION=4
  UCX_TLS=rc
  UCX_NET_DEVICES=mlx5_ib0:1
  OMPI_MCA_coll_hcoll_enable=0
  OMP_NUM_THREADS=12
  NVIDIA_VISIBLE_DEVICES=void
  MELLANOX_VISIBLE_DEVICES=void
)
scratch=''
device_variable=''
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=()
python=python3
command=(-m trainyard.cli prepare recipes/msamp/data/wikipedia.toml --workers 32)
is_torchrun=''
step_options=(
  --container-image=/project/me/trainyard.sqsh
  --container-mounts=/project/me:/project/me,/tmp:/tmp
  --container-workdir=/project/me
  --no-container-mount-home
  --container-writable
)
