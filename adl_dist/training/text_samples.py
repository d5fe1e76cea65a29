"""Text generated with the weights of each checkpoint."""

import copy
from collections.abc import Callable

from torch import nn

from adl_dist.checkpoint.weight_files import WeightFiles
from adl_dist.errors import ConfigError
from adl_dist.report import say
from adl_dist.report.callbacks import Callback, TrainerState


class TextSamples(Callback):
    """A callback that prints a text after each checkpoint; stages wait for it.

    Args:
        model: the uncut model; a copy of it loads the weights of each checkpoint.
        write: a function from this copy, in evaluation mode on the CPU, to a text; see
            :func:`adl_dist.models.generate`.
    """

    def __init__(self, model: nn.Module, write: Callable[[nn.Module], str]) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError("TextSamples: the model is on torch.device('meta'); give it one with memory")
        self._model, self._write = copy.deepcopy(model).cpu().eval(), write

    def on_checkpoint(self, now: TrainerState) -> None:
        """Print the text of the checkpoint's weights."""
        assert now.checkpoint is not None
        WeightFiles.at(now.checkpoint).load_into(self._model)
        say(f"update {now.update}: {self._write(self._model)}")
