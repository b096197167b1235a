#!/bin/sh
# The long counts of docs/reliability.md: on 16 cores that have nothing else to do about half an hour, on two
# some hours; counts.py says how to choose, and how to keep what was counted before a sudden end:
#
#   tests/faults/counts.sh [build folder] [words for counts.py]
#   nohup tests/faults/counts.sh launchers forks=12000 kills --to build/counts.txt &
#
# Needs a build with tests, and pytest. One line for each count; exit code 1 if anything failed or was cut short.
cd "$(dirname "$0")/../.." || exit 2
build=build/release
if [ $# -gt 0 ] && [ -d "$1/bin" ]; then
  build=$1
  shift
fi
export TESSERA_BIN="$PWD/$build/bin/tessera"
export PYTHONPATH="$PWD/python:$PWD/tests/support:$PWD/tests/python${PYTHONPATH:+:$PYTHONPATH}"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export TESSERA_TEST_PYTHON=$python
echo "$(date -u +%Y-%m-%dT%H:%MZ), $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg)"
exec $python tests/faults/counts.py "$@"
