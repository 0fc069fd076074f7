#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster mpi --nodes 2 --hosts n1,n2
# Started again by hand, it continues the run:
#     bash /project/me/runs/lumi-125m/job.sh

cd /project/me || exit 2
folder=runs/lumi-125m

job=$(hostname)-$$ start=${TRAINYARD_START:-0} is_warned='' is_ended=''

# A line for `trainyard status`.
tell() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >> "$folder/starts.log"; }

# Files of an earlier start must not be taken for this one's.
begin() {
  mkdir -p "$folder/logs" && touch "$folder/logs/started" && rm -f "$folder/outcome.json" && return
  echo "error: $(hostname) cannot write to $PWD/$folder" >&2
  exit 2
}

# At most three starts in a row without a newer checkpoint.
is_worth_it() {
  local count=0 before="" newest
  newest=$(find "$folder/checkpoints" -path '*/step-*/manifest.json' 2> /dev/null | sort)
  newest=${newest##*$'\n'}
  [ -f "$folder/logs/vain" ] && IFS=' ' read -r count before < "$folder/logs/vain"
  [ "$newest" = "$before" ] || count=0
  echo "$((count + 1)) $newest" > "$folder/logs/vain"
  [ "$count" -lt 3 ]
}

# Lost hosts, and hosts where a rank failed by itself in this start, as its parent recorded.
failing_hosts() {
  local file
  cat "$folder/logs/lost_hosts" 2> /dev/null
  for file in "$folder"/logs/attempt-*/rank-*.json; do
    [ "$file" -nt "$folder/logs/started" ] && grep -q '"has_failed": true' "$file" &&
      sed -n 's/.*"host": "\([A-Za-z0-9_-]*\).*/\1/p' "$file"
  done
}

# Exclude a host that fails twice. If several fail, the host is not the cause.
blame() {
  local host
  host=$(failing_hosts | sort -u)
  [ "$(echo "$host" | grep -c .)" = 1 ] || return 0
  { cat "$folder/bad_nodes" 2> /dev/null; echo "$host 1"; } |
    awk '{ count[$1] += $2 } END { for (host in count) print host, count[host] }' |
    sort > "$folder/bad_nodes.new"
  mv "$folder/bad_nodes.new" "$folder/bad_nodes"
}
bad_hosts() { awk '$2 >= 2 { print $1 }' "$folder/bad_nodes" 2> /dev/null; }

again() {
  # Start this script again, on hosts that are not bad.
  sleep 1
  TRAINYARD_START=$((start + 1)) exec bash "$0"
}

# Hosts that failed twice are excluded; the last ones are spares.
hosts=()
for host in n1 n2; do
  name=${host#*@}
  bad_hosts | grep -qxF -e "$name" -e "${name%%.*}" || hosts+=("$host")
done
hosts=("${hosts[@]:0:2}")
if [ "${#hosts[@]}" -lt 2 ]; then
  echo "error: 2 hosts are needed: see $folder/bad_nodes" >&2
  exit 93
fi

# Rendezvous of the ranks.
export MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT=$((12000 + RANDOM % 18000))
export TRAINYARD_JOB="${job//[^A-Za-z0-9]/_}-$start"

# The program of each rank.
IFS= read -r -d '' rank <<'RANK'
export TRAINYARD_DEVICES=8
# Compiled kernels go to the node's local disk, in a new folder per start: no stale lock.
caches=/tmp/trainyard-"$TRAINYARD_JOB"
# Code is loaded from there: this user must own the folder.
mkdir -p -m 700 "$caches"
if [ ! -O "$caches" ] || [ -L "$caches" ]; then
  echo "error: $HOSTNAME: $caches belongs to another user, or cannot be created" >&2
  exit 2
fi
mkdir -p "$caches/miopen"
export TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"
export MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen"
exec python3 -P -m trainyard.cli train runs/lumi-125m/run.toml
RANK

# Start the ranks: start_ranks N PER_NODE COMMAND ..
mpiexec=$(command -v mpiexec.hydra || command -v mpiexec)
start_ranks() {
  local n=$1 per_node=$2 host
  shift 2
  for host in "${hosts[@]}"; do
    echo "$host:$per_node"
  done > "$folder/logs/hosts"
  exec "$mpiexec" -n "$n" \
    -f "$folder/logs/hosts" -ppn "$per_node" -genvall \
    "$@"
}

# Stopped by a person: the ranks save. Their own process group keeps Ctrl-C from them.
set -m
trap 'is_ended=yes; kill -USR1 "$step"' INT TERM USR1
begin
tell start "$job" "$start" "$(IFS=,; echo "${hosts[*]}")"
start_ranks 16 8 bash -c "$rank" &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?

# Training's own exit code has priority: launchers end ranks, with exit codes of their own.
said=$(sed -n 's/.*"exit_code": *\([0-9]*\).*/\1/p' "$folder/outcome.json" 2> /dev/null)
said=${said:-$(cat "$folder/logs/refused-$TRAINYARD_JOB" 2> /dev/null)}
rm -f "$folder/logs/refused-$TRAINYARD_JOB"
code=${said:-$code}
# Hydra may exit with 0 after it forwards a signal, however its ranks ended.
if [ "$code" = 0 ] && [ -z "$said" ] && [ -n "$is_ended$is_warned" ]; then code=75; fi
case $code in
  0) then=finish ;;
  2 | 93 | 126 | 127) then=stay ;; # needs attention
  *) then=requeue && blame ;;      # 75, or it was killed
esac
[ "$then" = requeue ] && [ -n "$is_ended" ] && then=cancelled
if [ "$then" = requeue ] && ! is_worth_it; then
  echo "three starts brought no newer checkpoint: not started again" >&2
  then=stay code=93
fi
if [ "$then" != requeue ]; then rm -f "$folder/logs/vain"; fi
tell end "$job" "$code" "$then"
(start_ranks 2 1 rm -rf /tmp/trainyard-"$TRAINYARD_JOB") 2> /dev/null
if [ "$then" = requeue ]; then again; fi
exit "$code"
