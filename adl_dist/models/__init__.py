"""Networks that come as an nn.Sequential of their blocks, to be cut anywhere between two of them, and torchvision's."""

from adl_dist.models.from_torchvision import torchvision_model
from adl_dist.models.resnet import cifar_resnet, cifar_resnet18, cifar_resnet34, se_resnet18, wide_resnet
from adl_dist.models.transformers import gpt, llama, vit

__all__ = [
    "cifar_resnet", "cifar_resnet18", "cifar_resnet34", "gpt", "llama", "se_resnet18", "torchvision_model", "vit",
    "wide_resnet",
]  # fmt: skip
