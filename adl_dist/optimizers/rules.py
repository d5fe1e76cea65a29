"""Rules that give some parameters other options, or freeze them.

A rule names parameters of the uncut model, so every cut trains them in the same way. Each stage's optimizer has the
groups of the whole model, in the same order and some of them empty, so that a learning rate schedule with a value for
each group fits every stage.
"""

import difflib
import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adl_dist.errors import ConfigError
from adl_dist.optimizers.by_role import ByRole, check_values
from adl_dist.optimizers.roles import Role, mark_roles, role_of

CRITERIA, EFFECTS = ("names", "layers", "ndim"), ("lr_factor", "frozen")
OURS = ("params", "lr", "initial_lr", "rule")  # keys of a group that no rule may set
MOST_SHOWN = 3  # suggestions for an unknown name

Group = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """One rule; a parameter must meet all of its criteria.

    Attributes:
        where: the rule's name in errors.
        names: names of parameters, with ``*`` and ``?``.
        layers: classes of layers or their bases, with ``*`` and ``?``.
        ndim: numbers of dimensions.
        effect: the settings: options of the optimizer's groups, ``lr_factor`` and ``frozen``.
    """

    where: str
    names: tuple[str, ...]
    layers: tuple[str, ...]
    ndim: tuple[int, ...]
    effect: Mapping[str, Any] = field(hash=False)

    @classmethod
    def of(cls, given: object, number: int) -> "Rule":
        """Read ``given`` as rule ``number``; ConfigError if it is not valid."""
        where = f"optimizer.rules[{number}]"
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{where}: expected keys and values, like {{names: '*bias', weight_decay: 0}}, got {given!r}"
            )
        names, layers, ndim = (_listed(given[key]) if key in given else () for key in CRITERIA)
        effect = {str(key): value for key, value in given.items() if key not in CRITERIA}
        wrong = [one for one in (*names, *layers) if not isinstance(one, str)]
        wrong += [one for one in ndim if type(one) is not int or one < 0]
        if wrong:
            raise ConfigError(f"{where}: {wrong[0]!r}: expected patterns for names and layers, whole numbers for ndim")
        if not (names or layers or ndim):
            raise ConfigError(f"{where} names no parameters; give {', '.join(CRITERIA)}, or names: '*' for all")
        if not effect:
            raise ConfigError(
                f"{where} sets nothing; give an option of the optimizer, like weight_decay, or {' or '.join(EFFECTS)}"
            )
        factor, frozen = effect.get("lr_factor", 1.0), effect.get("frozen", False)
        if not _is_number(factor) or not 0 < factor < math.inf:
            raise ConfigError(
                f"{where}.lr_factor must be a number above 0, got {factor!r}; frozen: true trains nothing"
            )
        if not isinstance(frozen, bool):
            raise ConfigError(f"{where}.frozen must be true or false, got {frozen!r}")
        if odd := [key for key, value in effect.items() if isinstance(value, float) and not math.isfinite(value)]:
            raise ConfigError(f"{where}.{odd[0]} must be a finite number, got {effect[odd[0]]}")
        if own := [key for key in effect if key in OURS]:
            raise ConfigError(f"{where}: {own[0]} is not for rules to set; give lr_factor, which multiplies the rate")
        return cls(where, names, layers, ndim, effect)

    def matches(self, role: Role) -> bool:
        """Return whether the rule applies to a parameter of this ``role``."""
        return (
            (not self.names or any(fnmatch.filter(role.names, pattern) for pattern in self.names))
            and (not self.layers or any(fnmatch.filter(role.layers, pattern) for pattern in self.layers))
            and (not self.ndim or role.ndim in self.ndim)
        )

    def check(self, roles: Sequence[Role]) -> None:
        """Raise ConfigError if a pattern or the rule matches no parameter."""
        names = [name for role in roles for name in role.names]
        layers = sorted({layer for role in roles for layer in role.layers})
        for key, patterns, known in (("names", self.names, names), ("layers", self.layers, layers)):
            what = "parameter" if key == "names" else "layer"
            for pattern in patterns:
                if not fnmatch.filter(known, pattern):
                    raise ConfigError(
                        f"{self.where}.{key}: no {what} of the model is called '{pattern}'; near it are "
                        f"{', '.join(_near(pattern, known)) or 'none'}; expected a name, with * and ?"
                    )
        if not any(self.matches(role) for role in roles):
            ndims = sorted({role.ndim for role in roles if role.ndim is not None})
            raise ConfigError(
                f"{self.where} is about no parameter: none meets all of its criteria; parameters of this model have "
                f"{', '.join(map(str, ndims))} dimensions: give criteria that go together"
            )


