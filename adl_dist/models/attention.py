"""Attention, feed-forward networks and blocks of transformers."""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.seeds import weights_seed


class Rotary(nn.Module):
    """Rotary positions (Su et al., arXiv:2104.09864).

    They rotate pairs of a head's channels by angles that grow with the position t. Channels i and i + D/2 are a pair,
    as in Llama's published weights. The tables of cosines and sines are not saved, and every stage has its own.
    """

    def __init__(self, head_width: int, context: int, theta: float) -> None:
        super().__init__()
        self.head_width, self.context, self.theta = head_width, context, theta
        self.register_buffer("cos", torch.empty(context, head_width), persistent=False)
        self.register_buffer("sin", torch.empty(context, head_width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, which may have been on ``torch.device("meta")``."""
        places = torch.arange(0, self.head_width, 2, dtype=torch.float64, device="cpu")
        frequencies = self.theta ** (-places / self.head_width)
        times = torch.arange(self.context, dtype=torch.float64, device="cpu")
        angles = torch.outer(times, frequencies).repeat(1, 2)  # [context, D]
        for table, values in ((self.cos, angles.cos()), (self.sin, angles.sin())):
            assert isinstance(table, Tensor)
            table.copy_(values)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x`` [B, heads, T, D] by the angles of positions 0 to T-1."""
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)  # type: ignore[index]
        turned: Tensor = x * cos + torch.cat((-second, first), dim=-1) * sin
        return turned


class Attention(nn.Module):
    """Multi-head self-attention by torch's fused kernel.

    With fewer ``kv_heads`` than ``heads``, each key and value serves heads / kv_heads heads in a row (grouped queries,
    Ainslie et al., arXiv:2305.13245). ``qkv`` computes queries, keys and values, in this order, head by head.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool,
        bias: bool,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        if width % heads or heads % (kv_heads or heads):
            raise ConfigError(
                f"model.width={width} is not a multiple of model.heads={heads}, or that not one of model.kv_heads="
                f"{kv_heads}; each head has as many channels"
            )
        self.head_width, self.repeats = width // heads, heads // (kv_heads or heads)
        self.sizes = [width, width // self.repeats, width // self.repeats]
        self.causal, self.dropout = causal, dropout
        self.qkv = nn.Linear(width, sum(self.sizes), bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width] of ``x`` [B, T, width].

        If causal, position t sees positions 0 to t.
        """
        query, key, value = self.qkv(x).split(self.sizes, dim=-1)
        query, key, value = self._by_head(query), self._by_head(key), self._by_head(value)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        if self.repeats > 1:
            key, value = key.repeat_interleave(self.repeats, dim=1), value.repeat_interleave(self.repeats, dim=1)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        by_head: Tensor = x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        return by_head  # [B, heads, T, head_width]


class GeluNetwork(nn.Module):
    """Two layers with GELU between them, in its tanh form, as in GPT-2."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width] to a tensor of the same shape."""
        out: Tensor = self.out(F.gelu(self.up(x), approximate="tanh"))
        return out


class SwigluNetwork(nn.Module):
    """A network gated by SiLU, without bias (Shazeer, arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width] to a tensor of the same shape."""
        out: Tensor = self.out(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward network, each added to its input."""

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: Attention, network: nn.Module, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = norms[0], attention
        self.network_norm, self.network = norms[1], network
        self.dropout = nn.Dropout(dropout)  # of both summands

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width] of ``x`` [B, T, width]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.network(self.network_norm(x)))
        return out


def new_stream() -> int:
    """Draw the seed of a model's weights from torch's stream.

    Call it before layers are built, because they draw from the stream as well, unless they are built on
    ``torch.device("meta")``.
    """
    return int(torch.randint(2**31, (), device="cpu"))


def draw_weights(model: nn.Module, layers: int, seed: int) -> None:
    """Draw the weights of ``model`` by :func:`draw_parameter`.

    Weights on meta are drawn later by a Trainer. It calls ``model.draw_parameter`` with the name of a parameter and a
    tensor to fill (docs/huggingface.md).
    """
    draw = partial(draw_parameter, layers, seed)
    model.draw_parameter = draw  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            draw(name, parameter)


@torch.no_grad()
def draw_parameter(layers: int, seed: int, name: str, parameter: Tensor) -> None:
    """Fill the parameter ``name`` as in GPT-2.

    Matrices are N(0, 0.02^2), biases 0, weights of norms 1. The last layer of each of the 2 ``layers`` summands has a
    standard deviation of 0.02 / sqrt(2 ``layers``), so that their sum does not grow with the depth. Each parameter has
    its own random stream, so its values do not depend on the other parameters of a process.
    """
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim > 1:
        is_last = name.endswith(("attention.out.weight", "network.out.weight"))
        generator = torch.Generator().manual_seed(weights_seed(seed, name))
        parameter.normal_(std=0.02 / math.sqrt(2 * layers) if is_last else 0.02, generator=generator)
    else:
        parameter.fill_(1.0)
