#!/bin/bash
# download-wikipedia: 1 task. Made by
#     trainyard launch recipes/msamp/345m-bf16.toml --cluster azure-ndv5 --nodes 1 --image /project/me/trainyard.sqsh --stages all
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/msamp-345m-bf16/jobs/download-wikipedia.sh
#SBATCH --job-name=download-wikipedia
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=hpc
#SBATCH --output=/project/me/runs/msamp-345m-bf16/jobs/download-wikipedia-%j.log
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append

cd /project/me || exit 2

IFS= read -r -d '' task <<'TASK'
export NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml
export NCCL_IB_PCI_RELAXED_ORDERING=1
export NCCL_IGNORE_CPU_AFFINITY=1
export NCCL_SOCKET_IFNAME=eth0
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export NCCL_PXN_DISABLE=1
export NCCL_MIN_NCHANNELS=32
export NCCL_P2P_NET_CHUNKSIZE=2097152
export NCCL_IB_QPS_PER_CONNECTION=4
export UCX_TLS=rc
export UCX_NET_DEVICES=mlx5_ib0:1
export OMPI_MCA_coll_hcoll_enable=0
export OMP_NUM_THREADS=12
exec python3 -P -m trainyard.cli prepare --fetch wikipedia -o corpora/wikipedia
TASK

step=(
  --nodes=1 --ntasks=1 --export=ALL
  --container-image=/project/me/trainyard.sqsh
  --container-mounts=/project/me:/project/me,/tmp:/tmp
  --container-workdir=/project/me
  --no-container-mount-home
  --container-writable
)
# Since Slurm 22.05, srun no longer inherits these from sbatch.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
exec srun "${step[@]}" bash -c "$task"
