#!/usr/bin/env bash
# What the product does today, on two local ranks: `make demo` runs this.
set -euo pipefail
cd "$(dirname "$0")/.."
tessera=.venv/bin/tessera

echo "== tessera doctor"
"$tessera" doctor --quick
echo
echo "== a C++ program on two ranks"
"$tessera" run -n 2 -- build/release/bin/average_gradients
echo
echo "== torch's own DistributedDataParallel over shared memory, on two ranks"
"$tessera" run -n 2 -- .venv/bin/python examples/torch_ddp.py
echo
echo "== a small GPT, its vocabulary over two ranks"
"$tessera" train lm --ranks 2 --steps 30
