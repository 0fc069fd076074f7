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
  [ -z "$device_variable" ] || export "$device_variable=${!local_rank}"
  if [ -n "$scratch" ]; then
    # shellcheck disable=SC2174 # $scratch itself is for everybody
    mkdir -p -m 700 "$caches"
    if [ ! -O "$caches" ] || [ -L "$caches" ]; then
      echo "error: $HOSTNAME: $caches belongs to another user, or cannot be created" >&2
      exit 2
    fi
    mkdir -p "$caches/miopen"
    export TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"
    export MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen"
  fi
  [ "${#cpus_of_rank[@]}" = 0 ] || taskset --cpu-list --pid "${cpus_of_rank[${!local_rank}]}" $$
  exec "${command[@]}"
}

# Prints that program as text for `bash -c`: every launcher passes it to the nodes unchanged.
print_rank() {
  declare -p environment command cpus_of_rank scratch device_variable local_rank
  declare -f run_rank
  echo run_rank
}

# Sets $code to that of a process; a signal ends `wait`, not the process.
wait_for() {
  while kill -0 "$1" 2> /dev/null; do wait "$1"; done
  wait "$1"
  code=$?
}
