#!/bin/bash
# msamp-345m-deepspeed-fp16: 1 node of 1 rank. Made by
#     trainyard launch recipes/msamp/345m-deepspeed-fp16.toml --cluster azure-ndv5 --nodes 1 --ranks-per-node 1 --image /project/me/trainyard.sqsh
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/msamp-345m-deepspeed-fp16/job.sh
#SBATCH --job-name=msamp-345m-deepspeed-fp16
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --output=/project/me/runs/msamp-345m-deepspeed-fp16/job-%j.log
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180

cd /project/me || exit 2

folder=runs/msamp-345m-deepspeed-fp16
is_stage=''
is_array=''
n_nodes=1
tasks_per_node=1
restart_limit=3
needs=()
environment=(
  TRAINYARD_DEVICES=1
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
)
scratch=/tmp
device_variable=''
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=()
python=python3
command=(-m trainyard.cli train runs/msamp-345m-deepspeed-fp16/run.toml)
is_torchrun=''
step_options=(
  --container-image=/project/me/trainyard.sqsh
  --container-mounts=/project/me:/project/me,/tmp:/tmp,/opt/microsoft:/opt/microsoft:ro
  --container-workdir=/project/me
  --no-container-mount-home
  --container-writable
  --container-env=NCCL_TOPO_FILE
  --cpu-bind=mask_cpu:0xffffff000000
)
