"""Settings in messages: keys of the command line, or names of Python.

Messages name a setting by its key, like ``partition.tied=untie``. A script, unlike the command line, shows them with
the setting's name in Python, ``PartitionSpec(tied='untie')``.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

# By key: the call that takes the setting, or an empty text, and its name there. Dataclasses of settings add their own.
PYTHON_NAMES: dict[str, tuple[str, str]] = {
    "partition.num_stages": ("", "num_stages"),
    **{f"train.{name}": ("", name) for name in ("batch_size", "epochs", "max_updates", "metrics", "ema")},
    "train.eval_every_updates": ("", "eval_every_updates"),
    "loss.reduction": ("", "loss_reduction"),
    "loss._target_": ("", "loss_fn"),
    "optimizer.rules": ("", "rules"),
    "data.num_classes": ("", "num_classes"),
    "model.num_classes": ("", "num_classes"),
    "data.num_workers": ("", "num_workers"),
    "data.shuffle": ("", "shuffle"),
}
GROUP = r"(?:method|partition|train|runtime|loss|data|model|optimizer)"
KEY = re.compile(rf"\b({GROUP}\.\w+)(?:=(\[[^\]]*\]|'[^']*'|[\w.+-]*\w))?")
NULL = re.compile(r"(?<![\w/.=-])null(?![\w/.-])")  # as a word of ours
_shows_keys = False


@contextmanager
def keys_shown() -> Iterator[None]:
    """Show settings by their keys inside the block."""
    global _shows_keys
    before, _shows_keys = _shows_keys, True
    try:
        yield
    finally:
        _shows_keys = before


def worded(text: str) -> str:
    """Return ``text`` with each setting named as its reader writes it."""
    return text if _shows_keys else NULL.sub("None", KEY.sub(_in_python, text))


def _in_python(found: re.Match[str]) -> str:
    key, value = found.groups()
    if key not in PYTHON_NAMES:
        return found[0]
    call, name = PYTHON_NAMES[key]
    if value is not None:
        name += f"={_read(value)!r}"
    elif call:
        name += "=..."
    return f"{call}({name})" if call else name


def _read(text: str) -> object:
    for read in (int, float, yaml.safe_load):
        try:
            return read(text)
        except (ValueError, yaml.YAMLError):  # 1e-3 is a text in YAML
            continue
    return text
