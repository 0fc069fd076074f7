#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster slurm --nodes 2
# Started again by hand, it continues the run:
#     sbatch /project/me/runs/lumi-125m/job.sh
#SBATCH --job-name=lumi-125m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --output=/project/me/runs/lumi-125m/job-%j.log
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Save before the time limit; requeue after a node failure.
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

cd /project/me || exit 2
folder=runs/lumi-125m

job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0} is_warned='' is_ended=''
export TRAINYARD_JOB="$job-$start"

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

# Start the ranks: all end when one fails.
scratch=/tmp
each_node=(--nodes=2 --ntasks=2 --ntasks-per-node=1)
step=(
  --nodes=2 --ntasks=16 --ntasks-per-node=8
  --export=ALL --kill-on-bad-exit=1
)
# Since Slurm 22.05, srun no longer inherits these from sbatch.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi

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

# Only the ranks can save. A signal ends `wait`, not the step.
trap 'is_warned=yes; scancel --signal=USR1 "$job"' USR1
trap '[ -n "$is_warned" ] || is_ended=yes' TERM
begin
find_lost_nodes
tell start "$job" "$start" "$SLURM_JOB_NODELIST"
srun "${step[@]}" bash -c "$rank" &
step_process=$!
while kill -0 "$step_process" 2> /dev/null; do wait "$step_process"; done
wait "$step_process"
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
timeout 10 srun "${each_node[@]}" rm -rf "$scratch/trainyard-$TRAINYARD_JOB" 2> /dev/null
if [ "$then" = requeue ]; then again; fi
exit "$code"
