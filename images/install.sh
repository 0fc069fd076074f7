#!/bin/sh
# Installs Trainyard into /opt/trainyard of an image; `Dockerfile` and `trainyard.def` call it.
#
#     install.sh CHECKOUT [OPTION OF PIP ...]
#
# If the base image brings torch, it stays, and pip stops if Trainyard does not support it.
# Otherwise pip installs the versions of constraints.txt.
set -eu
cd "$1"
shift
headers=$(python3 -c 'from sysconfig import get_path; print(get_path("include"))')
if ! command -v cc >/dev/null || ! [ -e "$headers/Python.h" ]; then
  echo "error: torch.compile needs cc and $headers/Python.h, which this image lacks" >&2
  echo "hint: choose a base such as python:3.12, or install gcc and python3-dev in it" >&2
  exit 2
fi
mkdir -p /opt/trainyard
torch='from importlib.metadata import version; print("torch==" + version("torch"))'
if python3 -c "$torch" >/opt/trainyard/torch.txt 2>/dev/null; then
  python3 -m venv --system-site-packages /opt/trainyard
  versions=/opt/trainyard/torch.txt
else
  python3 -m venv /opt/trainyard
  versions=constraints.txt
fi
/opt/trainyard/bin/python -m pip install --no-cache-dir "$@" -c "$versions" '.[train]'
/opt/trainyard/bin/trainyard --help >/dev/null
