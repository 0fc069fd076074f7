# One process, which starts and restarts the others of this machine.

if [ -n "$is_stage" ]; then run_rank; fi

TRAINYARD_JOB=$(hostname)-$$
run_rank &
step=$!
trap : INT # of a terminal it reaches both
trap 'kill -TERM "$step"' TERM
trap 'kill -USR1 "$step"' USR1
wait_for "$step"
tail -n +2 "$folder/logs/refused-$TRAINYARD_JOB" >&2 2> /dev/null # the process's message
rm -rf "$scratch/trainyard-$TRAINYARD_JOB" "$folder"/logs/{refused,unready}-*
exit "$code"
