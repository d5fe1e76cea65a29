"""Attention and networks with a state over time, as popular models write them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversarial.cases import (
    NUM_CLASSES,
    TIME,
    WIDTH,
    block,
    block_of,
    buffer,
    embedding,
    linear,
    model,
    several,
    weight,
)

HEADS, OF_HEAD = 2, WIDTH // 2
PROJECTIONS = {"qkv": linear(WIDTH, 3 * WIDTH), "out": linear()}


def heads(self, h):
    B, T, _ = h.shape
    return self.qkv(h).view(B, T, 3, HEADS, OF_HEAD).permute(2, 0, 3, 1, 4).unbind(0)


def join(self, h, y):
    return h + self.out(y.transpose(1, 2).reshape(h.shape))


class Attention(nn.Module):
    """Self-attention of [B, T, 8] with two heads."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        q, k, v = heads(self, h)
        return join(self, h, F.scaled_dot_product_attention(q, k, v, is_causal=True))


block_of("tokens")(Attention)


def angles(num):
    return torch.outer(torch.arange(num).double(), 1.0 / 100 ** (torch.arange(0, OF_HEAD, 2).double() / OF_HEAD))


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@block("tokens", **PROJECTIONS, cos=buffer(lambda: angles(64).cos(), persistent=False),
       sin=buffer(lambda: angles(64).sin(), persistent=False))  # fmt: skip
def rope_attention(self, h):
    """Cosines and sines from a buffer that is not saved, cut to the length of the input."""
    q, k, v = heads(self, h)
    cos, sin = self.cos[: h.size(1)], self.sin[: h.size(1)]
    return join(self, h, F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v))


@model("tokens", varies=False, embed=embedding(padding_idx=0), place=weight(1, TIME, WIDTH, scale=5.0),
       layers=several(3, Attention), norm=lambda: nn.LayerNorm(WIDTH), head=linear(WIDTH, NUM_CLASSES))  # fmt: skip
def padding_mask(self, words):
    """The mask of padding is made from the tokens and used by every layer: booleans cross each cut."""
    padding = words == 0
    h = self.embed(words) + self.place
    for layer in self.layers:
        h = layer(h).masked_fill(padding[..., None], 0.0)
    real = (~padding).sum(dim=1, keepdim=True)
    return self.head(self.norm(h).sum(dim=1) / real.clamp(min=1))


@model("tokens", embed=embedding(), layers=several(4, linear()), head=linear(WIDTH, NUM_CLASSES))
def mask_like_its_words(self, words):
    """Only the first stage needs the mask, which each converts to the type of a value of the batch."""
    h = self.embed(words)
    h = h * (words != 0)[..., None].type_as(h)
    for layer in self.layers:
        h = torch.tanh(layer(h))
    return self.head(h.mean(dim=1))


@block("tokens", cell=lambda: nn.LSTMCell(WIDTH, WIDTH))
def cell_by_hand(self, h):
    """An LSTMCell over the steps; the state starts as zeros like the input."""
    y = c = torch.zeros_like(h[:, 0])
    steps = []
    for x in h.unbind(1):
        y, c = self.cell(x, (y, c))
        steps.append(y)
    return torch.stack(steps, dim=1)


def lstm():
    return nn.LSTM(WIDTH, WIDTH, batch_first=True)


@model("tokens", embed=embedding(), first=lstm, second=lstm, head=linear(WIDTH, NUM_CLASSES))
def states_cross(self, words):
    """The states (h, c) of one LSTM, whose batch is the second dimension, start the next."""
    h, state = self.first(self.embed(words))
    h, (last, _) = self.second(h, state)
    return self.head(last[-1] + h.mean(dim=1))


@model("tokens", embed=embedding(), gru=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), head=linear(WIDTH, NUM_CLASSES))
def packed_sequence(self, words):
    lengths = (words != 0).sum(dim=1).clamp(min=1)
    packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
    _, last = self.gru(packed)
    return self.head(last[-1])
