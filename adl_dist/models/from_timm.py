"""Any classification network of timm, by its name."""

from typing import Any

from torch import nn

from adl_dist.errors import ConfigError, did_you_mean


def timm_model(name: str, num_classes: int = 1000, *, download: bool = False, **options: Any) -> nn.Module:
    """Build a network of timm; download weights only with ``download``.

    Args:
        name: one of ``timm.list_models()``, with or without a tag of its weights.
        num_classes: outputs.
        download: whether to load timm's published weights, from the local cache or the hub.
        options: further arguments of the builder, like ``img_size``, ``drop_rate`` or ``checkpoint_path``.

    Returns:
        float[B, 3, H, W] -> float[B, num_classes].

    Raises:
        ConfigError: If timm is missing, or the name is unknown.
    """
    try:
        import timm  # late: it takes a second
    except ImportError as error:
        raise ConfigError(f"model=timm needs the package timm ({error}): pip install timm") from None
    if not timm.is_model(name):
        hint = did_you_mean(str(name).lower().partition(".")[0], timm.list_models())
        raise ConfigError(f"model.name={name} is not one of timm.list_models(){hint}")
    return timm.create_model(name, pretrained=download, num_classes=num_classes, **options)
