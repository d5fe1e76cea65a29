"""The values that a trainer takes, from the names of their fields: for helpers that hand options on."""

from dataclasses import fields

from torch import nn

import adl_dist
from adl_dist.schedule import Pipeline
from adl_dist.stage import TrainSpec

QUIET = adl_dist.Monitoring(quiet=True, stage_records_every=1, report=False)
SILENT = adl_dist.Monitoring(quiet=True, stage_records_every=1, tensorboard=False, report=False)

KINDS = {
    "partition": adl_dist.PartitionSpec,
    "precision": adl_dist.Precision,
    "gradients": adl_dist.GradientPolicy,
    "processes": adl_dist.ProcessOptions,
    "timeouts": adl_dist.WatchdogTimeouts,
    "checkpoints": adl_dist.CheckpointPolicy,
    "monitoring": adl_dist.Monitoring,
    "loading": adl_dist.Loading,
}


def values(**options):
    """Put each option into the value that has a field of its name; return the values, and all other options as given.

    ``values(epochs=2, quiet=True)`` is ``{"epochs": 2, "monitoring": Monitoring(quiet=True, report=False)}``: a report
    takes most of the time of a small run.
    """
    arguments = {}
    for key, kind in KINDS.items():
        own = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        if own:
            arguments[key] = kind(**({"report": False, **own} if kind is adl_dist.Monitoring else own))
    return arguments | options


def spec_of(K, optimizer, loss_fn=None, *, seed=0, **method):
    """Return how a stage of K is trained by ADL with the options of ``method``."""
    pipeline = Pipeline(adl_dist.method("adl", **method), K)
    return TrainSpec(pipeline=pipeline, loss_fn=loss_fn or nn.CrossEntropyLoss(), optimizer=optimizer, seed=seed)
