"""The ADL paper's experiments: each sweep is the runs of its table, with the paper's settings and the authors' cuts."""

import functools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import checked, compose_run, composed_of, config_folder
from adl_dist.cli.sweep import requested
from adl_dist.partition import Chain, checked_sizes
from adl_dist.schedule import method
from tests.support.tiers import slow

# Without those that are no sweep: test_text.py carries out the commands of gpt.
ONE_RUN = ("gpt", "recommended")
FILES = {p.stem: p for p in sorted((config_folder() / "experiment").glob("*.yaml")) if p.stem not in ONE_RUN}
PAGE = Path(__file__).parents[2] / "docs" / "dev" / "experiments.md"
BLOCK = re.compile(r"layer\d+[._]\d+")  # as names of parameters begin
PAPER = sorted(name for name in FILES if name.startswith("table"))
# The same network and recipe as another one, with another cut; composing their runs takes seconds.
CUTS = ("56_k2", "56_k3", "56_k4", "56_k8", "98_k8", "110_k2", "110_k8", "164_k4", "164_k10")
LIKE_OTHERS = [*(f"table2b_resnet{name}" for name in CUTS), "table2b_resnet34_k12", "table2c_resnet50"]
SAME_NETWORK = {"table2a": "table2b_resnet56_k16"}
LIKE_OTHERS += ["table2c_se_resnet18", "claim", "claim_gpt", "claim_muon"]


def cases(names):
    return [slow(name) if name in LIKE_OTHERS else name for name in names]


@dataclass(frozen=True)
class Table:
    """What the paper shows."""

    of: str  # data and network, as run folders are named
    runs: list[tuple[str, int, int]]  # (method, M, K) of each number, for one seed
    cuts: dict[int, list[int]] = field(default_factory=dict)  # residual blocks on each stage, for each K


def row(network, *blocks, dsp=False):
    K = len(blocks)
    stale = [(name, 1, K) for name in ("ddg", "dgl", "fr", *["dsp"] * dsp)]
    return Table(f"cifar10-{network}", [("bp", 1, 1), *stale, ("gpipe", 4, K), ("adl", 4, K)], {K: list(blocks)})


def adl_and_bp(network, *cuts):
    runs = [("bp", 1, 1), *(("adl", 4, len(blocks)) for blocks in cuts)]
    return Table(f"imagenet-{network}", runs, {len(blocks): blocks for blocks in cuts})


RESNET56_K16 = [0, *[2] * 13, 1, 0]
OF_18_K8, OF_18_K10 = [0, *[1] * 6, 2], [0, *[1] * 8, 0]
TABLES = {
    "table2a": Table("cifar10-resnet56", [("adl", M, 16) for M in range(1, 13)], {16: RESNET56_K16}),
    "table2b_resnet56_k2": row("resnet56", 13, 14),
    "table2b_resnet56_k3": row("resnet56", 9, 9, 9),
    "table2b_resnet56_k4": row("resnet56", 6, 7, 7, 7),
    "table2b_resnet56_k8": row("resnet56", 2, 4, 4, 4, 4, 4, 4, 1),
    "table2b_resnet56_k16": row("resnet56", *RESNET56_K16),
    "table2b_resnet110_k2": row("resnet110", 27, 27),
    "table2b_resnet110_k8": row("resnet110", 6, 7, 7, 7, 7, 7, 7, 6),
    "table2b_resnet98_k4": row("resnet98", 12, 13, 12, 11, dsp=True),
    "table2b_resnet98_k8": row("resnet98", 6, 7, 5, 7, 7, 5, 7, 4),
    "table2b_resnet34_k12": row("resnet34", 0, *[1] * 7, 2, 2, 2, 3),
    "table2b_resnet164_k4": row("resnet164", 12, 10, 21, 38, dsp=True),
    "table2b_resnet164_k10": row("resnet164", 6, 6, 6, 9, 6, 6, 6, 9, 12, 15),
    "table2c": adl_and_bp("torchvision-resnet18", [0, 4, 4], [0, 2, 2, 4], OF_18_K8, OF_18_K10),
    "table2c_resnet50": adl_and_bp("torchvision-resnet50", [2, 3, 4, 7]),
    "table2c_se_resnet18": adl_and_bp("se_resnet18", OF_18_K8, OF_18_K10),
    "table3": Table(
        "synthetic-torchvision-resnet101",
        [("bp", 4, 1), ("dsp", 4, 4), *((n, 4, K) for n in ("ddg", "fr", "dgl", "gpipe", "adl") for K in (2, 3, 4))],
    ),
    "table4": Table(
        "synthetic-resnet18",
        [*((name, 1, 4) for name in ("bp", "ddg", "fr", "dgl")), ("gpipe", 4, 4), ("adl", 4, 4)],
        {4: [0, 2, 2, 4]},
    ),
}
SEEDS = "0,1,2"
# Section 6: rate, weight decay, epochs, where the rate falls.
RECIPES = {"cifar10": (0.1, 5e-4, 300, [150, 225, 275]), "imagenet": (0.05, 1e-4, 90, [30, 60, 80])}


