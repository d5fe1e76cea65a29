"""Losses of outputs that torch's own do not take as they are."""

from torch import Tensor, nn


class TokenCrossEntropy(nn.CrossEntropyLoss):
    """Cross-entropy of outputs [B, T, classes]: the mean over all tokens.

    Takes the same arguments; targets of ``ignore_index``, -100 unless given, count for nothing.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the targets [B, T] that are not ignored."""
        return super().forward(input.flatten(0, -2), target.flatten())
