#!/usr/bin/env bash
# Does a slow link slow ADL down? Two network namespaces, joined by a link of a given rate, one rank in each (needs root).
#   benchmarks/throttled.sh RATE [adl-dist bench settings ...]     e.g. benchmarks/throttled.sh 100mbit model=resnet18 data=synthetic
# Runs adl-dist bench twice, by turns of whole tables: over the free link, then over the slow one.
set -euo pipefail
rate=${1:?a rate of tc, like 100mbit}
shift
out=${OUT:-runs/throttled-$rate}
tag=adl$$

cleanup() {
    ip netns pids "${tag}n0" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns pids "${tag}n1" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns del "${tag}n0" 2>/dev/null || true
    ip netns del "${tag}n1" 2>/dev/null || true # and with them the link
}
trap cleanup EXIT

for rank in 0 1; do
    ip netns add "${tag}n$rank"
    ip -n "${tag}n$rank" link set lo up
done
ip link add "eth0" netns "${tag}n0" type veth peer name "eth0" netns "${tag}n1"
for rank in 0 1; do
    ip -n "${tag}n$rank" addr add "10.77.0.$((rank + 1))/24" dev eth0
    ip -n "${tag}n$rank" link set eth0 up
done

run() { # name
    adl-dist bench "${@:2}" partition.num_stages=2 --prefix "ip netns exec ${tag}n{rank}" \
        --master-addr 10.77.0.1 --interface eth0 --out "$out/$1"
}
run free "$@"
for rank in 0 1; do # each direction has this rate
    ip netns exec "${tag}n$rank" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 1s
done
run "$rate" "$@"