@functools.cache
def alone(experiment):
    """What the experiment sweeps, and its settings as plain values, without what it sweeps."""
    composed = composed_of([f"experiment={experiment}"])
    return dict(composed.hydra.sweeper.params or {}), checked(composed, [])[1]


def header(experiment):
    return re.match(r"# @package _global_\n((?:#.*\n)+)", FILES[experiment].read_text())[1]


def commands(experiment):
    return [shlex.split(line) for line in re.findall(r"^#.*?adl-dist train (.*)", header(experiment), re.MULTILINE)]


@functools.cache
def planned(experiment):
    """The sweep that the header's command asks for, with a single seed: composing takes a moment for each run."""
    fewer = ["partition.num_stages=2"] if experiment.startswith(("claim", "compare")) else []
    return requested([*commands(experiment)[0 if experiment == "compare" else -1], *fewer, "seed=0"])


@functools.cache
def chain_of(network, granularity):
    """The units of the network of ``network``, the first experiment that has it."""
    with torch.device("meta"):
        model = instantiate.build_model(planned(network).jobs[0].config)
    return Chain(model, [torch.randn(n, 3, 64, 64) for n in (2, 4)], granularity=granularity)


def test_every_table_of_the_paper_has_its_experiments():
    assert sorted(TABLES) == PAPER


@pytest.mark.parametrize("experiment", cases(PAPER))
def test_an_experiment_is_the_runs_of_its_table(experiment):
    """With the paper's settings."""
    table, request = TABLES[experiment], planned(experiment)
    configs = [run.config for run in request.jobs]
    ran = [(c.method.name, c.method.micro_batches_per_update, c.partition.num_stages) for c in configs]
    assert sorted(ran) == sorted(table.runs)
    assert alone(experiment)[0].get("seed") == (SEEDS if "table2" in experiment else None)
    assert str(request.run_dir) == f"runs/{experiment}-{table.of}"
    for config in configs if "table2" in experiment else ():
        assert config.optimizer["_target_"] == "torch.optim.SGD"
        assert (config.optimizer["momentum"], config.train.batch_size, config.train.max_updates) == (0.9, 128, None)
        schedule = config.lr_schedule
        assert (schedule["_target_"], schedule["warmup_epochs"]) == ("adl_dist.optim.multistep", 3)
        settings = (config.optimizer["lr"], config.optimizer["weight_decay"], config.train.epochs)
        assert (*settings, schedule["milestones"]) == RECIPES[table.of.partition("-")[0]]


def test_recommended_is_a_set_of_settings_that_words_replace():
    config, _ = compose_run(["experiment=recommended", "model=gpt", "model.vocab_size=9", "model.context=4"])
    settings = {"delay": "third", "split_backward": True, "mitigation": ["predict"]}
    assert config.method == method("adl", accumulation_steps=4, **settings)
    assert config.method.why_not_tied is None
    assert config.optimizer["_target_"] == "adl_dist.optimizers.Muon"
    config, _ = compose_run(["experiment=recommended", "optimizer=sgd", "method.delay=minimal"])
    assert (config.optimizer["_target_"], config.method.delay) == ("torch.optim.SGD", "minimal")


@pytest.mark.parametrize("experiment", cases(name for name in PAPER if TABLES[name].cuts))
def test_the_cut_of_an_experiment_is_that_of_the_authors_code(experiment):
    cuts = {}
    for run in planned(experiment).jobs:
        partition = run.config.partition
        if partition.num_stages > 1 and partition.num_stages not in cuts:
            assert isinstance(partition.balance, list)
            chain = chain_of(SAME_NETWORK.get(experiment, experiment), partition.granularity)
            plan = chain.plan(checked_sizes(chain, partition.num_stages, partition.balance))
            blocks = [set() for _ in range(partition.num_stages)]
            for name, stages in plan.holders.items():
                if found := BLOCK.match(name):
                    blocks[stages[0]].add(found[0])
            cuts[partition.num_stages] = [len(names) for names in blocks]
    assert cuts == TABLES[experiment].cuts


@pytest.mark.parametrize("experiment", cases(FILES))
def test_the_header_of_an_experiment_gives_working_commands(experiment):
    every = commands(experiment)
    assert every
    assert all(f"experiment={experiment}" in command for command in every)
    for command in every[1:] if experiment == "compare" else every[:-1]:
        compose_run([*command, "hydra.mode=RUN"])
    runs = len(planned(experiment).jobs) * (3 if "table2" in experiment else 1)
    (entry,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{experiment}` |")]
    shown = [f"{runs} runs" in text for text in (header(experiment), entry)]
    assert shown == [True, True] or experiment not in PAPER
