# A job of a scheduler that lists its hosts in a file, and sends no signal before the time limit.

if [ -n "$is_stage" ]; then run_rank; fi

job=${!job_variable}
start=$(cat "$folder/starts.log" 2> /dev/null | grep -cF " start $job ")
# The file may have one line per chunk or per rank.
mapfile -t hosts < <(awk '!seen[$0]++' "${!hosts_variable}")
if [ -n "$is_here" ]; then
  mapfile -t good < <(good_hosts "${hosts[@]}")
  if [ "${#good[@]}" -ge "$n_nodes" ]; then hosts=("${good[@]}"); fi
  hosts=("${hosts[@]:0:n_nodes}")
fi
if [ "${#hosts[@]}" != "$n_nodes" ]; then
  echo "error: the scheduler gave ${#hosts[@]} nodes, not $n_nodes (PBS: -l place=scatter?)" >&2
  exit 2
fi
if [ -n "$limit_seconds" ] && [ -z "$is_here" ]; then
  # When the scheduler will end this job, for training; some PBS report another limit here.
  export TRAINYARD_END=$(($(date +%s) + ${PBS_WALLTIME:-$limit_seconds}))
fi
export MASTER_ADDR="${hosts[0]}" MASTER_PORT=$((12000 + RANDOM % 18000))
export TRAINYARD_JOB="${job//[^A-Za-z0-9]/_}-$start${is_here:+-$$}" # $$: others of the allocation

again() {
  local next_job
  if [ -n "$is_here" ]; then start_again; fi
  # Only for operators on many machines.
  "${requeue[@]}" "$job" 2> /dev/null && return
  next_job=$("${resubmit[@]}") || return
  # From now on, status queries the new job id.
  tell resubmitted "$job" "${next_job##*$'\n'}"
}

if [ -n "$is_here" ]; then
  save_when_stopped
else
  # Cancelling and preemption also signal the ranks, which save.
  trap 'is_ended=yes' INT TERM
  trap 'is_warned=yes' USR1
fi
begin
run_job "$(IFS=,; echo "${hosts[*]}")"
