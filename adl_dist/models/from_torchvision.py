"""Any classification network of torchvision, by the name of its builder."""

import difflib
import inspect
from typing import Any

from torch import nn

from adl_dist.errors import ConfigError, in_one_line

# Networks with auxiliary heads: in training their output is a tuple, which cross-entropy does not accept. torchvision
# warns that their initialisation will change, unless it is asked for.
_WITH_HEADS = ("googlenet", "inception_v3")
# Options of builders that download weights.
_WEIGHTS = ("weights", "pretrained", "progress")


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
        ConfigError: If the name is no classification builder, or the builder refuses an option.
    """
    from torchvision import models  # late: it takes a second

    known = models.list_models(module=models)
    if name not in known:
        close = difflib.get_close_matches(str(name).lower(), known)
        hint = f"did you mean {' or '.join(close)}?" if close else "see torchvision.models.list_models()"
        message = f"model.name={name} is not one of torchvision's {len(known)} classification builders; {hint}"
        raise ConfigError(message)
    builder = models.get_model_builder(name)
    if num_classes < 1:
        raise ConfigError(f"model.num_classes must be at least 1, got {num_classes}")
    # The builder passes its options to the class that it returns.
    parameters = inspect.signature(inspect.signature(builder).return_annotation).parameters.values()
    taken = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    if name.startswith("mobilenet_v3"):  # the class accepts any option; the builders read these
        taken += ["width_mult", "reduced_tail", "dilated"]
    for option in options:
        if option in _WEIGHTS:
            raise ConfigError(
                f"model.{option} is not taken: nothing is downloaded; save the weights by torch.save as a state_dict "
                "and give init_from=PATH"
            )
        if option not in taken:
            close = difflib.get_close_matches(option, taken, n=1)
            hint = f"; did you mean 'model.{close[0]}'?" if close else ""
            raise ConfigError(f"there is no key 'model.{option}'{hint}; torchvision's {name} takes {', '.join(taken)}")
    ours = {"aux_logits": False, "init_weights": True} if name in _WITH_HEADS else {}
    try:
        return builder(weights=None, num_classes=num_classes, **{**ours, **options})  # type: ignore[no-any-return]
    except Exception as error:  # torchvision's own code can raise anything
        arguments = ", ".join(f"model.{key}={value}" for key, value in options.items()) or "its arguments"
        raise ConfigError(f"torchvision's {name} refuses {arguments}: {in_one_line(error)}") from error
