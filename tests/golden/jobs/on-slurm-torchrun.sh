#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster tests/golden/clusters/torchrun.toml --nodes 2
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/lumi-125m/job.sh
#SBATCH --job-name=lumi-125m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --account=lab-42
#SBATCH --time=12:00:00
#SBATCH --output=/project/me/runs/lumi-125m/job-%j.log
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180

cd /project/me || exit 2

folder=runs/lumi-125m
is_stage=''
is_array=''
n_nodes=2
tasks_per_node=1
restart_limit=3
needs=()
environment=(
  TRAINYARD_DEVICES=8
  'NCCL_DEBUG=WARN; touch /tmp/marker'
  'GREETING=it'"'"'s $(hostname) and `hostname`'
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
)
scratch='/local disk/$USER'
device_variable=''
local_rank=SLURM_LOCALID
cpus_of_rank=()
container=()
python=python3
command=(
  -m torch.distributed.run --rdzv-backend=c10d
  --nnodes=2 --nproc-per-node=8
  --max-restarts=3 --signals-to-handle=SIGINT,SIGTERM,SIGHUP,SIGUSR1,SIGUSR2,SIGXCPU,SIGQUIT
  -m trainyard.cli train runs/lumi-125m/run.toml
)
is_torchrun=yes
step_options=(
  '--container-image=registry.example.org#lab/trainyard:1.0'
  '--container-mounts=/project/me:/project/me,/local disk/$USER:/local disk/$USER,/data:/data:ro'
  --container-workdir=/project/me
  --container-env=NCCL_DEBUG
)
