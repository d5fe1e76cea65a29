"""Callbacks: the user's code, called on rank 0 during a run."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any

from adl_dist.errors import CallbackError, ConfigError, did_you_mean, in_one_line, place_of, text_of
from adl_dist.report.goal import Goal, Mode
from adl_dist.settings import from_old_name

EVENTS = ("on_start", "on_update", "on_epoch", "on_checkpoint", "on_end")
logger = logging.getLogger("adl_dist")


@dataclass(frozen=True)
class TrainerState:
    """State of a run when a callback is called.

    Attributes:
        update: updates made; in ``on_update`` that of ``metrics``, counted from 1.
        epoch: whole epochs done.
        metrics: figures by name: ``train_loss`` and others of the update or epoch; ``validation_loss`` and others in
            ``on_epoch``, ``on_checkpoint`` and ``on_end``; in ``on_start`` those of the checkpoint.
        checkpoint: the folder of the completed checkpoint, in ``on_checkpoint``; a ``Path``, except for a URL.
        summary: the content of ``summary.json``, in ``on_end``.
        stop: ends the run for the given reason, with the pipeline empty and everything saved.
    """

    update: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: PurePath | None = None
    summary: Mapping[str, Any] | None = None
    stop: Callable[[str], object] = lambda why: None


class Callback:
    """Base class of callbacks; any object with one of these methods works.

    Exceptions end the run. Checkpoints keep its ``state_dict()``, if it has one, which must fit into JSON.
    """

    def on_start(self, now: TrainerState) -> None:
        """Handle the beginning of training, also from a checkpoint."""

    def on_update(self, now: TrainerState) -> None:
        """Handle the figures of an update.

        Stages do not wait, so training may be some updates further.
        """

    def on_epoch(self, now: TrainerState) -> None:
        """Handle the end of an epoch or run, after its evaluation.

        A checkpoint is completed after this call; that of several processes has the weights from before it.
        """

    def on_checkpoint(self, now: TrainerState) -> None:
        """Handle a complete checkpoint; training may have continued meanwhile."""

    def on_end(self, now: TrainerState) -> None:
        """Handle the orderly end of the run."""


class EarlyStopping(Callback):
    """A callback that ends a run when a metric stops improving."""

    def __init__(
        self,
        patience: int = 3,
        metric: str | None = None,
        best_mode: Mode | None = None,
        min_change: float = 0.0,
        *,
        best_is: str | None = None,
    ) -> None:
        """Watch ``metric``, by default the validation accuracy or else the loss.

        Args:
            patience: evaluations without a better value until the run ends.
            metric: a name like ``validation_loss``.
            best_mode: ``max`` or ``min``; if None, that of a known metric.
            min_change: by how much a value must be better to count.
            best_is: the old name of ``best_mode``, until 0.5.0.

        Raises:
            ConfigError: If a value is out of range, it is not known whether the metric is best at its maximum, or
                ``best_mode`` is given without ``metric``.
        """
        if type(patience) is not int or patience < 1:
            raise ConfigError(f"EarlyStopping: patience must be a whole number of at least 1, got {patience!r}")
        if not min_change >= 0:
            raise ConfigError(f"EarlyStopping: min_change must be at least 0, got {min_change!r}")
        if best_mode in ("highest", "lowest"):  # by its place
            best_is = best_mode
        if best_is is not None:
            best_mode = from_old_name("runtime.best_is", best_is, stacklevel=2)
        self.patience, self.goal, self.min_change = patience, Goal(metric, best_mode), min_change
        self.best_score: list[float] | None = None
        self.best_value, self.waited = "", 0

    def on_start(self, now: TrainerState) -> None:
        """End a resumed run at once if it has already waited for ``patience``."""
        self._stop(now)

    def on_epoch(self, now: TrainerState) -> None:
        """Stop the run if the metric has not improved for too long.

        Raises:
            ConfigError: If the metric is not measured.
        """
        if (score := self.goal.score(now.metrics)) is None:
            measured = ", ".join(name for name in now.metrics if name.startswith("validation_")) or "nothing"
            raise ConfigError(
                f"EarlyStopping watches {self.goal.metric or 'the validation'}, but what is measured is {measured}; "
                "give validation data, or name a metric that is measured"
            )
        best = self.best_score
        # The first figure decides, and the second one between equals.
        if best is None or score[0] > best[0] + self.min_change or (score[0] == best[0] and score > tuple(best)):
            self.best_score, self.best_value, self.waited = [*score], self.goal.value(now.metrics), 0
        else:
            self.waited += 1
        self._stop(now)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        kept = {"best_score": self.best_score, "best_value": self.best_value, "waited": self.waited}
        return {"goal": asdict(self.goal), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with the same metric; otherwise begin again."""
        if state["goal"] != asdict(self.goal):
            return
        self.best_score, self.best_value, self.waited = (state[k] for k in ("best_score", "best_value", "waited"))

    def _stop(self, now: TrainerState) -> None:
        if self.waited >= self.patience:
            now.stop(f"{self.best_value} was not bettered in {self.waited} evaluations")


