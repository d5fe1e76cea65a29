"""``launch/slurm.sbatch`` with stand-ins for SLURM and torchrun; on a real cluster: tests/launch/test_slurm_jobs.py."""

import os
import subprocess
import sys

import pytest

from tests.support.commands import ROOT

SCRIPT = ROOT / "launch" / "slurm.sbatch"
# The step is this shell, whose child is torchrun. What `scontrol requeue` fails at needs no minute of waiting.
COMMANDS = {
    "srun": 'export SCRIPT=$PPID SLURMD_NODENAME=node1\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"',
    "scontrol": '[ "$1" = show ] && exec printf "%s\\n" ${NODES:-node1}\necho requeued; exit 1',
    "sinfo": 'echo "node1 ${NODE_STATE:-allocated}"',
    "ip": 'case "$*" in *"show dev lo"*) echo "1: lo inet 127.0.0.1/8 scope host lo";; *show) echo "1: lo inet";; esac',
}
STOPS = f"{sys.executable} -c 'from adl_dist.distributed import parent_process; parent_process.flag_stopped()'"
SIGNALLED = f"kill -USR1 $PPID; {STOPS}"


def run_script(folder, torchrun, *words, **variables):
    """Run the script with ``torchrun`` as the program that it starts; returns exit code, output, and what is left."""
    (folder / "bin").mkdir()
    (folder / "tmp").mkdir()
    for name, does in {**COMMANDS, "torchrun": torchrun}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    names = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_ON_NODE": "4"}
    names |= {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHON": "torchrun"}
    names |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), **variables}
    with (folder / "out").open("w") as out:  # a file: what asks every ten seconds may outlive the script by one sleep
        command = ["bash", SCRIPT, *words]
        done = subprocess.run(
            command, env={**os.environ, **names}, stdout=out, stderr=out, timeout=60, check=False, cwd=folder
        )
    return done.returncode, (folder / "out").read_text(), list((folder / "tmp").iterdir())


AGAIN, LOST = "stopped by USR1; queued again (1 of at most 20)", "lost node1"
ENDS = {
    "stopped by a signal": (SIGNALLED, {}, 75, [AGAIN]),
    "stopped, as the script got a signal": (f"kill -USR1 $SCRIPT; {STOPS}", {}, 75, [AGAIN]),  # before the time limit
    "a signal while the end was saved": ("kill -USR1 $PPID", {}, 0, []),
    "stopped by adl-dist stop": (STOPS, {}, 0, []),
    "failed after a signal": (f"{SIGNALLED}; exit 1", {}, 1, []),
    "failed": ("exit 3", {"NODE_STATE": "idle"}, 3, []),
    "failed, with a node down": ("exit 3", {"NODE_STATE": "down"}, 3, [LOST]),
    "failed, with a node that is silent": ("exit 3", {"NODE_STATE": "idle*"}, 3, [LOST]),
}


@pytest.mark.parametrize(("torchrun", "variables", "code", "why"), ENDS.values(), ids=ENDS)
def test_a_job_is_queued_again_if_stopped_or_on_a_lost_node(torchrun, variables, code, why, tmp_path):
    ended, said, left = run_script(tmp_path, torchrun, **variables)
    assert (ended, left) == (code, []), said
    assert [text for text in (AGAIN, LOST) if text in said] == why
    assert ("requeued" in said) == bool(why)


def test_torchrun_gets_stages_threads_and_the_words_of_the_user(tmp_path):
    words = ["run_dir='with space'", "seed=1"]
    ended, said, _ = run_script(tmp_path, 'printf "%s\\n" "$@"', *words, PROCESSES_PER_NODE="2", MAX_RESTARTS="1")
    assert ended == 0, said
    given = said.splitlines()
    assert {"--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=17-0", "--rdzv-endpoint=127.0.0.1:16401"} <= {*given}
    assert given[given.index("train") :] == ["train", "partition.num_stages=2", "runtime.threads=2", *words]


def test_a_task_of_an_array_takes_its_number_as_the_seed(tmp_path):
    said = run_script(tmp_path, 'printf "%s\\n" "$@"', "seed=1", SLURM_ARRAY_TASK_ID="3")[1]
    assert said.splitlines()[-2:] == ["seed=1", "seed=3"]
