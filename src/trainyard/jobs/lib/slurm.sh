# Slurm: one task per rank, or one torchrun per node.

# Since Slurm 22.05, srun no longer inherits this from sbatch.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then step_options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
if [ -n "$is_stage" ]; then
  exec srun --nodes=1 --ntasks=1 --export=ALL "${step_options[@]}" bash -c "$(print_rank)"
fi

job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0}
export TRAINYARD_JOB="$job-$start"
if [ -n "$is_torchrun" ]; then
  # Rendezvous on the first node, at a port of this start; torchrun reads the PET variables.
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  export MASTER_ADDR MASTER_PORT=$((12000 + (SLURM_JOB_ID + start) % 18000))
  export PET_RDZV_ENDPOINT="$MASTER_ADDR:$MASTER_PORT" PET_RDZV_ID="$TRAINYARD_JOB"
fi

# All ranks end when one fails.
start_ranks() {
  exec srun --nodes="$n_nodes" --ntasks=$((n_nodes * tasks_per_node)) \
    --ntasks-per-node="$tasks_per_node" --export=ALL --kill-on-bad-exit=1 \
    "${step_options[@]}" bash -c "$rank"
}

clean_up() {
  timeout 10 srun --nodes="$n_nodes" --ntasks="$n_nodes" --ntasks-per-node=1 \
    rm -rf "$scratch/trainyard-$TRAINYARD_JOB" 2> /dev/null
}

again() {
  local bad
  bad=$(bad_hosts | paste -sd,)
  # Only a queued job accepts excluded nodes; requeueing sends SIGTERM to this script.
  trap '' TERM
  scontrol requeue "$job" || return
  [ -z "$bad" ] || scontrol update JobId="$job" ExcNodeList="$bad"
}

# Nodes of the previous start that are down now have failed during it.
find_lost_nodes() {
  local last
  last=$(grep " start $job " "$folder/starts.log" 2> /dev/null | tail -n 1)
  if [ -n "$last" ]; then
    sinfo --noheader --Node --nodes="${last##* }" --states=down,fail,drain --format=%N | sort -u \
      > "$folder/logs/lost_hosts"
    if [ -s "$folder/logs/lost_hosts" ]; then
      tell lost "$job" "$(paste -sd, "$folder/logs/lost_hosts")"
      blame
    fi
    rm -f "$folder/logs/lost_hosts"
  fi
  if [ -n "$(bad_hosts)" ] &&
    scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -xF "$(bad_hosts)"; then
    echo "failed twice and is excluded" >&2
    again
    exit 75
  fi
}

# Only the ranks can save.
trap 'is_warned=yes; scancel --signal=USR1 "$job"' USR1
trap '[ -n "$is_warned" ] || is_ended=yes' TERM
begin
find_lost_nodes
run_job "$SLURM_JOB_NODELIST"
