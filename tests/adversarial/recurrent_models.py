"""Networks with a state over time, in torch's forms and unrolled by hand."""

import torch
from torch import nn

from tests.adversarial.cases import NUM_CLASSES, TIME, VOCABULARY, WIDTH, block, model


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


@block("tokens")
class CellOverUnbound(nn.Module):
    """The number of steps is asked of the input."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(WIDTH, WIDTH)

    def forward(self, h):
        y = h.new_zeros(h.size(0), WIDTH)
        out = torch.zeros_like(h)
        for t in range(h.shape[1]):
            y = self.cell(h[:, t], y)
            out[:, t] = y
        return out


@model(data="tokens", word="batch|dimension|cut")
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


@model(data="tokens", word="pack|trace|batch|cut")
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


@model(
    data="tokens",
)
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


@block("tokens")
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
