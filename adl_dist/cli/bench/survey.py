"""What has to be known of model, data and cut before anything is measured. Everything here happens on the CPU."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from adl_dist.cli.bench.data import feed_of
from adl_dist.cli.bench.entries import Traffic
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.methods import method_words
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import Child, ChildFailed, run_together
from adl_dist.data import check_dataset
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition import Chain, checked_sizes, even_sizes, linearise
from adl_dist.stage import to_channels_last
from adl_dist.training.dry_run import dry_run
from adl_dist.training.input import common_sample
from adl_dist.transport import Specs, TensorSpec


@dataclass(frozen=True, kw_only=True)
class ModelSurvey:
    """What all contenders have in common.

    Attributes:
        sizes: units of each stage.
        granularity: of the units.
        overwrites: for each stage, for each tensor that arrives, whether it is written to.
        target: what the loss takes beside the output.
        traffic: what training sends.
    """

    sizes: list[int]
    granularity: str
    overwrites: list[list[bool]]
    target: TensorSpec
    traffic: Traffic


def survey(config: RunConfig, overrides: Sequence[str], *, threads: int) -> ModelSurvey:
    """Settle the cut, and try each stage of it.

    Args:
        config: of the run.
        overrides: that it was made from.
        threads: of a stage, to measure the cut with.

    Raises:
        ConfigError, DataError, PartitionError: the model cannot be trained or cut like that.
    """
    cpu = torch.device("cpu")
    train, _ = instantiate.build_data(config)
    check_dataset(train, name="training", min_samples=1)
    sample = common_sample(feed_of(train, config, cpu), None)
    assert sample is not None
    arriving, target = (TensorSpec.of(tensor) for tensor in sample)
    model = instantiate.build_model(config).to(getattr(torch, config.dtype.value))
    if config.runtime.channels_last:
        to_channels_last(model)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    K, balance = config.partition.num_stages, config.partition.balance
    fine = balance == "auto" or (isinstance(balance, list) and isinstance(balance[0], str))
    granularity = config.partition.granularity.value if config.partition.granularity else ("layer" if fine else "block")
    pieces, sizes = [model], [1]
    if K > 1:
        chain = linearise(model, granularity=granularity)
        sizes = _sizes(config, chain, overrides, granularity, threads)
        pieces = chain.pieces(sizes)
    return _tried(pieces, config, sizes, granularity, arriving, target, parameter_bytes)


def _tried(
    pieces: Sequence[nn.Module],
    config: RunConfig,
    sizes: list[int],
    granularity: str,
    arriving: TensorSpec,
    target: TensorSpec,
    parameter_bytes: int,
) -> ModelSurvey:
    loss_fn, cpu, last = instantiate.build_loss(config), torch.device("cpu"), len(pieces) - 1
    acts, shared = Specs.always([arriving]), None
    overwrites, act_bytes, grad_bytes = [], [], []
    for k, piece in enumerate(pieces):
        found = dry_run(piece, k, acts, target if k == last else None, loss_fn, cpu, shared)
        overwrites.append(found.overwrites[0])
        acts, shared = found.outs, found.shared
        if k < last:
            act_bytes.append(sum(map(bytes_of, acts.training)))
            grad_bytes.append(sum(map(bytes_of, acts.of_gradients().training)))
    traffic = Traffic(
        act_bytes=act_bytes, grad_bytes=grad_bytes, target_bytes=bytes_of(target), parameter_bytes=parameter_bytes
    )
    return ModelSurvey(sizes=sizes, granularity=granularity, overwrites=overwrites, target=target, traffic=traffic)


def bytes_of(spec: TensorSpec) -> int:
    """Of one sample."""
    sample = spec.empty(1, torch.device("meta"))
    return sample.numel() * sample.element_size()


def _sizes(config: RunConfig, chain: Chain, overrides: Sequence[str], granularity: str, threads: int) -> list[int]:
    K, balance = config.partition.num_stages, config.partition.balance
    if balance == "auto":
        return _measured(config, overrides, granularity, threads)
    return even_sizes(chain, K) if balance == "even" else checked_sizes(chain, K, balance)


def _measured(config: RunConfig, overrides: Sequence[str], granularity: str, threads: int) -> list[int]:
    """As ``adl-dist plan`` cuts, in a process of its own: of a GPU, nothing must be left in this one."""
    method, K = config.method.chosen(), config.partition.num_stages
    kept = [word for word in overrides if not word.lstrip("+~").startswith(("method", "runtime.threads="))]
    words = [
        *kept,
        *method_words(method),
        f"partition.granularity={granularity}",
        f"runtime.threads={threads}",
        "hydra.mode=RUN",
    ]
    command = [sys.executable, "-m", "adl_dist", "plan", *words, "--stages", str(K), "--methods", method.name, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "plan.json"
        try:
            run_together([Child(command=command, log=log)])
        except ChildFailed as failed:
            raise ConfigError(f"partition.balance=auto: the model could not be measured: {failed}") from failed
        facts = json.loads(log.read_text().splitlines()[-1])
    if not facts["predictions"]:
        raise PartitionError(f"partition.balance=auto: {facts['refused'][0]}")
    return [int(size) for size in facts["predictions"][0]["balance"]["sizes"]]
