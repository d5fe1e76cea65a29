#!/usr/bin/env bash
# Trains own_cnn.py on two nodes, one stage on each. Start the same command on both; FIRST is the address of the one that
# has the data and keeps the run folder. Its port 29400 must be free and reachable from the other (docs/network.md).
#
#     examples/torchrun_two_nodes.sh FIRST [RUN_DIR]
set -euo pipefail
FIRST=${1:?give the address of the first node, like 10.0.0.1}
RUN_DIR=${2:-runs/two_nodes}

exec torchrun --rdzv-backend=adl-dist --rdzv-id=two-nodes --rdzv-endpoint="$FIRST:29400" \
    --nnodes=2 --nproc-per-node=1 "$(dirname "$0")/own_cnn.py" "$RUN_DIR"
