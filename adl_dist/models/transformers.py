"""Transformers for text and small images, as nn.Sequential.

The parameters of a builder are the keys of its file in ``conf/model/``.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.models.attention import (
    Attention,
    Block,
    GeluNetwork,
    Rotary,
    SwigluNetwork,
    draw_weights,
    new_stream,
)


class TokenEmbedding(nn.Module):
    """The sum of a token and, with ``context``, a position embedding."""

    def __init__(self, vocab_size: int, width: int, *, context: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = None if context is None else nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [B, T, width] of ``ids`` int[B, T]."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        out: Tensor = self.dropout(x)
        return out


def gpt(
    vocab_size: int,
    context: int,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    *,
    dropout: float = 0.0,
    bias: bool = True,
    tied: bool = False,
) -> nn.Sequential:
    """Build GPT-2 (Radford et al. 2019).

    It has learned positions, pre-norm, and GELU in its tanh form.

    Args:
        vocab_size: number of tokens, which are 0 to ``vocab_size`` - 1.
        context: the longest sequence, in tokens.
        layers: blocks of attention and a feed-forward network of 4 ``width`` channels.
        heads: heads of each attention; they divide ``width``.
        width: channels between the layers.
        dropout: probability for the embedding, the attention's weights, and each summand.
        bias: whether linear layers and norms have one, as GPT-2's have.
        tied: whether the head shares the weights of the embedding, as GPT-2's does.

    Returns:
        int[B, T] -> float[B, T, vocab_size], T <= ``context``: units ``embedding``, ``layer0`` .., ``head``.

    Raises:
        ConfigError: If ``heads`` do not divide ``width``.
    """
    seed = new_stream()
    embedding = TokenEmbedding(vocab_size, width, context=context, dropout=dropout)
    blocks = [_layer_of_gpt(width, heads, causal=True, bias=bias, dropout=dropout) for _ in range(layers)]
    output = nn.Linear(width, vocab_size, bias=False)
    head = nn.Sequential(OrderedDict(norm=nn.LayerNorm(width, bias=bias), output=output))
    model = _assembled(embedding, blocks, head, seed)
    if tied:
        output.weight = embedding.tokens.weight
    return model


def llama(
    vocab_size: int,
    context: int,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    *,
    kv_heads: int | None = None,
    hidden: int | None = None,
    norm_eps: float = 1e-5,
    rope_theta: float = 10000.0,
    tied: bool = False,
) -> nn.Sequential:
    """Build Llama (Touvron et al., arXiv:2302.13971).

    It has rotary positions, pre-norm by RMSNorm, SwiGLU, and no bias. Weights are drawn as those of :func:`gpt`.

    Args:
        vocab_size: number of tokens.
        context: the longest sequence, in tokens.
        layers: blocks.
        heads: heads of each attention; ``width`` / ``heads`` is even.
        width: channels between the layers.
        kv_heads: heads of keys and values, by default ``heads``.
        hidden: channels of the feed-forward networks, by default 8/3 of ``width``, up to the next multiple of 64.
        norm_eps: addend to the mean square in the norms.
        rope_theta: base of the wavelengths of the rotary positions.
        tied: whether the head shares the weights of the embedding.

    Returns:
        int[B, T] -> float[B, T, vocab_size], T <= ``context``: units ``embedding``, ``layer0`` .., ``head``.

    Raises:
        ConfigError: If ``heads`` do not divide ``width`` into even parts, or ``kv_heads`` do not divide ``heads``.
    """
    hidden = -(-8 * width // 192) * 64 if hidden is None else hidden
    if width // heads % 2:
        raise ConfigError(f"model.width={width} / model.heads={heads} must be even: rotary positions turn pairs")
    seed = new_stream()
    rotary = Rotary(width // heads, context, rope_theta)
    embedding, blocks = TokenEmbedding(vocab_size, width), list[nn.Module]()
    for _ in range(layers):
        norms = nn.RMSNorm(width, norm_eps), nn.RMSNorm(width, norm_eps)
        attention = Attention(width, heads, kv_heads=kv_heads, causal=True, bias=False, rotary=rotary)
        blocks.append(Block(norms, attention, SwigluNetwork(width, hidden)))
    output = nn.Linear(width, vocab_size, bias=False)
    head = nn.Sequential(OrderedDict(norm=nn.RMSNorm(width, norm_eps), output=output))
    model = _assembled(embedding, blocks, head, seed)
    if tied:
        output.weight = embedding.tokens.weight
    return model


class PatchEmbedding(nn.Module):
    """The sum of embeddings of each patch of an image and of its position."""

    def __init__(self, image_size: int, patch_size: int, in_channels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch_size) ** 2, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Return [B, patches, width] of ``images`` [B, C, H, W]."""
        x: Tensor = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = self.dropout(x)
        return out


class PooledHead(nn.Module):
    """LayerNorm, the mean over all positions, and a linear classifier."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, num_classes] of ``x`` [B, T, width]."""
        out: Tensor = self.output(self.norm(x).mean(dim=1))
        return out


def vit(
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    patch_size: int = 4,
    layers: int = 6,
    heads: int = 4,
    width: int = 192,
    *,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build a vision transformer for small images, without a class token.

    See Dosovitskiy et al., arXiv:2010.11929. The head averages over all patches (Beyer et al., arXiv:2205.01580);
    layers are those of :func:`gpt`, not causal.

    Args:
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey.
        image_size: height and width in pixels, a multiple of ``patch_size``.
        patch_size: side of the squares that an image is divided into.
        layers: blocks.
        heads: heads of each attention; they divide ``width``.
        width: channels between the layers.
        dropout: as in :func:`gpt`.

    Returns:
        float[B, in_channels, image_size, image_size] -> float[B, num_classes]: units ``embedding``, ``layer0`` ..,
        ``head``.

    Raises:
        ConfigError: If sizes do not divide each other.
    """
    if image_size % patch_size:
        raise ConfigError(f"model.image_size={image_size} is not a multiple of model.patch_size={patch_size}")
    seed = new_stream()
    embedding = PatchEmbedding(image_size, patch_size, in_channels, width, dropout)
    blocks = [_layer_of_gpt(width, heads, causal=False, bias=True, dropout=dropout) for _ in range(layers)]
    return _assembled(embedding, blocks, PooledHead(width, num_classes), seed)


def _assembled(embedding: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, seed: int) -> nn.Sequential:
    """Return the units as a model, with its weights drawn."""
    layers = {f"layer{number}": block for number, block in enumerate(blocks)}
    model = nn.Sequential(OrderedDict(embedding=embedding, **layers, head=head))
    draw_weights(model, len(blocks), seed)
    return model


def _layer_of_gpt(width: int, heads: int, *, causal: bool, bias: bool, dropout: float) -> Block:
    norms = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
    attention = Attention(width, heads, causal=causal, bias=bias, dropout=dropout)
    return Block(norms, attention, GeluNetwork(width, 4 * width, bias=bias), dropout=dropout)
