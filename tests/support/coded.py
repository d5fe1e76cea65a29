"""What crosses a cut behind a codec, for the equations."""

from adl_dist.seeds import stream_seed
from adl_dist.transport.coding import decode, encode
from adl_dist.transport.spec import TensorSpec


def crossing(codec, gradient_codec, what, epoch, k, b, tensors):
    """What arrives of what module k, counted from 1, sends of micro-batch b."""
    is_tuple = isinstance(tensors, tuple)
    tensors = [t.detach() for t in (tensors if is_tuple else (tensors,))]
    size = len(tensors[0])
    specs, seed = tuple(TensorSpec.of(t, batched=len(t) == size) for t in tensors), None
    name = codec if what == "act" else gradient_codec
    if what == "grad" and name != "bf16":
        seed = stream_seed(0, "codec", epoch, k - 1, b)
    got = decode(name, specs, size, encode(name, specs, tensors, seed))
    return got if is_tuple else got[0]
