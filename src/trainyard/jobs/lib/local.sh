# One process, which starts and restarts the others of this machine.

if [ -n "$is_stage" ]; then run_rank; fi

TRAINYARD_JOB=$(hostname)-$$
run_rank &
step=$!
trap : INT # of a terminal it reaches both
for name in TERM HUP USR1 USR2 XCPU; do
  # shellcheck disable=SC2064 # the name and the process of now
  trap "kill -$name $step" "$name"
done
wait_for "$step"
tail -n +2 "$folder/logs/refused-$TRAINYARD_JOB" >&2 2> /dev/null # the process's message
rm -rf "$scratch/trainyard-$TRAINYARD_JOB" "$folder"/logs/{refused,unready}-*
exit "$code"
