"""Any classification network of torchvision, by the name of its builder."""

from typing import Any

from torch import nn

from adl_dist.errors import ConfigError, did_you_mean

# Networks with auxiliary heads: in training their output is a tuple, which cross-entropy does not accept. torchvision
# warns that their initialisation will change, unless it is asked for.
_WITH_HEADS = ("googlenet", "inception_v3")
# Options of builders that download weights.
_WEIGHTS = {"weights", "pretrained", "progress"}


def torchvision_model(name: str, num_classes: int = 1000, **options: Any) -> nn.Module:
    """Build a classification network of torchvision, without a download.

    GoogLeNet and Inception v3 have no auxiliary heads unless ``aux_logits=True``, because with them the output in
    training is a tuple, which needs a loss of its own.

    Args:
        name: the name of the builder.
        num_classes: outputs.
        options: further arguments of the builder, like ``dropout`` or ``image_size``.

    Returns:
        float[B, 3, H, W] -> float[B, num_classes].

    Raises:
        ConfigError: If the name is no classification builder, or an option would download weights.
    """
    from torchvision import models  # late: it takes a second

    known = models.list_models(module=models)
    if name not in known:
        hint = did_you_mean(str(name).lower(), known)
        raise ConfigError(f"model.name={name} is not one of torchvision's classification builders{hint}")
    if named := options.keys() & _WEIGHTS:
        raise ConfigError(
            f"model.{min(named)} is not taken: nothing is downloaded; save the weights by torch.save as a state_dict "
            "and give init_from=PATH"
        )
    arguments = ({"aux_logits": False, "init_weights": True} if name in _WITH_HEADS else {}) | options
    return models.get_model(name, weights=None, num_classes=num_classes, **arguments)  # type: ignore[no-any-return]
