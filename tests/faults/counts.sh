#!/bin/sh
# The long counts of docs/reliability.md: about twelve minutes on 16 cores that have nothing else to do.
#
#   tests/faults/counts.sh [build folder] [words for counts.py]
#
# Needs a build with tests, and pytest. One line for each count; exit code 1 if anything failed.
cd "$(dirname "$0")/../.." || exit 2
build=${1:-build/release}
[ $# -gt 0 ] && shift
export TESSERA_BIN="$PWD/$build/bin/tessera"
export PYTHONPATH="$PWD/python:$PWD/tests/support:$PWD/tests/python${PYTHONPATH:+:$PYTHONPATH}"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export TESSERA_TEST_PYTHON=$python
echo "$(date -u +%Y-%m-%dT%H:%MZ), $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg)"
exec $python tests/faults/counts.py "$@"
