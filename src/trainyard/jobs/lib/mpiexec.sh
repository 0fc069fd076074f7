# Ranks started by an mpiexec on $hosts.

mpiexec=$(command -v "${mpiexecs[@]}" | head -n 1)

# shellcheck disable=SC2034 # rank.sh reads it
ends_by_kill=yes # Hydra
start_ranks() {
  run_on_hosts $((n_nodes * tasks_per_node)) "$tasks_per_node" "${binding[@]}" bash -c "$rank"
}
clean_up() { (run_on_hosts "$n_nodes" 1 rm -rf "$scratch/trainyard-$TRAINYARD_JOB") 2> /dev/null; }

# run_on_hosts N PER_NODE COMMAND ..
run_on_hosts() {
  local n=$1 per_node=$2 list="$folder/logs/hosts" options=() name
  shift 2
  case $mpi in
    openmpi)
      printf '%s\n' "${hosts[@]/%/ slots=$per_node}" > "$list"
      options=(--hostfile "$list" --map-by "ppr:$per_node:node" --bind-to none)
      for name in PATH LD_LIBRARY_PATH PYTHONPATH MASTER_ADDR MASTER_PORT TRAINYARD_{JOB,END}; do
        if [ -n "${!name}" ]; then options+=(-x "$name"); fi
      done
      ;;
    mpich)
      printf '%s\n' "${hosts[@]/%/:$per_node}" > "$list"
      options=(-f "$list" -ppn "$per_node" -genvall)
      ;;
    pals)
      printf '%s\n' "${hosts[@]}" > "$list"
      options=(--hostfile "$list" --ppn "$per_node" --envall)
      ;;
  esac
  exec "$mpiexec" -n "$n" "${options[@]}" "${mpiexec_options[@]}" "$@"
}
