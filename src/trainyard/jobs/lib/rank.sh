# From here on, the same for all jobs (trainyard/jobs/lib): the program of a rank or task.

# Made by earlier stages.
for file in "${needs[@]}"; do
  [ -e "$file" ] || { echo "error: $file is missing: is its stage done?"; exit 2; }
done

# Training has a $scratch, for compiled kernels: a new folder per start on the node's local disk, so
# that no start meets a stale lock. Code is loaded from there: this user must own it.
run_rank() {
  local caches="$scratch/trainyard-$TRAINYARD_JOB"
  [ "${#environment[@]}" = 0 ] || export "${environment[@]}"
  [ -z "$TRAINYARD_DEVICES" ] || export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" # a job on GPUs
  [ -z "$device_variable" ] || export "$device_variable=${!local_rank}"
  if [ -n "$scratch" ]; then
    # shellcheck disable=SC2174 # $scratch itself is for everybody
    mkdir -p -m 700 "$caches"
    if [ ! -O "$caches" ] || [ -L "$caches" ]; then
      echo "error: $(hostname): $caches belongs to another user, or cannot be created" >&2
      exit 2
    fi
    mkdir -p "$caches/miopen"
    export TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"
    export MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen"
  fi
  [ "${#cpus_of_rank[@]}" = 0 ] || taskset --cpu-list --pid "${cpus_of_rank[${!local_rank}]}" $$
  refuse_without_software
  exec "${container[@]}" "$python" -P "${command[@]}"
}

ends_by_kill="" # whether the other ranks end only if one is killed

# Holds the job where Python, Trainyard or torch is missing, here or on a node whose rank said so
# before, with the message of one rank. A failure that may pass does not hold it.
# HOSTNAME would be the first node everywhere: Slurm passes on that of the script.
refuse_without_software() {
  local what=train refused="$folder/logs/refused-$TRAINYARD_JOB" mine said
  if [ -n "$is_stage" ]; then what=prepare; fi
  said=$("${container[@]}" "$python" -P -m trainyard.launch.installed "$what" 2>&1 < /dev/null)
  case $?:$said in
    93:* | 126:* | 127:* | [12]:*"No module named "* | \
      [12]:*"Unknown option"*-P* | [12]:*"unknown option"*-P*) ;;
    255:*" stat $python: no such file"* | 255:*"executable file not found in \$PATH"*) ;; # Apptainer
    0:* | 13[0-9]:* | 14[0-9]:*) # signals are for the program itself
      # Hydra lets ranks start on a node that it reaches after it ended the others.
      [ ! -e "$refused" ] || end_refused
      return
      ;;
    *)
      # A mount, a disk: the program itself tells. `blame` counts it for this host.
      [ -n "$is_stage" ] || touch "$folder/logs/unready-$(hostname)" 2> /dev/null
      return
      ;;
  esac
  said=$(echo "$said" | tail -n 3 | paste -sd' ')
  said="error: $(hostname): $python${container[0]:+ in ${container[-1]}}: $said
hint: install Trainyard and torch for Python 3.11 or newer (docs/installing.md), or set python or\
 the image in the cluster file; then launch again"
  # The script prints it: launchers may lose the output of a rank that ends the others. Another
  # rank's end may kill this one at any moment: the file is there in full or not at all.
  mine="$refused.$(hostname)-$$"
  if [ -n "$is_stage" ] || ! printf '93\n%s\n' "$said" 2> /dev/null > "$mine"; then
    echo "$said" >&2
  else
    mv -f "$mine" "$refused"
  fi
  end_refused
}
end_refused() {
  if [ -n "$ends_by_kill" ] && [ -z "$is_stage" ]; then kill -KILL $$; fi
  exit 93
}

# Prints that program as text for `bash -c`: every launcher passes it to the nodes unchanged.
print_rank() {
  declare -p folder is_stage environment container python command cpus_of_rank scratch \
    device_variable local_rank ends_by_kill
  declare -f run_rank refuse_without_software end_refused
  echo run_rank
}

# Sets $code to that of a process; a signal ends `wait`, not the process.
wait_for() {
  while kill -0 "$1" 2> /dev/null; do wait "$1"; done
  wait "$1"
  code=$?
}
