#!/usr/bin/env bash
# The main job on two local ranks, from data to report: `make demo` runs this.
set -euo pipefail
cd "$(dirname "$0")/.."
tessera=.venv/bin/tessera
promised=0.75 # the AUC of README.md

echo "\$ tessera train dlrm --config examples/demo.toml"
"$tessera" train dlrm --config examples/demo.toml | tee build/demo.txt
auc=$(sed -n 's/^judged .*auc \([0-9.]*\).*/\1/p' build/demo.txt | tail -n 1)
awk -v auc="$auc" -v promised="$promised" 'BEGIN { exit !(auc >= promised) }' || {
  echo "error: the demo reached an AUC of ${auc:-none}; README.md promises $promised" >&2
  exit 1
}
