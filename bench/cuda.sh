#!/usr/bin/env bash
# Measures on the GPU of this machine; one line of JSON per row. Run by `make cuda-bench`.
set -euo pipefail
cd "$(dirname "$0")/.."
build/cuda/bin/vocab_cuda_bench
build/cuda/bin/table_cuda_bench
PYTHONPATH=python "${PYTHON:-python3}" bench/cuda/steps_bench.py
