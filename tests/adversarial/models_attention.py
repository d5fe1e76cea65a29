"""Attention and networks with a state over time, as popular models write them."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, TIME, VOCABULARY, WIDTH, block, model

HEADS, OF_HEAD = 2, WIDTH // 2


class Attention(nn.Module):
    """Self-attention of [B, T, 8] with two heads; what is odd comes in a subclass."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, h):
        B, T, _ = h.shape
        return self.qkv(h).view(B, T, 3, HEADS, OF_HEAD).permute(2, 0, 3, 1, 4).unbind(0)

    def join(self, h, y):
        return h + self.out(y.transpose(1, 2).reshape(h.shape))

    def forward(self, h):
        q, k, v = self.heads(h)
        return self.join(h, F.scaled_dot_product_attention(q, k, v, is_causal=True))


block("tokens")(Attention)


@block("tokens")
class AlibiAttention(Attention):
    """The slopes are a buffer, the distances are made for the length of the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def forward(self, h):
        q, k, v = self.heads(h)
        place = torch.arange(h.shape[1])
        bias = -(place[None, :] - place[:, None]).abs() * self.slopes[:, None, None]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
        return self.join(h, scores.softmax(-1) @ v)


@block("tokens", varies=False)
class RelativeBiasAttention(Attention):
    """Swin's: a table of biases, read by an index that is a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * TIME - 1, HEADS) / 5)
        place = torch.arange(TIME)
        self.register_buffer("index", place[:, None] - place[None, :] + TIME - 1, persistent=False)

    def forward(self, h):
        q, k, v = self.heads(h)
        bias = self.table[self.index.view(-1)].view(TIME, TIME, -1).permute(2, 0, 1).contiguous()
        attn = (q * OF_HEAD**-0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        return self.join(h, attn.softmax(dim=-1) @ v)


def rotated(x, cos, sin):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@block("tokens")
class RopeAttention(Attention):
    """Cosines and sines from a buffer that is not saved, cut to the length of the input."""

    def __init__(self):
        super().__init__()
        rate = 1.0 / 100 ** (torch.arange(0, OF_HEAD, 2) / OF_HEAD)
        angle = torch.outer(torch.arange(64).float(), rate)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, h):
        q, k, v = self.heads(h)
        cos, sin = self.cos[: h.size(1)], self.sin[: h.size(1)]
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
        return self.join(h, y)


@block("tokens", varies=False)
class ComplexRopeAttention(Attention):
    """Llama's: queries and keys are turned as complex numbers, by a table that is no buffer."""

    def __init__(self):
        super().__init__()
        rate = 1.0 / 100 ** (torch.arange(0, OF_HEAD, 2).double() / OF_HEAD)
        angle = torch.outer(torch.arange(TIME).double(), rate)
        self.turns = torch.polar(torch.ones_like(angle), angle)

    def turned(self, x):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(z * self.turns).flatten(3)

    def forward(self, h):
        q, k, v = self.heads(h)
        return self.join(h, F.scaled_dot_product_attention(self.turned(q), self.turned(k), v))


@block("tokens")
class MultiQueryAttention(nn.Module):
    """One key and value for all heads, expanded."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * OF_HEAD, bias=False)

    def forward(self, h):
        batch, time = h.size(0), h.size(1)
        q = self.q(h).view(batch, time, HEADS, -1).transpose(1, 2)
        k, v = (t.unsqueeze(1).expand(-1, HEADS, -1, -1) for t in self.kv(h).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(time, time, dtype=torch.bool).tril())
        return h + y.transpose(1, 2).flatten(2)


@block("tokens")
class LinearAttention(Attention):
    """No softmax: features of keys, summed up over time."""

    def forward(self, h):
        q, k, v = self.heads(h)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        y = torch.einsum("bhtd,bhtde->bhte", q, context) / torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2))[..., None]
        return self.join(h, y)


@block("tokens")
class TorchAttention(nn.Module):
    """torch's own, which returns a pair."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, h):
        y = self.norm(h)
        y, weights = self.attention(y, y, y, need_weights=True)
        return h + y * weights.amax(dim=-1, keepdim=True)


@block("tokens")
def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True, norm_first=True)


