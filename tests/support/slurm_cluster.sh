#!/usr/bin/env bash
# A real SLURM cluster on this machine: a controller and N nodes, each in a network namespace of its own with an address
# of its own, joined by a bridge. Needs root. Everything but name lines in /etc/hosts lies in the folder DIR.
#
#   cluster.sh DIR up N       install SLURM if it is missing, start the nodes adl1..adlN
#   cluster.sh DIR cut NODE   cut a node off: its link goes down, its slurmd dies, its processes run on
#   cluster.sh DIR heal NODE  join it again, after ending what still runs there
#   cluster.sh DIR down       end it all and remove DIR
#
# SLURM_CONF=DIR/slurm.conf makes sbatch, srun and their like speak to it.
set -euo pipefail
DIR=$1
NET=10.79.0
BRIDGE=adlbr
MARK="# adl-dist test cluster"

nodes() { cat "$DIR/nodes" 2>/dev/null || true; }

write_conf() { # number of nodes
    cat <<CONF
ClusterName=adl
SlurmctldHost=adlctl($NET.254)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool-%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd-%n.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=15
MessageTimeout=5
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    for i in $(seq 1 "$1"); do
        # Of whichever machine this is, a node has two cores of its own to give away.
        echo "NodeName=adl$i NodeAddr=$NET.$i CPUs=2 RealMemory=2000 State=UNKNOWN"
    done
}

start_node() { # nsenter, not `ip netns exec`, which hides /sys/fs/cgroup; SLURM finds out who it is by hostname
    mkdir -p "$DIR/spool-$1"
    nsenter --net="/var/run/netns/$1" unshare --uts sh -c "hostname $1; exec slurmd -f $DIR/slurm.conf -N $1"
}

up() {
    command -v slurmctld >/dev/null || { apt-get update -qq && apt-get install -y -qq slurm-wlm munge iproute2 >/dev/null; }
    mkdir -p "$DIR/state"
    seq -f 'adl%g' 1 "$1" >"$DIR/nodes"
    ip link add "$BRIDGE" type bridge
    ip addr add "$NET.254/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    for i in $(seq 1 "$1"); do
        ip netns add "adl$i"
        ip link add "adlv$i" type veth peer name eth0 netns "adl$i"
        ip link set "adlv$i" master "$BRIDGE" up
        ip -n "adl$i" addr add "$NET.$i/24" dev eth0
        ip -n "adl$i" link set eth0 up
        ip -n "adl$i" link set lo up
        echo "$NET.$i adl$i $MARK" >>/etc/hosts
    done
    write_conf "$1" >"$DIR/slurm.conf"
    head -c 64 /dev/urandom >"$DIR/munge.key"
    chmod 400 "$DIR/munge.key"
    munged --force --key-file="$DIR/munge.key" --socket="$DIR/munge.socket" --pid-file="$DIR/munged.pid" \
        --log-file="$DIR/munged.log" --seed-file="$DIR/munged.seed"
    unshare --uts sh -c "hostname adlctl; exec slurmctld -i -f $DIR/slurm.conf"
    for node in $(nodes); do start_node "$node"; done
    for _ in $(seq 1 60); do
        [ "$(sinfo -h -t idle -o %D 2>/dev/null || echo 0)" = "$1" ] && return
        sleep 0.5
    done
    echo "the nodes did not become idle; see $DIR/slurmctld.log and $DIR/slurmd-*.log" >&2
    exit 1
}

end() { # a daemon, by its pid file
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 1 50); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
}

end_jobs_on() {
    ip netns pids "$1" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
}

down() {
    for node in $(nodes); do end "$DIR/slurmd-$node.pid"; done
    end "$DIR/slurmctld.pid"
    end "$DIR/munged.pid"
    for node in $(nodes); do
        end_jobs_on "$node"
        ip link del "adlv${node#adl}" 2>/dev/null || true # by itself: a namespace takes its time to go
        ip netns del "$node" 2>/dev/null || true
    done
    ip link del "$BRIDGE" 2>/dev/null || true
    # Not sed -i: where /etc/hosts is a mount, it cannot be replaced.
    hosts=$(grep -v "$MARK" /etc/hosts || true)
    printf '%s\n' "$hosts" >/etc/hosts
    rm -rf "$DIR"
}

export SLURM_CONF=$DIR/slurm.conf
case ${2:-} in
    up) up "$3" ;;
    cut) ip -n "$3" link set eth0 down && kill -9 "$(cat "$DIR/slurmd-$3.pid")" ;;
    heal) end_jobs_on "$3" && ip -n "$3" link set eth0 up && start_node "$3" ;;
    down) down ;;
    *) sed -n '2,11p' "$0"; exit 2 ;;
esac
