"""Values that change later, weights that a forward writes, shared memory, contexts, old idioms."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, WIDTH, Inner, block, forward_block, model
from tests.adversarial.models_containers import packed

CHANGING = {
    "changing_float": (lambda a, b: (a, b, float(a.detach().mean())), lambda t: (t[0] * (1 + t[2]), t[1])),
    "batch_size": (lambda a, b: (a, b, len(a)), lambda t: (t[0] / t[2], t[1])),
    "mode": (lambda a, b: (a, b, torch.is_grad_enabled()), lambda t: (t[0] * (1.0 if t[2] else 0.5), t[1])),
    "changing_structure": (
        lambda a, b: (a, b) if len(a) == 3 else {"a": a, "b": b},
        lambda t: (t[0], t[1]) if isinstance(t, tuple) else (t["a"], t["b"] * 2),
    ),
    "changing_width": (lambda a, b: (a, b[:, : 4 + len(a)]), lambda t: (t[0], F.pad(t[1], (0, WIDTH - t[1].shape[1])))),
    "changing_dtype": (
        lambda a, b: (a, b if float(a.detach().sum()) > 0 else b.float()), lambda t: (t[0], t[1].double() * 2)
    ),
    "list_of_samples": (lambda a, b: [*a.unbind(0), b], lambda t: (torch.stack(list(t[:-1])), t[-1])),
    "sometimes_none": (
        lambda a, b: (a, b if len(a) == 3 else None), lambda t: (t[0], t[0] * 2 if t[1] is None else t[1])
    ),
    "changing_order": (
        lambda a, b: {"a": a, "b": b} if len(a) == 3 else {"b": b, "a": a},
        lambda t: (next(iter(t.values())), t["b"]),
    ),
}  # fmt: skip
for name, way in CHANGING.items():
    model(name=f"hands_on_{name}")(lambda way=way: packed(*way))


@model
class SharedBuffer(nn.Sequential):
    """Two layers follow one average; who moves it first must not depend on the pipeline."""

    class Follows(Inner):
        def __init__(self, mean):
            super().__init__()
            self.register_buffer("mean", mean)

        def forward(self, h):
            if self.training:
                self.mean.mul_(0.8).add_(h.detach().mean(dim=0), alpha=0.2)
            return self.inner(h - self.mean.clone())

    def __init__(self):
        mean = torch.zeros(WIDTH, dtype=torch.float64)
        first = [nn.Linear(6, WIDTH), self.Follows(mean), nn.Tanh()]
        super().__init__(*first, nn.Linear(WIDTH, WIDTH), self.Follows(mean), nn.Linear(WIDTH, NUM_CLASSES))


@model
class SharedNorm(nn.Module):
    """One norm without weights at two places: no parameter ties them, only running statistics."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH, affine=False), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = torch.tanh(self.norm(self.a(x)))
        h = torch.tanh(self.c(torch.tanh(self.b(h))))
        return self.head(self.norm(h))


@model
class TeacherOfTheWhole(nn.Module):
    """The last unit keeps the average of the first one's weights, by a reference that is not registered."""

    class Consistency(nn.Module):
        def __init__(self, student):
            super().__init__()
            self.student = [student]
            self.register_buffer("average", student.weight.detach().clone())
            self.out = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, h):
            if self.training:
                self.average.lerp_(self.student[0].weight.detach(), 0.2)
            return self.out(h) * self.average.mean().detach()

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = self.Consistency(self.first)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@forward_block
def compressed_activations(self, h):
    """What the backward needs is kept in float32: gradients differ in the ninth digit."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
        return torch.tanh(self.inner(h)) * h


@forward_block
def saved_on_cpu(self, h):
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(self.inner(h)) * h


@forward_block
def switches_gradients(self, h):
    """By calls, not by a context: the second half has no gradient."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    fixed = torch.tanh(self.inner(h))
    torch.set_grad_enabled(before)
    return h * fixed


@forward_block
def in_inference_mode(self, h):
    with torch.inference_mode():
        chosen = self.inner(h).argmax(dim=1)
    return h * F.one_hot(chosen.clone(), WIDTH)


@forward_block(random="torch")
def forks_the_stream(self, h):
    """Draws the same mask every time, and does not disturb the stream around it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        mask = torch.rand(WIDTH, dtype=torch.float64) < 0.7
    return F.dropout(self.inner(h * mask), 0.2, self.training)


@forward_block
def asks_input_for_gradient(self, h):
    """As code with gradient penalties does."""
    if not h.requires_grad and torch.is_grad_enabled():
        h.requires_grad_()
    h.retain_grad() if h.requires_grad else None
    return torch.tanh(self.inner(h))


@block
class SmallThings(nn.Module):
    """Scalars, empty and missing parameters, whole numbers, flags, memory that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).div(3).t())
        self.log_scale, self.empty = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.zeros(0, 3))
        self.whole = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.register_parameter("missing", None)
        self.register_buffer("nothing", None)
        self.register_buffer("flags", torch.arange(WIDTH) % 3 == 0)
        self.register_buffer("none_at_all", torch.zeros(0))

    def forward(self, h):
        h = self.inner(h.index_select(1, self.whole)) * self.log_scale.exp()
        return torch.where(self.flags, h, torch.tanh(h)) + (0 if self.missing is None else 1)


@block
class KeepsALog(Inner):
    """Numbers for a plot, in a list; nothing reads them."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, h):
        y = torch.tanh(self.inner(h))
        self.log.append(y.detach().mean())
        return y


@forward_block
def keeps_its_map(self, h):
    """The last activation as an attribute, as attention maps are kept."""
    self.map = torch.softmax(self.inner(h), dim=1)
    return h * self.map


@model
class RenamesItsState(nn.Module):
    """A hook gives the entries of the state_dict other names, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)
        )
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, _):
        for name in list(state):
            state[name.replace("inside.", "")] = state.pop(name)

    def forward(self, x):
        return self.inside(x)
