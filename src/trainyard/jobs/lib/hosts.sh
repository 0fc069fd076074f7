# A job on $all_hosts, without a scheduler.

job=$(hostname)-$$ start=${TRAINYARD_START:-0}

again() { start_again; }

# Hosts that failed twice are excluded; the last ones are spares.
mapfile -t hosts < <(good_hosts "${all_hosts[@]}")
hosts=("${hosts[@]:0:n_nodes}")
if [ "${#hosts[@]}" -lt "$n_nodes" ]; then
  echo "error: $n_nodes hosts are needed: see $folder/bad_nodes" >&2
  exit 93
fi
export MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT=$((12000 + RANDOM % 18000))
export TRAINYARD_JOB="${job//[^A-Za-z0-9]/_}-$start"

save_when_stopped
begin
run_job "$(IFS=,; echo "${hosts[*]}")"
