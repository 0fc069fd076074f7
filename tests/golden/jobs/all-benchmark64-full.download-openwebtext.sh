#!/bin/bash -l
# download-openwebtext: 1 task. Made by
#     trainyard launch recipes/benchmark64/full.toml --cluster polaris --nodes 16 --account MyProject --stages all
# Started again by hand, it continues the run:
#     qsub /project/me/runs/benchmark64-full/jobs/download-openwebtext.sh
#PBS -N download-openwebtext
#PBS -l select=1:system=polaris
#PBS -l filesystems=home:eagle
#PBS -k doe
#PBS -l walltime=24:00:00
#PBS -q capacity
#PBS -A MyProject
#PBS -j oe
#PBS -o /project/me/runs/benchmark64-full/jobs/
#PBS -r y

cd /project/me || exit 2

# Setup of the cluster.
module use /soft/modulefiles
module load conda
conda activate
export LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib:$LD_LIBRARY_PATH

export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export OMP_NUM_THREADS=8
export https_proxy=http://proxy.alcf.anl.gov:3128
exec python3 -P -m trainyard.cli prepare --fetch openwebtext -o corpora/openwebtext
