#!/bin/bash
# wikipedia: on this machine. Made by
#     trainyard launch recipes/laptop/wikipedia.toml --cluster local --nodes 1
# Started again by hand, it continues the run:
#     bash /project/me/runs/wikipedia/job.sh

cd /project/me || exit 2

TRAINYARD_JOB=$(hostname)-$$
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
python3 -P -m trainyard.cli train runs/wikipedia/run.toml &
step=$!
trap : INT # of a terminal it reaches both
trap 'kill -TERM "$step"' TERM
trap 'kill -USR1 "$step"' USR1
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
rm -rf "$caches"
exit "$code"
