"""The measured costs of each unit of a model."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adl_dist.errors import PartitionError
from adl_dist.partition.costs import UnitCost


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of one micro-batch.

    Attributes:
        of: the measured model, batch, device, threads and versions, which the costs hold for alone.
        units: the chain's units; ``update`` is a whole group's time, not divided by M.
        forward: seconds of the whole model at once, with the loss.
        backward: seconds of its backward.
        optimizer_copies: bytes of the optimizer's state, for each byte of parameters.
        loading: seconds that stage 0 loads data for; 0: others do.
        loaded: the same measurement while the machine's other devices work; None: they do not disturb.
    """

    of: dict[str, Any]
    units: list[UnitCost]
    forward: float
    backward: float
    optimizer_copies: float
    loading: float = 0.0
    loaded: "Profile | None" = None

    def with_stages(self, num_stages: int) -> "Profile":
        """Return the profile where K stages work side by side, if there are several."""
        return self if num_stages == 1 or self.loaded is None else self.loaded

    def costs(self, accumulation_steps: int) -> list[UnitCost]:
        """Return the units' costs with M micro-batches per update, scaled to add up to those of the whole model.

        Measured one by one, units take a little longer than together: each is called and timed by itself.
        """
        forward = self.forward / sum(unit.forward for unit in self.units)
        backward = self.backward / max(sum(unit.backward for unit in self.units), 1e-12)
        return [
            replace(
                unit,
                forward=unit.forward * forward + (0.0 if place else self.loading),
                backward=unit.backward * backward,
                update=unit.update / accumulation_steps,
            )
            for place, unit in enumerate(self.units)
        ]

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        unfinished = path.with_name(f".{path.name}.saving")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read back :meth:`save`.

        Raises:
            PartitionError: it is not such a file.
        """
        try:
            return cls._of(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PartitionError(
                f"{path} is not a profile ({type(error).__name__}: {error}); remove it to measure again"
            ) from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> "Profile":
        loaded = None if values["loaded"] is None else cls._of(values["loaded"])
        return cls(**{**values, "units": [UnitCost(**unit) for unit in values["units"]], "loaded": loaded})
