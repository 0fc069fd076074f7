#!/bin/bash
# rates: 4 tasks of a node each. Made by
#     trainyard sweep recipes/lumi/125m.toml --cluster lumi --nodes 4
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/rates/job.sh
#SBATCH --job-name=rates
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --account=project_465000001
#SBATCH --partition=standard-g
#SBATCH --time=48:00:00
#SBATCH --output=/project/me/runs/rates/job-%A_%a.log
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=480G
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
environment=(
  NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
  GLOO_SOCKET_IFNAME=hsn0
  NCCL_NET_GDR_LEVEL=3
  CXI_FORK_SAFE=1
  CXI_FORK_SAFE_HP=1
  FI_CXI_DISABLE_CQ_HUGETLB=1
  OMP_NUM_THREADS=7
)
scratch=/tmp
device_variable=''
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
command=(-m trainyard.cli sweep runs/rates --stop-hopeless)
is_torchrun=''
step_options=()
