"""Refusal of settings with an effect only on our runs of a comparison."""

from adl_dist.cli.config.schema import RunConfig
from adl_dist.errors import ConfigError


def check_fair(config: RunConfig, *, command: str) -> None:
    """Raise ConfigError if a setting would apply only to our runs."""
    train, runtime = config.train, config.runtime
    used = {
        "runtime.autocast": runtime.autocast,
        "runtime.codec": runtime.codec != "none",
        "runtime.gradient_codec": runtime.gradient_codec not in (None, "none"),
        "runtime.compile": runtime.compile,
        "runtime.loggers": runtime.loggers,
        "train.clip_norm": train.clip_norm,
        "train.ema": train.ema,
        "train.non_finite": train.non_finite != "stop",
        "train.metrics": train.metrics,
        "data.samples_per_epoch": config.data.get("samples_per_epoch"),
        "callbacks": config.callbacks,
    }
    if found := [key for key, value in used.items() if value]:
        raise ConfigError(
            f"{' and '.join(found)} would apply to our methods alone; omit them, or where an experiment sets "
            f"them give null, [] or false: {command} compares all contenders in plain dtype, uncompiled, with "
            "plain messages and nothing besides training"
        )
