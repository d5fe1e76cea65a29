"""Methods as the command line names them."""

import json

from adl_dist.cli.config.schema import RunConfig
from adl_dist.errors import ConfigError
from adl_dist.schedule import METHODS, Method, method


def method_words(method: Method) -> list[str]:
    """Return the arguments of a command line that make ``method``."""
    usual = {**Method(name=method.name).settings, "accumulation_steps": None}
    special = {key: value for key, value in method.settings.items() if usual.get(key) != value}
    return [f"method={method.name}", *(f"method.{key}={json.dumps(value)}" for key, value in special.items())]


def method_named(name: str, config: RunConfig, *, flag: str) -> Method:
    """Return the method ``name`` next to the configured one: with the configured M, unless it is one that has none."""
    if name not in METHODS:
        raise ConfigError(f"{flag}: there is no method '{name}'; choose of {', '.join(METHODS)}")
    if name == config.method.name:
        return config.method.chosen()
    row = METHODS[name]
    steps = config.method.chosen().accumulation_steps
    return method(name) if row.accumulation_steps == 1 else method(name, accumulation_steps=steps)
