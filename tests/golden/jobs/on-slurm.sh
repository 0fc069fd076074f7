#!/bin/bash
# lumi-125m: 2 nodes of 8 ranks. Made by
#     trainyard launch recipes/lumi/125m.toml --cluster slurm --nodes 2
# Started again by hand it goes on where the run stopped:
#     sbatch /project/me/runs/lumi-125m/job.sh
#SBATCH --job-name=lumi-125m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --output=/project/me/runs/lumi-125m/job-%j.log
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Before the time limit: save. After a node has failed: start again.
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

cd /project/me || exit 2
folder=runs/lumi-125m

job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0} is_warned='' is_ended=''
export TRAINYARD_JOB="$job-$start"

# What each rank runs.
IFS= read -r -d '' rank <<'RANK'
export TRAINYARD_DEVICES=8
# Compiled kernels stay on the node's own disk, new with each start: no stale lock.
caches=/tmp/trainyard-"$TRAINYARD_JOB"
# Code is loaded from there: the folder must be this user's own.
mkdir -p -m 700 "$caches"
if [ ! -O "$caches" ] || [ -L "$caches" ]; then
  echo "error: $HOSTNAME: $caches belongs to another user, or cannot be made" >&2
  exit 2
fi
mkdir -p "$caches/miopen"
export TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"
export MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen"
exec python3 -P -m trainyard.cli train runs/lumi-125m/run.toml
RANK

# How they are started: all end when one fails.
scratch=/tmp
each_node=(--nodes=2 --ntasks=2 --ntasks-per-node=1)
step=(
  --nodes=2 --ntasks=16 --ntasks-per-node=8
  --export=ALL --kill-on-bad-exit=1
)
# srun takes these from sbatch no more since Slurm 22.05.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi

# A line for `trainyard status`.
tell() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >> "$folder/starts.log"; }

# What an earlier start left would be taken for this one's.
begin() {
  mkdir -p "$folder/logs" && touch "$folder/logs/started" && rm -f "$folder/outcome.json" && return
  echo "error: $(hostname) cannot write to $PWD/$folder" >&2
  exit 2
}

# Three starts in a row without a newer checkpoint are enough.
is_worth_it() {
  local count=0 before="" newest
  newest=$(find "$folder/checkpoints" -path '*/step-*/manifest.json' 2> /dev/null | sort)
  newest=${newest##*$'\n'}
  [ -f "$folder/logs/vain" ] && IFS=' ' read -r count before < "$folder/logs/vain"
  [ "$newest" = "$before" ] || count=0
  echo "$((count + 1)) $newest" > "$folder/logs/vain"
  [ "$count" -lt 3 ]
}

# Hosts on which a rank has died by itself in this start, as its parent process saw; lost ones.
failing_hosts() {
  local file
  cat "$folder/logs/lost_hosts" 2> /dev/null
  for file in "$folder"/logs/attempt-*/rank-*.json; do
    [ "$file" -nt "$folder/logs/started" ] && grep -q '"has_failed": true' "$file" &&
      sed -n 's/.*"host": "\([A-Za-z0-9_-]*\).*/\1/p' "$file"
  done
}

# A host that fails twice is excluded from then on. Where several fail, it is not the host.
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
  # Only a job in the queue takes nodes to leave out; it ends with SIGTERM to what runs here.
  trap '' TERM
  scontrol requeue "$job" || return
  [ -z "$bad" ] || scontrol update JobId="$job" ExcNodeList="$bad"
}

# Nodes of the start before that are down now have failed under it.
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

# What training itself said comes first: launchers end ranks, and have exit codes of their own.
said=$(sed -n 's/.*"exit_code": *\([0-9]*\).*/\1/p' "$folder/outcome.json" 2> /dev/null)
said=${said:-$(cat "$folder/logs/refused-$TRAINYARD_JOB" 2> /dev/null)}
rm -f "$folder/logs/refused-$TRAINYARD_JOB"
code=${said:-$code}
# Hydra may end with 0 once it has passed a signal on, however its ranks have ended.
if [ "$code" = 0 ] && [ -z "$said" ] && [ -n "$is_ended$is_warned" ]; then code=75; fi
case $code in
  0) then=finish ;;
  2 | 93 | 126 | 127) then=stay ;; # somebody has to look
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
