"""Losses for outputs that torch's own losses do not accept."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class TokenCrossEntropy(nn.CrossEntropyLoss):
    """Cross-entropy of outputs [B, T, classes]: the mean over all tokens.

    It takes the arguments of ``nn.CrossEntropyLoss``. Targets equal to ``ignore_index`` (default -100) do not count.
    The scores may be the ``logits`` of an output object, as in transformers.
    """

    def forward(self, input: Any, target: Tensor) -> Tensor:
        """Return the mean over the targets [B, T] that are not ignored."""
        scores = getattr(input, "logits", input)
        return super().forward(scores.flatten(0, -2), target.flatten())


class ModelLoss:
    """The loss that the model itself returns, next to its outputs.

    The targets are among the model's inputs, as in ``forward(idx, targets) -> (logits, loss)``, or ``labels=`` of
    transformers. A dataset's item is then ((idx, targets), targets).

    Args:
        num_terms: a function of a micro-batch's targets that returns the number of terms that the loss averages over;
            if None, the loss averages over samples.
    """

    def __init__(self, num_terms: Callable[[Any], Any] | None = None) -> None:
        if num_terms is not None:
            self.num_terms = num_terms

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return ``output["loss"]``, or the only tensor without dimensions.

        Raises:
            ValueError: If there is no such tensor, or more than one.
        """
        named = output.get("loss") if isinstance(output, Mapping) else None
        numbers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not leaf.ndim]
        found = [named] if isinstance(named, Tensor) else numbers
        if len(found) != 1:
            raise ValueError(
                f"loss_fn='model' expects a model that returns its loss, a tensor without dimensions, but there are "
                f"{len(found)} in its output; does the data's input have the targets (labels)?"
            )
        return found[0]
