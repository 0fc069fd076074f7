# Slurm: one task per rank, or one torchrun per node.

# Since Slurm 22.05, srun no longer inherits this from sbatch. The process of an array's task starts
# all ranks of its node, on all CPUs.
if [ -n "$is_array" ]; then
  step_options+=(--cpu-bind=none)
elif [ -n "$SLURM_CPUS_PER_TASK" ]; then
  step_options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
fi
# The hooks of a container read these before its first program runs.
[ "${#environment[@]}" = 0 ] || export "${environment[@]}"
# The shell of an interactive job may be a step that holds the CPUs.
if [ -n "$is_here" ]; then step_options+=(--overlap); fi
if [ -n "$is_stage" ]; then
  exec srun --nodes=1 --ntasks=1 --export=ALL ${is_here:+--quit-on-interrupt} \
    "${step_options[@]}" bash -c "$(print_rank)"
fi

job=$SLURM_JOB_ID
# The number of the last task is also that of the whole array.
if [ -n "$SLURM_ARRAY_JOB_ID" ]; then job=${SLURM_ARRAY_JOB_ID}_$task; fi
start=${SLURM_RESTART_COUNT:-0}
if [ -n "$is_here" ]; then start=${TRAINYARD_START:-0}; fi
export TRAINYARD_JOB="$job-$start${is_here:+-$$}" # $$: others of the allocation
exclude=()

# All ranks end when one fails.
start_ranks() {
  exec srun --nodes="$n_nodes" --ntasks=$((n_nodes * tasks_per_node)) \
    --ntasks-per-node="$tasks_per_node" --export=ALL --kill-on-bad-exit=1 \
    "${exclude[@]}" "${step_options[@]}" bash -c "$rank"
}

clean_up() {
  timeout 10 srun --nodes="$n_nodes" --ntasks="$n_nodes" --ntasks-per-node=1 \
    "${exclude[@]}" rm -rf "$scratch/trainyard-$TRAINYARD_JOB" 2> /dev/null
}

again() {
  local bad
  if [ -n "$is_here" ]; then
    # Not shortly before the end of the allocation, when the ranks have saved.
    [ -n "$TRAINYARD_END" ] && [ $((TRAINYARD_END - $(date +%s))) -lt 600 ] && return
    [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ] && start_again
    return
  fi
  bad=$(bad_hosts | paste -sd,)
  # Only a queued job accepts excluded nodes; requeueing sends SIGTERM to this script.
  trap '' TERM
  scontrol requeue "$job" || return
  [ -z "$bad" ] || scontrol update JobId="$job" ExcNodeList="$bad"
}

# Nodes of the previous start that are down now have failed during it.
find_lost_nodes() {
  local last hosts bad
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
  [ -n "$(bad_hosts)" ] || return
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  bad=$(printf '%s\n' "${hosts[@]}" | grep -xF "$(bad_hosts)" | paste -sd,)
  [ -n "$bad" ] || return
  echo "failed twice and is excluded: $bad" >&2
  if [ -z "$is_here" ]; then
    again
    exit 75
  fi
  [ "$(good_hosts "${hosts[@]}" | wc -l)" -ge "$n_nodes" ] || exit 93
  exclude=(--exclude="$bad")
}

if [ -n "$is_here" ]; then
  end=$(squeue --noheader --jobs="$job" --format=%e 2> /dev/null)
  # Nothing would be a date: today.
  if [ -n "$end" ] && end=$(date -d "$end" +%s 2> /dev/null); then export TRAINYARD_END=$end; fi
  save_when_stopped
else
  # Only the ranks can save.
  trap 'is_warned=yes; scancel --signal=USR1 "$job"' USR1
  trap '[ -n "$is_warned" ] || is_ended=yes' TERM
fi
begin
find_lost_nodes
if [ -n "$is_torchrun" ]; then
  # Rendezvous on the first node, at a port of this start; torchrun reads the PET variables.
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "$(bad_hosts)" |
    head -n 1)
  export MASTER_ADDR MASTER_PORT=$((12000 + RANDOM % 18000))
  export PET_RDZV_ENDPOINT="$MASTER_ADDR:$MASTER_PORT" PET_RDZV_ID="$TRAINYARD_JOB"
fi
run_job "$SLURM_JOB_NODELIST"
