"""Networks of the papers, and networks of other libraries."""

from adl_dist.models.from_timm import timm_model
from adl_dist.models.from_torchvision import torchvision_model
from adl_dist.models.from_transformers import hf_model
from adl_dist.models.generation import generate
from adl_dist.models.resnet import cifar_resnet, cifar_resnet18, cifar_resnet34, se_resnet18, wide_resnet
from adl_dist.models.transformers import gpt, llama, vit

__all__ = [
    "cifar_resnet", "cifar_resnet18", "cifar_resnet34", "generate", "gpt", "hf_model", "llama", "se_resnet18",
    "timm_model", "torchvision_model", "vit", "wide_resnet",
]  # fmt: skip
