# One process, which starts and restarts the others of this machine.

TRAINYARD_JOB=$(hostname)-$$
run_rank &
step=$!
trap : INT # of a terminal it reaches both
trap 'kill -TERM "$step"' TERM
trap 'kill -USR1 "$step"' USR1
wait_for "$step"
rm -rf "$scratch/trainyard-$TRAINYARD_JOB"
exit "$code"
