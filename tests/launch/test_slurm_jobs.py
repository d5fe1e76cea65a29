"""Jobs on a real SLURM cluster: several nodes equal one, and neither a lost node nor a signal changes a bit."""

import json
import subprocess
import sys
import time

import pytest
import yaml

from tests.support.commands import ROOT, as_command, shows
from tests.support.kill import HELD_RUN, HOLD, records
from tests.support.slurm import assert_same_end, saved

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

PATIENCE = 240  # seconds; all nodes share the cores of this machine
COMMON = ("runtime.threads=1", "runtime.tensorboard=false", "runtime.timeout_seconds=60")
DIGITS = (*COMMON, "data=digits", "model=resnet8", "train.epochs=2")
# With the file `hold` its samples come slowly, and none after two and a half epochs.
HELD = (*HELD_RUN, "runtime.timeout_seconds=60", "train.epochs=4", "lr_schedule=constant")


def alone(words, K, folder):
    """The run folder of the same run in one process on one node, which nothing happens to."""
    done = as_command(
        sys.executable, "-m", "adl_dist", "train", *words, f"partition.num_stages={K}", "runtime.processes=false",
        "run_dir=alone", cwd=folder, timeout_seconds=PATIENCE,
    )  # fmt: skip
    assert done.code == 0, done
    return folder / "alone"


def held(cluster, folder, *more):
    """A job on two nodes that has saved two of its four epochs and is in the third."""
    (folder / HOLD).touch()
    job = cluster.submit([*HELD, *more, "run_dir=run"], folder=folder, options=["--nodes=2"])
    job.wait_for("the second checkpoint", lambda: saved(folder / "run") == 2)
    job.wait_for("the third epoch", lambda: any(r["update"] > 16 for r in records(folder / "run")))
    return job


@pytest.mark.parametrize(("nodes", "processes"), [(2, 2), (4, 1)])
def test_several_nodes_train_to_the_bits_of_one(nodes, processes, cluster, folder):
    own = {"PROCESSES_PER_NODE": str(processes)}
    job = cluster.submit([*DIGITS, "run_dir=run"], folder=folder, options=[f"--nodes={nodes}"], variables=own)
    job.wait_for("training", lambda: records(folder / "run") != [])
    on = {line.partition(":")[0] for line in cluster.processes() if " train " in line}
    assert on == set(cluster.nodes_of(job))
    assert len(on) == nodes
    job.finish()
    shows(job.said, [f"{processes} on each of {' '.join(sorted(on))}, meeting at 10.79.0.", "staleness 2/1/1/0"])
    assert_same_end(folder / "run", alone(DIGITS, nodes * processes, folder))


def test_after_a_lost_node_the_job_ends_elsewhere_with_its_bits(cluster, folder):
    """After a node is cut off the job names it and ends elsewhere with the same bits."""
    job = held(cluster, folder)
    first = cluster.nodes_of(job)
    cluster.call("cut", first[1])
    try:
        (folder / HOLD).unlink()
        job.wait_for("the second start", lambda: job.starts == 2)
        shows(job.said, [first[1]])
        assert first[1] not in cluster.nodes_of(job)
        job.finish()
        shows(job.said, ["resumed from", f"Node failure on {first[1]}"])
        assert_same_end(folder / "run", alone(HELD, 2, folder))
    finally:
        cluster.call("heal", first[1])


@pytest.mark.parametrize("to", [(), ("--batch",), ("--full",)], ids=["steps", "script", "both"])
def test_a_signal_saves_and_slurm_continues_to_the_same_bits(to, cluster, folder):
    job = held(cluster, folder, "runtime.checkpoint_every_updates=4")
    cluster.ask("scancel", "--signal=USR1", *to, job.number)
    time.sleep(1)  # no data come, so the run cannot end before it has heard
    (folder / HOLD).unlink()
    job.wait_for("the second start", lambda: job.starts == 2)
    job.finish()
    shows(job.said, ["stopped by USR1; queued again (1 of", "resumed from"])
    assert_same_end(folder / "run", alone((*HELD, "runtime.checkpoint_every_updates=4"), 2, folder))


def test_a_job_array_trains_a_run_for_each_seed(cluster, folder):
    options, own = ["--array=0-3", "--nodes=1"], {"PROCESSES_PER_NODE": "2"}  # so K = 2
    cluster.submit(DIGITS, folder=folder, options=options, variables=own).finish()
    runs = [folder / "runs" / f"digits-resnet8-adl-k2-m4-seed{seed}" for seed in range(4)]
    losses = {json.loads((run / "summary.json").read_text())["validation_loss"] for run in runs}
    assert len(losses) == 4
    assert_same_end(runs[3], alone((*DIGITS, "seed=3"), 2, folder))


def test_the_commands_of_compose_yaml_train_on_two_hosts(cluster, folder):
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    hosts, running = folder / "hosts", []
    hosts.write_text("".join(f"10.79.0.{i + 1} {name}\n" for i, name in enumerate(services)))
    settings = {"SETTINGS": f"train.epochs=1 {' '.join(COMMON)}"}
    for i, (name, service) in enumerate(services.items()):
        own = {key: str(value) for key, value in service["environment"].items()} | settings
        command = service["command"][0].replace("$$", "$")
        start = f"hostname {name} && mount --bind {hosts} /etc/hosts && cd {folder} && {command}"
        words = ["nsenter", f"--net=/var/run/netns/adl{i + 1}", "unshare", "--uts", "--mount", "sh", "-c", start]
        running.append(subprocess.Popen(words, env={**cluster.environment, **own}))
    try:
        assert [process.wait(PATIENCE) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    assert json.loads((folder / "runs" / "compose" / "summary.json").read_text())["epochs"] == 1


def test_a_sweep_by_submitit_runs_as_jobs_and_compares(cluster, folder):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install -c constraints.txt -e '.[slurm]'")
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=2", "hydra.launcher.timeout_min=10"]
    done = as_command(
        sys.executable, "-m", "adl_dist", "train", "--multirun", *words, *DIGITS, "method=adl,bp", "run_dir=sweep",
        cwd=folder, env=cluster.environment, timeout_seconds=2 * PATIENCE,
    )  # fmt: skip
    assert done.code == 0, done
    shows(done.out, ["2 of them to do", "adl/k2-seed0: accuracy", "| adl M=4 ", "| bp M=4 "])
    logs = list((folder / "sweep" / ".launcher" / ".submitit").glob("*/*_log.out"))
    assert len(logs) == 2
    assert_same_end(folder / "sweep" / "adl" / "k2-seed0", alone(DIGITS, 2, folder))
