"""``adl-dist launch slurm`` up to the submission; the rest needs a cluster: tests/launch/test_slurm_jobs.py."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.commands import ROOT, in_process, shows

LAUNCH = ("launch", "slurm")
TEMPLATE = (ROOT / "launch" / "slurm.sbatch").read_text()


def printed(*words):
    outcome = in_process(*LAUNCH, "--dry-run", *words)
    assert outcome.code == 0, outcome
    assert subprocess.run(["bash", "-n"], input=outcome.out, text=True, check=False).returncode == 0
    return outcome.out


def directives(script):
    found = [line.removeprefix("#SBATCH --").partition("=") for line in script.splitlines() if "#SBATCH" in line[:8]]
    assert len({name for name, _, _ in found}) == len(found), "an option is given twice"
    return {name: value for name, _, value in found}


def assigned(script, expression):
    """What bash makes of ``expression`` after the settings of ``script``."""
    settings = script.partition("pipefail\n")[2].partition("\nPROCESSES_PER_NODE=${")[0]
    done = subprocess.run(["bash", "-c", f"{settings}\n{expression}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_is_printed_is_the_template_with_the_settings_filled_in(tmp_path):
    words = ["train.epochs=3", f"run_dir='{tmp_path}/with space'"]
    script = printed("--nodes", "2", "--processes-per-node", "2", "--time", "10:00", "--interface", "ib0", *words)
    asked = {"nodes": "2", "cpus-per-task": "2", "time": "10:00"}
    assert directives(script) == directives(TEMPLATE) | asked
    assert assigned(script, 'echo $PROCESSES_PER_NODE $INTERFACE; echo "$PYTHON"') == ["2 ib0", sys.executable]
    assert assigned(script, 'printf "%s\\n" "$@"') == words
    kept = [line for line in TEMPLATE.splitlines() if not line.startswith("# Here")]
    assert [line for line in kept if line not in script.splitlines()] == []


def test_a_job_of_gpus_computes_on_them_one_process_each():
    script = printed(
        "--nodes", "1", "--gpus-per-node", "2", "--account", "a", "--partition", "p", "--sbatch", "qos=low"
    )
    asked = {"nodes": "1", "gpus-per-node": "2", "account": "a", "partition": "p", "qos": "low"}
    assert directives(script) == directives(TEMPLATE) | asked
    assert assigned(script, 'echo $PROCESSES_PER_NODE "$@"') == ["2 runtime.device=cuda"]


def test_a_name_that_is_that_of_the_cluster_is_not_taken_for_it():
    assert directives(printed("--partition", "slurm"))["partition"] == "slurm"


def test_options_of_sbatch_may_have_no_value_or_one_with_spaces():
    script = printed("--sbatch", "exclusive", "--sbatch", "comment=two words", "--sbatch", "open-mode=truncate")
    asked = {"exclusive": "", "comment": "'two words'", "open-mode": "truncate"}
    assert directives(script).items() >= asked.items()


def test_each_task_of_a_job_array_has_a_choice_of_its_own():
    script = printed("--array", "optimizer.lr=0.1,0.2", "run_dir=runs/lr-${optimizer.lr}")
    assert directives(script)["array"] == "0-1"
    assert assigned(script, 'printf "%s\\n" "${ARRAY_CHOICES[@]}"') == ["optimizer.lr=0.1", "optimizer.lr=0.2"]


@pytest.mark.parametrize(
    ("words", "nodes", "per_node"),
    [
        ([], "1", "2"),  # K = 2 is the default
        (["partition.num_stages=4"], "1", "4"),
        (["--nodes", "2"], "2", "1"),
        (["partition.num_stages=4", "--nodes", "2"], "2", "2"),
        (["partition.num_stages=4", "--processes-per-node", "1"], "4", "1"),
        (["partition.num_stages=4", "--gpus-per-node", "2"], "2", "2"),
        (["--nodes", "2", "--processes-per-node", "2"], "2", "2"),
    ],
)
def test_of_nodes_processes_and_stages_the_one_that_is_missing_follows(words, nodes, per_node):
    script = printed(*words)
    assert directives(script)["nodes"] == nodes
    assert assigned(script, "echo $PROCESSES_PER_NODE") == [per_node]


REFUSED = [
    (["partition.num_stages=3", "--nodes", "2"], ["partition.num_stages=3", "--nodes 2", "multiple of 2"]),
    (["partition.num_stages=3", "--processes-per-node", "2"], ["--processes-per-node 2"]),
    (["partition.num_stages=3", "--nodes", "2", "--processes-per-node", "2"], ["2 nodes x 2 processes"]),
    (["--nodes", "0"], ["--nodes", "'0'", "no whole number above 0"]),
    (["--nodes", "4", "--processes-per-node", "4"], ["partition.num_stages=16 needs at least 16 units"]),
    (["seed=0,1"], ["several values", "--array 'seed=0,1'"]),
    (["--array", "seed=0"], ["gives one value"]),
    (["--array", "partition.num_stages=2,4"], ["same nodes"]),
    (["--array", "optimizer.lr=0.1,0.2"], ["would share run_dir=", "run_dir=runs/NAME-${optimizer.lr}"]),
    (["--sbatch", "exclusive="], ["'exclusive='", "OPTION=VALUE", "like exclusive"]),
    (["--gpus", "2"], ["--gpus", "adl-dist launch slurm --help"]),
    (["train.epoch=2"], ["did you mean 'train.epochs'?"]),
    (["experiment=compare"], ["several runs", "hydra/launcher=submitit_slurm", "hydra.mode=RUN"]),
    (["runtime.processes=false"], ["runtime.processes=false needs no nodes"]),
]


@pytest.mark.parametrize(("words", "parts"), REFUSED, ids=lambda words: " ".join(words))
def test_what_cannot_be_run_is_refused_before_it_waits_in_a_queue(words, parts):
    shows(in_process(*LAUNCH, "--dry-run", *words).refusal(), parts)


def test_only_slurm_is_known_to_launch():
    shows(in_process("launch", "--nodes", "2").refusal(), ["adl-dist launch slurm"])


def test_without_sbatch_the_error_says_where_to_submit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    shows(in_process(*LAUNCH).refusal(), ["no sbatch", "--dry-run"])


@pytest.mark.parametrize(
    ("code", "said"), [(0, "submitted job 12: 2 stages on each of 1 nodes\n"), (1, "no such account")]
)
def test_the_script_goes_to_sbatch_as_it_is_printed(monkeypatch, tmp_path, code, said):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f"#!/bin/sh\ncat >{shlex.quote(str(tmp_path))}/script; echo '12;c'; echo 'no such\naccount' >&2; exit {code}\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    outcome = in_process(*LAUNCH)
    assert (outcome.out if code == 0 else outcome.refusal()).endswith(said)
    assert (tmp_path / "script").read_text() == printed()


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("kill -USR1 $PPID; {stops}", 75),
        ("kill -USR1 $PPID", 0),  # it came while the last weights were evaluated and saved
        ("{stops}", 0),  # by `adl-dist stop`
        ("kill -USR1 $PPID; {stops}; exit 1", 1),
    ],
)
def test_a_node_tells_slurm_to_come_again_only_if_its_ranks_have_stopped_at_a_signal(does, code, tmp_path):
    stops = f"{sys.executable} -c 'from adl_dist.distributed import parent_process; parent_process.flag_stopped()'"
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!/bin/sh\n{does.format(stops=stops)}\n")
    torchrun.chmod(0o755)
    functions = TEMPLATE[TEMPLATE.index("\nSTOPPED=") : TEMPLATE.index("\nagain() {")]
    names = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "PROCESSES_PER_NODE": "1", "MAX_RESTARTS": "0"}
    names |= {
        "PYTHON": str(torchrun),
        "PORT": "1",
        "HEAD_ADDRESS": "127.0.0.1",
        "INTERFACE": "lo",
        "TMPDIR": str(tmp_path),
    }
    script = f"{functions}\nfirst_address() {{ echo 127.0.0.1; }}\non_a_node train"
    done = subprocess.run(["bash", "-uc", script], env={**os.environ, **names}, timeout=60, check=False)
    assert done.returncode == code
    assert list(tmp_path.iterdir()) == [torchrun]
