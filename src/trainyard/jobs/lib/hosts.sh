# A job on $all_hosts, without a scheduler: this script starts itself again.

job=$(hostname)-$$ start=${TRAINYARD_START:-0}

again() {
  sleep 1
  TRAINYARD_START=$((start + 1)) exec bash "$0"
}

# Hosts that failed twice are excluded; the last ones are spares.
hosts=()
for host in "${all_hosts[@]}"; do
  name=${host#*@}
  bad_hosts | grep -qxF -e "$name" -e "${name%%.*}" || hosts+=("$host")
done
hosts=("${hosts[@]:0:n_nodes}")
if [ "${#hosts[@]}" -lt "$n_nodes" ]; then
  echo "error: $n_nodes hosts are needed: see $folder/bad_nodes" >&2
  exit 93
fi
export MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT=$((12000 + RANDOM % 18000))
export TRAINYARD_JOB="${job//[^A-Za-z0-9]/_}-$start"

# Stopped by a person: the ranks save. Their own process group keeps Ctrl-C from them.
set -m
trap 'is_ended=yes; kill -USR1 "$step"' INT TERM USR1
begin
run_job "$(IFS=,; echo "${hosts[*]}")"