@model(data="tokens", varies=False)
class PaddingMask(nn.Module):
    """The mask of padding is made from the tokens and used by every layer: booleans cross each cut."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.place = nn.Parameter(torch.randn(1, TIME, WIDTH) / 5)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, words):
        padding = words == 0
        h = self.embed(words) + self.place
        for layer in self.layers:
            h = layer(h).masked_fill(padding[..., None], 0.0)
        real = (~padding).sum(dim=1, keepdim=True)
        return self.head(self.norm(h).sum(dim=1) / real.clamp(min=1))


@model(data="tagged", loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))
class LatentQueries(nn.Module):
    """A perceiver: learned queries, expanded to the batch, look at the input; the input looks at them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.inward = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.outward = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, words):
        h = self.embed(words)
        z = self.latents.expand(words.shape[0], -1, -1)
        z = z + self.inward(z, h, h, need_weights=False)[0]
        z = z + self.between(z)
        h = h + self.outward(h, z, z, need_weights=False)[0]
        return self.head(h)


@block("tokens")
class SlotAttention(nn.Module):
    """Three rounds through the same layers, the last of them with a gradient."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.key, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, h):
        slots = self.start.expand(h.shape[0], 3, WIDTH)
        for turn in range(3):
            slots = slots if turn < 2 else slots.detach()
            weights = (self.query(slots) @ self.key(h).transpose(1, 2)).softmax(dim=1)
            seen = weights @ h
            slots = self.update(seen.reshape(-1, WIDTH), slots.reshape(-1, WIDTH)).reshape(slots.shape)
        return h + weights.transpose(1, 2) @ slots


@model(data="images", varies=False)
class ClassToken(nn.Module):
    """A vision transformer: patches by a convolution, a token of the class in front."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 10, WIDTH) / 5)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(h.shape[0], -1, -1), h), dim=1)
        h = h + self.places
        for layer in self.blocks:
            h = layer(h)
        return self.head(self.norm(h)[:, 0])


@block("tokens")
class LstmOut(nn.Module):
    """Two layers, both directions, projected."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, num_layers=2, bidirectional=True, batch_first=True, proj_size=4)

    def forward(self, h):
        return h + self.lstm(h)[0]


@block("tokens")
class GruWithStart(nn.Module):
    """A learned first state, expanded to the batch, which is its second dimension."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h):
        out, last = self.gru(h, self.start.expand(-1, h.shape[0], -1).contiguous())
        return out + last.transpose(0, 1)


@block("tokens")
class CellByHand(nn.Module):
    """An LSTMCell over the steps; the state starts as zeros like the input."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, h):
        y = c = torch.zeros_like(h[:, 0])
        steps = []
        for x in h.unbind(1) if isinstance(h, torch.Tensor) else [h[:, t] for t in range(TIME)]:
            y, c = self.cell(x, (y, c))
            steps.append(y)
        return torch.stack(steps, dim=1)


@model(data="tokens")
class StatesCross(nn.Module):
    """The states (h, c) of one LSTM, whose batch is the second dimension, start the next."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, words):
        h, state = self.first(self.embed(words))
        h, (last, _) = self.second(h, state)
        return self.head(last[-1] + h.mean(dim=1))


@model(data="tokens")
class PackedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, words):
        lengths = (words != 0).sum(dim=1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.head(last[-1])


@model(data="series")
class TimeFirst(nn.Module):
    """The first layers want the time in front of the batch."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, nonlinearity="relu")
        self.leave = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x):
        out, _ = self.rnn(self.enter(x).transpose(0, 1))
        return self.leave(out[-1])


@model(data="tokens", varies=False)
class RnnChain(nn.Sequential):
    """A chain in which a unit returns torch's pair (output, (h, c))."""

    def __init__(self):
        class Output(nn.Module):
            def forward(self, both):
                return both[0]

        rnn = [nn.Sequential(nn.LSTM(WIDTH, WIDTH, batch_first=True), Output()) for _ in range(2)]
        last = nn.Sequential(nn.Flatten(), nn.Linear(TIME * WIDTH, NUM_CLASSES))
        super().__init__(nn.Embedding(VOCABULARY, WIDTH), rnn[0], nn.Linear(WIDTH, WIDTH), nn.Tanh(), rnn[1], last)


@block("tokens")
class CausalConvolution(nn.Module):
    """A gated WaveNet layer: time and channels change places."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2)

    def forward(self, h):
        padded = nn.functional.pad(h.transpose(1, 2), (2, 0))
        return h + nn.functional.glu(self.conv(padded), dim=1).transpose(1, 2)


@block("tokens", varies=False)
class StateSpace(nn.Module):
    """A diagonal state space, scanned with a decay that is kept below 1 by its form."""

    def __init__(self):
        super().__init__()
        self.log_decay = nn.Parameter(torch.linspace(-2, 0, WIDTH))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        decay = torch.exp(-torch.exp(self.log_decay))
        state, out = torch.zeros_like(h[:, 0]), []
        for t in range(TIME):
            state = decay * state + (1 - decay) * h[:, t]
            out.append(state)
        return torch.stack(out, 1) * torch.sigmoid(self.gate(h))
