"""``benchmarks/gpu.py`` on a CPU: it keeps to its time, and a run that fails costs its row alone."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adl_dist.cli.config import reading
from adl_dist.cli.config.compose import compose_run
from adl_dist.data.loading import PLAIN
from adl_dist.training.input import DeviceLoader

FILE = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "runtime.device=cpu"])
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.DEVICE == "cpu"
    return module


def test_no_round_is_begun_that_would_end_too_late(gpu, monkeypatch, capsys):
    clock = iter([100.0, 110.0, 160.0, 160.0, 170.0, 250.0, 250.0])  # of a round begin, its second row, and end
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu, "BEGAN", 0.0)
    figures = {"base": iter([2.0, 4.0]), "row": iter([3.0, 3.0])}
    gpu.in_turns({row: lambda row=row: next(figures[row]) for row in figures}, gpu.Limits(320.0))
    told = capsys.readouterr().out
    assert "Rounds: 2" in told
    assert "| base | 3 | 2 .. 4 | 1.00 |" in told
    assert "| row | 3 | 3 .. 3 | 1.00 |" in told


def test_a_run_that_fails_costs_its_row(gpu, capsys):
    assert math.isnan(gpu.images_per_second("model=none", "runtime.processes=false"))
    assert "model=none" in capsys.readouterr().out


def test_a_row_that_fails_or_has_no_time_leaves_the_others(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ROUNDS", 1)

    def fail():
        raise RuntimeError("out of memory\nand more")

    def last():
        monkeypatch.setattr(gpu, "BEGAN", -1e9)
        return 2.0

    gpu.in_turns({"base": lambda: 1.0, "fails": fail, "last": last, "late": fail}, gpu.Limits(1e8))
    told = capsys.readouterr()
    assert "| last | 2 | 2 .. 2 | 2.00 |" in told.out
    assert "| fails | nan | nan .. nan | nan |" in told.out
    assert "fails: RuntimeError: out of memory and more\n" in told.err
    assert "late: no time left" in told.err


def test_a_run_that_lasts_costs_its_row(gpu, monkeypatch, capsys):
    def lasts(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu.subprocess, "run", lasts)
    assert math.isnan(gpu.images_per_second("model=resnet8"))
    assert "not ended after 150 s" in capsys.readouterr().out


def test_what_is_compared_has_the_same_loader(gpu, monkeypatch):
    """By hand from the loader of our runs, with their settings: only then is the engine what differs."""
    made = []

    class Watched(DeviceLoader):
        def __init__(self, dataset, name, **how):
            made.append((name, type(dataset), how["shuffle"], how["num_workers"], how.get("loading", PLAIN)))
            super().__init__(dataset, name, **how)

    monkeypatch.setattr(gpu, "DeviceLoader", Watched)
    next(gpu.batches(4, 8, 10))
    config, _ = compose_run([*gpu.COMMON, "run_dir=none"])
    monkeypatch.setattr(reading, "DeviceLoader", Watched)
    reading.device_loader(config, torch.device("cpu"), shuffle=config.data.get("shuffle", True))
    assert made[0] == made[1]


@pytest.mark.slow
def test_a_run_of_ours_has_a_speed(gpu):
    tiny = ("model=resnet8", "data.num_samples=32", "data.image_size=8", "train.batch_size=16", "train.epochs=1")
    assert gpu.images_per_second(*tiny) > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_runs_side_by_side_stop_in_time_and_go_on(gpu, monkeypatch, tmp_path, capsys):
    words = ["model=resnet8", "data=synthetic", "data.num_samples=320", "data.num_validation=8", "data.image_size=8"]
    words += ["train.batch_size=16", "train.epochs=100000", "runtime.tensorboard=false", "runtime.report=false"]
    words += ["runtime.processes=false"]
    for _ in range(2):
        gpu._side_by_side(words, tmp_path, seconds=40)
    gpu._print_accuracy(words, tmp_path)
    told = capsys.readouterr().out
    assert told.count("stopped in epoch") == 4
    assert len(list((tmp_path / "M4" / "logs").iterdir())) >= 1
