#!/usr/bin/env bash
# K stages on this machine through torchrun, for looking into what torchrun itself does (its restarts, --log-dir, --tee).
# To train, `adl-dist train` is enough: it starts its own processes.
#
#   launch/local.sh K [adl-dist train settings ...]     TORCHRUN="--tee 3" adds flags of torchrun
#
# Nothing listens but the connections between the processes, on loopback: the launcher and the processes meet in files.
set -euo pipefail
K=${1:?"the number of stages, like: launch/local.sh 2 model=resnet20"}
shift
folder=$(mktemp -d -t adl-dist-XXXXXX)
trap 'rm -rf "$folder"' EXIT
# No interface is named, so the processes take loopback, whatever this system calls it.
unset GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME
export ADL_DIST_RENDEZVOUS=$folder TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
set -m # torchrun in a process group of its own: a Ctrl-C comes to it once, by way of this script, and is not ignored
# shellcheck disable=SC2086 # several flags
"${PYTHON:-python}" -m torch.distributed.run --nnodes=1 --nproc-per-node="$K" --local-addr=127.0.0.1 \
    --rdzv-backend=c10d --rdzv-endpoint="$folder/agent" --rdzv-conf=store_type=file --max-restarts="${MAX_RESTARTS:-3}" \
    --log-dir="$folder/logs" ${TORCHRUN:-} -m adl_dist train "partition.num_stages=$K" "$@" &
torchrun=$!
# A stop by signal is for the processes: torchrun passes it on, and this script waits until they have saved.
for signal in INT TERM; do
    # shellcheck disable=SC2064 # the name is known now
    trap "kill -$signal $torchrun 2>/dev/null || true" "$signal"
done
# A terminal that is gone is not one that torchrun had: it saves, as at a TERM. Under nohup HUP stays ignored.
# shellcheck disable=SC2064
trap "kill -TERM $torchrun 2>/dev/null || true" HUP
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true # a signal ends it
done
wait "$torchrun"
