# Ranks started by ssh on $hosts. ssh does not forward signals, and leaves its command running when
# it is killed. So this script has two roles: on the first machine it starts itself on each host and
# holds ssh's standard input; as `job.sh on-host ..` it starts the ranks of a host, and reads there
#
#     USR1        the name of a signal, for the ranks
#     (the end)   the first machine, or the connection, is gone: the ranks save and end, or are killed

save_seconds=60   # for ranks to save once no process waits for them
others_seconds=20 # for ranks to notice that those of another host have ended
# A host that is down must be found before the ranks of the others give up their rendezvous (60 s).
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=2)

# Sets $code to the worse of two exit codes: those that need attention, then a failure, then a stop.
take_worse() {
  local each order=()
  for each in "$code" "$1"; do
    case $each in
      0) order+=(0) ;;
      75) order+=(1) ;;
      2) order+=(3) ;;
      93) order+=(4) ;;
      *) order+=(2) ;;
    esac
  done
  if [ "${order[1]}" -gt "${order[0]}" ]; then code=$1; fi
}

# on_host FIRST_RANK N_RANKS ADDRESS PORT
on_host() {
  local number pid pids=() listener
  [ "${#environment[@]}" = 0 ] || export "${environment[@]}"
  export WORLD_SIZE=$2 LOCAL_WORLD_SIZE=$tasks_per_node MASTER_ADDR=$3 MASTER_PORT=$4
  rank=$(print_rank)
  for ((number = 0; number < tasks_per_node; number++)); do
    RANK=$(($1 + number)) LOCAL_RANK=$number setsid bash -c "$rank" < /dev/null &
    pids+=("$!")
  done
  listen <&0 > /dev/null 2>&1 &
  listener=$!
  code=0
  for pid in "${pids[@]}"; do
    wait "$pid"
    take_worse "$?"
  done
  kill "$listener"
  kill -KILL -- "${pids[@]/#/-}" 2> /dev/null # what ranks have started as well
  rm -rf "$scratch/trainyard-$TRAINYARD_JOB"
  exit "$code"
}

# Passes signals on to the ranks of this host until its main process or the input ends.
listen() {
  local name number
  while kill -0 "$$"; do
    if read -r -t 1 name; then
      kill -s "$name" "${pids[@]}"
    elif [ "$?" -le 128 ]; then # the end, not the time
      break
    fi
  done
  kill -TERM "${pids[@]}"
  for ((number = 0; number < save_seconds; number++)); do
    kill -0 "${pids[@]}" || break
    sleep 1
  done
  kill -KILL -- "${pids[@]/#/-}"
}

start_ranks() {
  local number pipes words name fd pids=() inputs=() codes=() failed_at=""
  pipes=$(mktemp -d)
  for number in "${!hosts[@]}"; do
    # Hosts may not know each other by the name this machine logs in with.
    printf -v words '%q ' env "TRAINYARD_JOB=$TRAINYARD_JOB" bash "$script" on-host \
      $((number * tasks_per_node)) $((${#hosts[@]} * tasks_per_node)) \
      "${hosts[0]#*@}" "$MASTER_PORT"
    mkfifo "$pipes/$number"
    "${ssh[@]}" "${ssh_options[@]}" "${hosts[number]}" "$words" < "$pipes/$number" &
    pids[number]=$!
  done
  for name in INT TERM USR1; do
    # shellcheck disable=SC2064
    trap "for fd in \"\${inputs[@]}\"; do echo $name >&\"\$fd\"; done" "$name"
  done
  # Opened once every ssh has started, so that none of them holds the input of another.
  for number in "${!hosts[@]}"; do
    exec {fd}<> "$pipes/$number"
    inputs[number]=$fd
  done
  while [ "${#codes[@]}" -lt "${#hosts[@]}" ]; do
    sleep 0.5 &
    wait "$!"
    for number in "${!hosts[@]}"; do
      if [ -z "${codes[number]}" ] && ! kill -0 "${pids[number]}" 2> /dev/null; then
        wait "${pids[number]}"
        codes[number]=$?
        if [ "${codes[number]}" != 0 ]; then failed_at=${failed_at:-$SECONDS}; fi
      fi
    done
    if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -gt "$others_seconds" ]; then
      for fd in "${inputs[@]}"; do exec {fd}>&-; done
      inputs=()
    fi
  done
  rm -r "$pipes" # not before: an ssh may be slow to open its own
  code=0
  : > "$folder/logs/lost_hosts"
  for number in "${!hosts[@]}"; do
    if [ "${codes[number]}" = 255 ]; then # of ssh itself
      echo "${hosts[number]} is lost: ssh has ended" >&2
      echo "${hosts[number]#*@}" >> "$folder/logs/lost_hosts"
      codes[number]=75
    fi
    take_worse "${codes[number]}"
  done
  exit "$code"
}
clean_up() { :; } # on each host, above

if [ "$1" = on-host ]; then on_host "${@:2}"; fi
