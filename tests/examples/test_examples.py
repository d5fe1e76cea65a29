"""The examples do what they say. Those that start processes, or train for longer, are in the tier `slow`."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.race.link import Link
from benchmarks.race.namespaces import namespaces, why_not
from tests.support.commands import OF_RANKS, ROOT, TORCHRUN, as_command, left_behind, shows

EXAMPLES = ROOT / "examples"
BIN = str(Path(sys.executable).parent)


def succeeded(*command, cwd, seconds=250.0):
    done = as_command(*map(str, command), cwd=cwd, timeout_seconds=seconds)
    assert done.code == 0, f"{done.err}\n{done.out}"
    if sys.platform == "linux":
        assert left_behind(cwd) == []
    return done.out


def test_scripts_have_60_lines_at_most_and_are_listed():
    told = (EXAMPLES / "README.md").read_text()
    scripts = [path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert len(scripts) == 8
    for path in scripts:
        assert len(path.read_text().splitlines()) <= 60, path
        assert f"({path.name})" in told


def test_the_notebook_runs_cell_by_cell_and_has_no_output():
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    names, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for cell in codes:
            exec("".join(cell["source"]), names)
    shows(out.getvalue(), ["stage 0: staleness", "at most 1", "stage 1: staleness 0.000", "label "])
    assert names["summary"]["validation_accuracy"] > 0.5


def test_own_cnn_learns_in_one_process(tmp_path, capsys):
    runpy.run_path(str(EXAMPLES / "own_cnn.py"))["main"](str(tmp_path / "run"))
    accuracy = json.loads((tmp_path / "run" / "summary.json").read_text())["validation_accuracy"]
    assert accuracy > 0.8
    shows(capsys.readouterr().out, [f"accuracy {accuracy:.1%}; 23 tensors"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_own_cnn_has_the_same_result_in_two_processes(tmp_path):
    script = EXAMPLES / "own_cnn.py"
    last = succeeded(sys.executable, script, tmp_path / "one", cwd=tmp_path).splitlines()[-1]
    ranks = ["--rdzv-backend=adl-dist", "--rdzv-endpoint=localhost", "--nproc-per-node=2"]
    assert last in succeeded(*TORCHRUN, *ranks, script, tmp_path / "two", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_gpt_writes_behind_its_prompt(tmp_path):
    text = tmp_path / "text"
    text.write_text((ROOT / "CONTRIBUTING.md").read_text())
    out = succeeded(sys.executable, EXAMPLES / "gpt_on_text.py", text, 20, cwd=tmp_path)
    shows(out, ["update 20/20", text.read_text()[:20]])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_classifier_of_transformers_learns(tmp_path):
    out = succeeded(sys.executable, EXAMPLES / "hf_classifier.py", cwd=tmp_path)
    shows(out, ["epoch 3/3", "like bert.embeddings"])


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_sweep_is_compared(tmp_path):
    words = ["method=bp", "seed=0", "train.epochs=1", "runtime.tensorboard=false"]
    out = succeeded(sys.executable, EXAMPLES / "sweep_and_compare.py", tmp_path / "sweep", *words, cwd=tmp_path)
    shows(out, ["| method", "bp", "Validation accuracy", "adl_dist.compare"])


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.timeout(300)
def test_two_nodes_train_over_a_network(tmp_path):
    """Each node is a network namespace."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    clean |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with namespaces(2, Link(bits_per_second=1e9, round_trip_seconds=0.001)) as spaces:
        nodes = []
        try:
            for rank in range(2):
                script = [str(EXAMPLES / "torchrun_two_nodes.sh"), spaces.master_addr, str(tmp_path / "run")]
                command = [*spaces.command(rank), *script]
                with (tmp_path / f"node{rank}.txt").open("wb") as said:
                    nodes.append(subprocess.Popen(command, stdout=said, stderr=said, env=clean, cwd=tmp_path))
            for rank, node in enumerate(nodes):
                assert node.wait(200) == 0, (tmp_path / f"node{rank}.txt").read_text()
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["validation_accuracy"] > 0.8
