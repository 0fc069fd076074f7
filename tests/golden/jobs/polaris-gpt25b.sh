#!/bin/bash -l
# polaris-gpt25b-4096: 16 nodes of 4 ranks. Made by
#     trainyard launch recipes/polaris/gpt25b.toml --cluster polaris --nodes 16 --account MyProject
# Started again by hand, it continues the run:
#     qsub /project/me/runs/polaris-gpt25b-4096/job.sh
#PBS -N polaris-gpt25b-4096
#PBS -l select=16:system=polaris
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
#PBS -k doe
#PBS -l walltime=03:00:00
#PBS -q prod
#PBS -A MyProject
#PBS -j oe
#PBS -o /project/me/runs/polaris-gpt25b-4096/
#PBS -r y

cd /project/me || exit 2

# Setup of the cluster.
module use /soft/modulefiles
module load conda
conda activate
export LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib:$LD_LIBRARY_PATH

folder=runs/polaris-gpt25b-4096
is_stage=''
is_array=''
n_nodes=16
tasks_per_node=4
restart_limit=3
needs=()
environment=(
  TRAINYARD_DEVICES=4
  'NCCL_NET=AWS Libfabric'
  NCCL_NET_GDR_LEVEL=PHB
  NCCL_CROSS_NIC=1
  NCCL_COLLNET_ENABLE=1
  FI_CXI_DISABLE_HOST_REGISTER=1
  FI_MR_CACHE_MONITOR=userfaultfd
  FI_CXI_DEFAULT_CQ_SIZE=131072
  GLOO_SOCKET_IFNAME=hsn0
  OMP_NUM_THREADS=8
  https_proxy=http://proxy.alcf.anl.gov:3128
)
scratch=/local/scratch
device_variable=''
local_rank=PMI_LOCAL_RANK
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli train runs/polaris-gpt25b-4096/run.toml)
mpi=pals
mpiexecs=(mpiexec)
mpiexec_options=()
binding=(--cpu-bind list:24-31:16-23:8-15:0-7)
job_variable=PBS_JOBID
hosts_variable=PBS_NODEFILE
limit_seconds=10800
requeue=(qrerun)
resubmit=(qsub /project/me/runs/polaris-gpt25b-4096/job.sh)
