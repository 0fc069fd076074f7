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

folder=runs/benchmark64-full
is_stage=yes
is_array=''
n_nodes=1
tasks_per_node=1
restart_limit=3
needs=()
environment=(
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
scratch=''
device_variable=''
local_rank=PMI_LOCAL_RANK
cpus_of_rank=()
container=()
python=/project/me/.venv/bin/python
command=(-m trainyard.cli prepare --fetch openwebtext -o corpora/openwebtext)
mpi=pals
mpiexecs=(mpiexec)
mpiexec_options=()
binding=()
job_variable=PBS_JOBID
hosts_variable=PBS_NODEFILE
limit_seconds=86400
requeue=(qrerun)
resubmit=(qsub /project/me/runs/benchmark64-full/jobs/download-openwebtext.sh)
