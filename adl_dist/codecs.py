"""Codecs for messages between stages, and their costs.

No torch: transport/coding.py encodes and decodes.
"""

from typing import Literal, NamedTuple, get_args

Codec = Literal["none", "bf16", "int8", "int4"]
CODECS: tuple[Codec, ...] = get_args(Codec)
BLOCK = 256  # numbers that have a scale of their own
SCALE_BYTES = 4
LEVELS = {"int8": 127, "int4": 7}  # multiples of the scale, to either side of 0


class Codecs(NamedTuple):
    """The codec of activations and the codec of gradients."""

    activations: Codec = "none"
    gradients: Codec = "none"


PLAIN = Codecs()


class PerMessage(NamedTuple):
    """The seconds that a message takes: a fixed part, and a part per byte."""

    fixed: float = 0.0
    per_byte: float = 0.0

    def of(self, nbytes: int) -> float:
        """Return the seconds of a message of ``nbytes``; 0 for none."""
        return self.fixed + nbytes * self.per_byte if nbytes else 0.0


class CodingCost(NamedTuple):
    """The seconds to encode and decode a message, by its bytes before coding."""

    acts: PerMessage
    grads: PerMessage  # they may be rounded at random

    def slowed(self, by: float) -> "CodingCost":
        """Return the cost with all seconds multiplied by ``by``."""
        return CodingCost(*(PerMessage(one.fixed * by, one.per_byte * by) for one in self))


NO_CODING = CodingCost(PerMessage(), PerMessage())


def rotated_width(numbers: int) -> int:
    """Return the size of a rotated block: a power of two, at least 2."""
    return max(2, 1 << (numbers - 1).bit_length())


def coded_bytes(codec: str, numbers: int, itemsize: int) -> int | None:
    """Return the coded bytes of one sample, or None if it is not coded.

    A sample of ``numbers`` elements is sent as it is if the codec would not make it smaller.
    """
    if codec == "none" or numbers == 0:
        return None
    if codec == "bf16":
        coded = 2 * numbers
    else:
        whole, rest = divmod(numbers, BLOCK)
        coded = SCALE_BYTES * (whole + (rest > 0))
        coded += numbers if codec == "int8" else (whole * BLOCK + (rotated_width(rest) if rest else 0)) // 2
    return coded if coded < numbers * itemsize else None