class RuledOptimizer:
    """A factory of optimizers with groups by rules; see :func:`with_rules`."""

    def __init__(self, make: Callable[[Iterable[nn.Parameter]], Optimizer], rules: Iterable[object]) -> None:
        """Wrap ``make``, a factory; ConfigError if a rule is invalid."""
        if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
            raise ConfigError(f"optimizer.rules: expected a list of rules, got {rules!r}")
        self.make, self.rules = make, [Rule.of(given, number) for number, given in enumerate(rules)]

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The rules as dictionaries of plain values."""
        of_rules = ({key: list(getattr(rule, key)) for key in CRITERIA} | dict(rule.effect) for rule in self.rules)
        return [{key: value for key, value in one.items() if value != []} for one in of_rules]

    def prepare(self, model: nn.Module) -> None:
        """Freeze parameters of ``model``; ConfigError if a rule matches none."""
        parameters = [*model.parameters()]
        roles = [role_of(parameter, "optimizer.rules") for parameter in parameters]
        for rule in self.rules:
            rule.check(roles)
        for parameter, role in zip(parameters, roles, strict=True):
            if self._effect(role).get("frozen"):
                parameter.requires_grad_(False)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Build an optimizer of ``parameters``, and divide its groups.

        Raises:
            ConfigError: If the optimizer has no such option or value, or a parameter has no role.
        """
        parameters = list(parameters)
        optimizer = self.make(parameters)
        if isinstance(optimizer, Optimizer):
            models = {id(role.of_model): role.of_model for role in (role_of(p, "optimizer.rules") for p in parameters)}
            effects = [self._options(role) for roles in models.values() for role in roles]
            by_key = {_key(effect): effect for effect in [{}, *effects]}  # untouched parameters are the first group
            groups = [part for group in optimizer.param_groups for part in self._divided(optimizer, group, by_key)]
            optimizer.param_groups[:] = groups
        return optimizer

    def _effect(self, role: Role) -> dict[str, Any]:
        """Return a parameter's settings; a later rule overrides an earlier one."""
        return {key: value for rule in self.rules if rule.matches(role) for key, value in rule.effect.items()}

    def _options(self, role: Role) -> dict[str, Any]:
        return {key: value for key, value in self._effect(role).items() if key != "frozen"}

    def _divided(self, optimizer: Optimizer, group: Group, effects: Mapping[str, Mapping[str, Any]]) -> list[Group]:
        """Return one part of ``group`` for each of ``effects`` that fits it.

        An effect fits if the group has all of its options. A part without parameters is empty.
        """
        members: dict[str, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            role = role_of(parameter, "optimizer.rules")
            if parameter.requires_grad and self._effect(role).get("frozen"):
                raise ConfigError(
                    f"optimizer.rules freeze {role.names[0]}, but it takes a gradient: give with_rules(...) itself as "
                    "the optimizer of the Trainer, not a function that calls it"
                )
            members.setdefault(_key(options := self._options(role)), []).append(parameter)
            for key in options:
                if key not in group and key != "lr_factor":
                    raise self._unknown(key, role, optimizer, group)
        parts = []
        for key, effect in effects.items():
            if all(name in group or name == "lr_factor" for name in effect):
                parts.append(_part(group, effect, members.get(key, [])))
                if effect and members.get(key):
                    self._check(optimizer, group, parts[-1], effect)
        return parts

    def _check(self, optimizer: Optimizer, group: Group, part: Group, effect: Mapping[str, Any]) -> None:
        """Raise ConfigError if the optimizer refuses a value in ``effect``."""
        for key, value in effect.items():
            where = next(rule.where for rule in reversed(self.rules) if rule.effect.get(key) == value)
            if key != "lr_factor" and not _is_like(part[key], group[key]):
                expected = type(group[key]).__name__
                raise ConfigError(f"{where}.{key}={value!r}: expected a {expected}, like {group[key]!r}")
            if isinstance(optimizer, ByRole):
                optimizer.check_group(part, where)
            elif type(optimizer).__module__.startswith("torch.optim"):
                check_values(type(optimizer), part, where)

    def _unknown(self, key: str, role: Role, optimizer: Optimizer, group: Group) -> ConfigError:
        where = next(rule.where for rule in self.rules if key in rule.effect and rule.matches(role))
        known = [one for one in group if one not in OURS]
        near = difflib.get_close_matches(key, [*known, *CRITERIA, *EFFECTS], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return ConfigError(
            f"{where}: {type(optimizer).__name__} has no option '{key}' for {role.names[0]}{hint} Its options there "
            f"are {', '.join(known)}"
        )


def with_rules(
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], rules: Iterable[Mapping[str, Any]]
) -> RuledOptimizer:
    """Return a factory of optimizers with ``rules`` for some parameters.

    Args:
        optimizer: a factory from parameters to an optimizer.
        rules: each with one or more of ``names``, ``layers`` and ``ndim``, and with settings: options of the
            optimizer's groups by their own names, ``lr_factor``, which multiplies the learning rate, or ``frozen``.

    Raises:
        ConfigError: If a rule is invalid.
    """
    return RuledOptimizer(optimizer, rules)


def prepare(model: nn.Module, optimizer: object) -> None:
    """Mark the roles of the uncut ``model``, and freeze parameters by rules."""
    mark_roles(model)
    if isinstance(optimizer, RuledOptimizer):
        optimizer.prepare(model)


def _part(group: Group, effect: Mapping[str, Any], members: list[nn.Parameter]) -> Group:
    """Copy ``group`` with ``members`` and the settings of ``effect``."""
    part = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    for key, value in effect.items():
        is_tuple = isinstance(group.get(key), tuple) and isinstance(value, list)
        part[key] = tuple(value) if is_tuple else value
    part["lr"] = part["lr"] * effect.get("lr_factor", 1.0)
    return {**part, "params": members}


def _key(effect: Mapping[str, Any]) -> str:
    return json.dumps(effect, sort_keys=True, default=repr)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_like(value: Any, usual: Any) -> bool:
    """Return whether the type of ``value`` allows it in place of ``usual``."""
    if isinstance(usual, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(usual) and all(map(_is_like, value, usual))
    if _is_number(usual):
        return _is_number(value) and math.isfinite(value)
    return usual is None or isinstance(value, type(usual))


def _near(pattern: str, known: Sequence[str]) -> list[str]:
    """Return the names most like ``pattern``."""
    plain = max(pattern.replace("?", "*").split("*"), key=len)
    holding = [name for name in known if plain and plain.lower() in name.lower()]
    return (holding or difflib.get_close_matches(plain, known, n=MOST_SHOWN, cutoff=0.3) or [*known])[:MOST_SHOWN]
