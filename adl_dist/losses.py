"""Losses of outputs that torch's own do not take as they are."""

from torch import Tensor, nn


class TokenCrossEntropy(nn.CrossEntropyLoss):
    """torch's cross-entropy for outputs whose last dimension is that of the classes: the mean over all tokens.

    Takes the same arguments; targets of ``ignore_index``, -100 unless given, count for nothing.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of ``input`` [B, T, classes] over those of ``target`` int[B, T] that are not ignored."""
        return super().forward(input.flatten(0, -2), target.flatten())
