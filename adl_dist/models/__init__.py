"""Networks that come as an nn.Sequential of their blocks, so that they can be cut anywhere between two of them."""

from adl_dist.models.cifar import cifar_resnet, cifar_resnet18

__all__ = ["cifar_resnet", "cifar_resnet18"]
