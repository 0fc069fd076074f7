# Ranks started by ssh on $hosts. This script has two roles: on the first machine it starts itself
# on each host, and as `bash job.sh on-host` it runs the ranks of a host until that machine is gone.

[ "${#environment[@]}" = 0 ] || export "${environment[@]}"
if [ "$1" = on-host ]; then
  shift
  "$python" -P -m trainyard.launch.remote on-host "$@" -- bash -c "$(print_rank)"
  code=$?
  rm -rf "$scratch/trainyard-$TRAINYARD_JOB"
  exit "$code"
fi

start_ranks() {
  exec "$python" -P -m trainyard.launch.remote start --ranks "$tasks_per_node" \
    --script "$script" --job "$TRAINYARD_JOB" --port "$MASTER_PORT" \
    --lost "$folder/logs/lost_hosts" "${ssh_options[@]}" -- "${hosts[@]}"
}
clean_up() { :; } # on each host, above
