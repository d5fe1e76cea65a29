"""Floating-point operations of a model, and the share of a device's peak."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from adl_dist.batch import call, copy_batch, move_batch, num_samples
from adl_dist.stage import TrainSpec
from adl_dist.streams import streams_kept
from adl_dist.training.trial.samples import Samples

# Dense, of bfloat16 with sums in float32, in 1e12 operations per second, as the maker's data sheets say.
PEAK_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
}


def peak_tflops(given: float | None, spec: TrainSpec, device: torch.device) -> float | None:
    """Return the ``given`` or known peak of one device, or None."""
    if given is not None or device.type != "cuda" or spec.precision.autocast is not torch.bfloat16:
        return given
    name = torch.cuda.get_device_name(device)
    # What follows a hyphen is form and memory; a space begins the name of another device.
    if " MIG " in name:  # a part of one
        return None
    return next((peak for known, peak in PEAK_TFLOPS.items() if name == known or name.startswith(f"{known}-")), None)


def flops_per_sample(model: nn.Module, spec: TrainSpec, samples: Samples, device: torch.device) -> float | None:
    """Count the operations of forward and backward of one sample.

    ``model`` changes.

    Counted are matrix products, convolutions and attention. Return None if lengths change, or if the model has none of
    these.
    """
    if samples.varies:
        return None
    batch = samples.pair[1]
    with streams_kept(device), FlopCounterMode(display=False) as counter, torch.enable_grad():
        model.train()
        target = move_batch(batch.target, device)
        with spec.precision.autocasting(device)():
            out = call(model, copy_batch(batch.input_))  # it may write to it
            spec.loss_fn(out, copy_batch(target)).backward()
    return counter.get_total_flops() / num_samples(batch.input_) or None
