# Starts of a job, and what follows their end.

# `job.sh here` runs on the nodes of an allocation (salloc, qsub -I), which no scheduler requeues.
is_here=""
if [ "$1" = here ]; then is_here=yes; fi

# Each task of an array starts, fails and is requeued by itself.
task=${SLURM_ARRAY_TASK_ID:-${PBS_ARRAY_INDEX:-0}}
[ -z "$is_array" ] || folder="$folder/task-$task"

# Without a scheduler, this script starts itself again.
start_again() {
  sleep 1
  TRAINYARD_START=$((start + 1)) exec bash "$0" ${is_here:+here}
}

# Stopped by a person: the ranks save. Their own process group keeps Ctrl-C from them.
save_when_stopped() {
  set -m
  trap 'is_ended=yes; kill -USR1 "$step"' INT TERM HUP USR1
}

# A line for `trainyard status`.
tell() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >> "$folder/starts.log"; }

# Files of an earlier start must not be taken for this one's.
begin() {
  mkdir -p "$folder/logs" && touch "$folder/logs/started" &&
    rm -f "$folder/outcome.json" "$folder"/logs/{refused,unready}-* && return
  echo "error: $(hostname) cannot write to $PWD/$folder" >&2
  exit 2
}

# At most $restart_limit restarts in a row without a newer checkpoint: the rule of
# trainyard/launch/restarts.py, since here there may be no Python.
is_worth_it() {
  local count=0 before="" newest
  newest=$(find -L "$folder/checkpoints" -path '*/step-*/manifest.json' 2> /dev/null | sort)
  newest=${newest##*$'\n'}
  [ -f "$folder/logs/vain" ] && IFS=' ' read -r count before < "$folder/logs/vain"
  [[ "$newest" > "$before" ]] && count=0
  # The task of an array trains runs, whose folders are beside that of the set.
  [ -n "$is_array" ] && [ -n "$(find -L "${folder%/*}"-*/checkpoints -name manifest.json \
    -newer "$folder/logs/started" 2> /dev/null)" ] && count=0
  echo "$((count + 1)) $newest" > "$folder/logs/vain"
  [ "$count" -lt "$restart_limit" ]
}

# Lost hosts, hosts where a rank failed by itself in this start, as its parent recorded, and hosts
# where none could start (rank.sh) unless training began.
failing_hosts() {
  local file
  cat "$folder/logs/lost_hosts" 2> /dev/null
  for file in "$folder"/logs/attempt-*/rank-*.{failed,aborted}.json; do
    [ "$file" -nt "$folder/logs/started" ] &&
      sed -n 's/.*"host": "\([A-Za-z0-9_-]*\).*/\1/p' "$file"
  done
  for file in "$folder"/logs/unready-*; do
    file=${file##*/unready-}
    [ "$file" = "*" ] || [ -e "$folder/outcome.json" ] || echo "${file%%.*}"
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
# good_hosts HOST ..: prints the others.
good_hosts() {
  local host name
  for host; do
    name=${host#*@}
    bad_hosts | grep -qxF -e "$name" -e "${name%%.*}" || echo "$host"
  done
}

# Turns $code, the exit code of the launcher, into that of the job, and decides what is $next.
judge() {
  local said refused="$folder/logs/refused-$TRAINYARD_JOB"
  # Training's own exit code has priority: launchers end ranks, with exit codes of their own.
  said=$(sed -n 's/.*"exit_code": *\([0-9]*\).*/\1/p' "$folder/outcome.json" 2> /dev/null)
  said=${said:-$(head -n 1 "$refused" 2> /dev/null)}
  tail -n +2 "$refused" >&2 2> /dev/null # a rank's message
  rm -f "$refused"*
  code=${said:-$code}
  # Hydra may exit with 0 after it forwards a signal, however its ranks ended.
  if [ "$code" = 0 ] && [ -z "$said" ] && [ -n "$is_ended$is_warned" ]; then code=75; fi
  case $code in
    0) next=finish ;;
    2 | 93 | 126 | 127) next=stay ;; # needs attention
    *) next=requeue && blame ;;      # 75, or it was killed
  esac
  [ "$next" = requeue ] && [ -n "$is_ended" ] && next=cancelled
  if [ "$next" = requeue ] && ! is_worth_it; then
    echo "$restart_limit starts brought no newer checkpoint: not started again" >&2
    next=stay code=93
  fi
  if [ "$next" != requeue ]; then rm -f "$folder/logs/vain"; fi
}

# One start, after `begin`: run_job NODES. Each way to start jobs defines `start_ranks`, which runs
# $rank for each rank, `clean_up`, and `again`, which requeues the job.
is_warned="" is_ended=""
run_job() {
  rank=$(print_rank)
  tell start "$job" "$start" "$1"
  start_ranks < /dev/null &
  step=$!
  wait_for "$step"
  judge
  tell end "$job" "$code" "$next"
  clean_up
  if [ "$next" = requeue ]; then again; fi
  exit "$code"
}