class Callbacks:
    """The callbacks of a run, called one after the other.

    Attributes:
        asked: the reason for which a callback ends the run, or None.
        follow_loss: whether early stopping without a metric of its own follows the loss only.
        on_interrupt: called instead of raising a callback's KeyboardInterrupt; it stops the run as Ctrl-C does.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        """Check and keep ``callbacks``; raise ConfigError for an invalid one."""
        if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
            raise ConfigError(f"callbacks: expected a list of callbacks, got {callbacks!r}")
        for one in callbacks:
            if isinstance(one, type):
                raise ConfigError(f"callbacks: {one.__name__} is a class; give one that is made: {one.__name__}()")
            events = [name for name in dir(one) if name.startswith("on_") and callable(getattr(one, name, None))]
            unknown = next((name for name in events if name not in EVENTS), None)
            if not events or unknown:
                has = f"has {unknown}{did_you_mean(unknown, EVENTS)}" if unknown else "has none of them"
                raise ConfigError(f"callbacks: there are {', '.join(EVENTS)}, and {type(one).__name__} {has}")
        self._callbacks = [*callbacks]
        self.asked: str | None = None
        self.follow_loss = False
        self.on_interrupt: Callable[[str], object] | None = None
        self._ask: Callable[[str], object] = lambda why: None
        self._now = TrainerState(-1, 0)  # of the update of which figures have come

    @property
    def any(self) -> bool:
        """Whether there is any callback."""
        return bool(self._callbacks)

    @property
    def goals(self) -> list[Goal]:
        """The goals of early stopping."""
        return [one.goal for one in self._callbacks if isinstance(one, EarlyStopping)]

    def open(self, ask: Callable[[str], object]) -> None:
        """Begin a run; ``ask(reason)`` ends it."""
        self.asked, self._ask, self._now = None, ask, TrainerState(-1, 0)

    def call(self, event: str, now: TrainerState) -> None:
        """Call ``event`` of all callbacks; raise CallbackError if one fails."""
        for one in self._callbacks:

            def stop(why: str, one: Any = one) -> None:
                self.asked = f"{type(one).__name__}: {why}"
                self._ask(self.asked)

            seen = dict(now.metrics)
            if self.follow_loss and isinstance(one, EarlyStopping) and one.goal.metric is None:
                seen.pop("validation_accuracy", None)
            self._safely(one, event, now.update, replace(now, metrics=seen, stop=stop))

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a stage's record; if a new update begins, first call ``on_update``."""
        if not self._callbacks or not record["name"].startswith("train/"):
            return
        if record["update"] + 1 != self._now.update:
            self.tell_update()
            self._now = TrainerState(record["update"] + 1, record["epoch"])
        figures = {**self._now.metrics, record["name"].replace("/", "_", 1): record["value"]}
        self._now = replace(self._now, metrics=figures)

    def tell_update(self) -> None:
        """Call ``on_update`` with the figures since its last call, if any."""
        if self._now.metrics:
            now, self._now = self._now, replace(self._now, metrics={})
            self.call("on_update", now)

    def state(self, update: int) -> list[dict[str, Any]]:
        """Return the callbacks' names and states for a checkpoint."""
        found = [
            (one, self._safely(one, "state_dict", update)) for one in self._callbacks if hasattr(one, "state_dict")
        ]
        return [{"name": type(one).__name__, "state": state} for one, state in found]

    def restore(self, kept: Sequence[Mapping[str, Any]], update: int) -> None:
        """Restore the states by class and, within a class, by order."""
        left = [*kept]
        for one in (one for one in self._callbacks if hasattr(one, "load_state_dict")):
            found = next((entry for entry in left if entry["name"] == type(one).__name__), None)
            if found is not None:
                left.remove(found)
                self._safely(one, "load_state_dict", update, found["state"])

    def _safely(self, one: Any, event: str, update: int, *arguments: Any) -> Any:
        """Call the method ``event`` if ``one`` has it; a state must fit into JSON."""
        if not callable(method := getattr(one, event, None)):
            return None
        name = f"{type(one).__name__}.{event}"
        try:
            returned = method(*arguments)
            return json.loads(json.dumps(returned)) if event == "state_dict" else None
        except KeyboardInterrupt:
            if self.on_interrupt is None:
                raise
            self.on_interrupt(f"KeyboardInterrupt in {name}")
        except Exception as error:  # the user's own code
            logger.error("callback %s failed", name, exc_info=error)
            said = text_of(error) if isinstance(error, ConfigError) else f"{in_one_line(error)}{place_of(error)}"
            raise CallbackError(
                f"callback {name} fails at update {update}: {said}; the last checkpoint is kept, if there is one"
            ) from error
