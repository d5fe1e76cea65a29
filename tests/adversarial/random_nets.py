"""Random networks, as the text of a program: a seed gives one forward that plain torch can train."""

import linecache
import random
import re

import torch

from tests.adversarial.cases import MICRO_BATCH, Case, adamw, sgd

HEADER = """import torch
from torch import nn
from torch.nn import functional as F
from tests.adversarial.random_blocks import *

"""

# Layers of [B, 8]; the last word says what it may be called with.
LAYERS = [
    "nn.Linear(8, 8)", "nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)", "nn.LayerNorm(8)", "nn.BatchNorm1d(8)",
    "nn.BatchNorm1d(8, momentum=None)", "nn.ReLU(inplace=True)", "nn.GELU()", "Residual()", "Residual(inplace=True)",
    "Gated()", "Average()", "Average(persistent=False)", "Codes()", "Stop()", "Bottleneck()", "Scale()",
]  # fmt: skip
# a, b are values so far; v is a new one.
EXPRESSIONS = [
    "v = torch.tanh(a)", "v = F.gelu(a)", "v = a + b", "v = a + b", "v = a * torch.sigmoid(b)", "v = a - 0.5 * b",
    "v = torch.cat([a[:, :4], b[:, 4:]], dim=1)", "v = torch.where(a > b, a, 0.3 * b)", "v = a.detach() + b",
    "v = a.detach()", "v = torch.cat(a.chunk(2, dim=1)[::-1], dim=1)",
    "v = a.view(a.size(0), 2, 4).transpose(1, 2).flatten(1)",
    "v = a[:, 2:6].repeat(1, 2)", "v = a * (1.0 / a.shape[1])", "v = a.reshape(a.shape[0], -1) + a.mean(dim=0)",
    "v = a.unsqueeze(1).expand(-1, 3, -1).mean(dim=1)", "v = a.sort(dim=1)[0]", "v = a.new_zeros(a.shape) + b",
    "v = F.softmax(a, dim=-1) * b", "v = torch.stack([a, b], dim=2).amax(dim=2)", "v = a.clone()", "v = a",
    "v = a / (1.0 + b.detach().abs())", "v = F.normalize(a, dim=1) * b.norm(dim=1, keepdim=True)",
    "v = a * (a > 0).to(a.dtype)", "v = torch.zeros_like(a)", "v = F.one_hot(a.argmax(dim=1), 8).to(a.dtype) + b",
]  # fmt: skip
IN_PLACE = [
    "a.mul_(0.5)", "a.add_(b)", "a += b", "a.relu_()", "a[:, :3] = 0.25", "a[:, 1:4].mul_(2.0)",
    "a.masked_fill_(a < -1, -1.0)",
    "a[:, 0].copy_(b[:, 1])", "a.clamp_(-2, 2)", "a.copy_(b)", "a.view(-1, 2, 4)[:, 1].add_(0.1)",
    "F.dropout(a, 0.0, self.training, True)",
]  # fmt: skip
OF_CONTAINERS = [
    ("Pair()", "t = self.{m}(a, b)", "v = t[0] + t[1]"),
    ("Nested()", "t = self.{m}(a)", "v = t[1][0] * t[0] + t[1][1]"),
    ("Dictionary()", "t = self.{m}(a, b)", 'v = t["low"] + t["rest"][0]'),
    ("ListOfOne()", "t = self.{m}(a)", "v = t[0]"),
    ("Twin()", "t = self.{m}(a)", "v = t[0] * t[1]"),
]
CHAIN_STATES = {
    "one": ("{a}", ["{s}"]),
    "pair": ("({a}, {b})", ["{s}[0]", "{s}[1]"]),
    "list": ("[{a}, {b}]", ["{s}[0]", "{s}[1]"]),
    "nested": ("({a}, ({b}, {a} > 0))", ["{s}[0]", "{s}[1][0]", "{s}[1][1].to({s}[0].dtype)"]),
    "of_one": ("({a}, [{b}])", ["{s}[0]", "{s}[1][0]"]),
    "dictionary": ('{{"a": {a}, "b": [{b}]}}', ['{s}["a"]', '{s}["b"][0]']),
}


class Writer:
    """Writes the forward of a class, statement by statement."""

    def __init__(self, draw):
        self.draw, self.init, self.lines, self.values, self.count = draw, [], [], [], 0

    def new(self, letter):
        self.count += 1
        return f"{letter}{self.count}"

    def module(self, code):
        name = self.new("m")
        self.init.append(f"self.{name} = {code}")
        if "Linear" in code and self.draw.random() < 0.12:
            self.init.append(f"self.{name}.requires_grad_(False)")
        return name

    def pick(self):
        """A value, the newer the likelier."""
        place = min(int(self.draw.expovariate(0.7)), len(self.values) - 1)
        return self.values[-1 - place]

    def says(self, statement):
        a, b, v = self.pick(), self.pick(), self.new("h")
        names = {"a": a, "b": b, "v": v}
        words = "".join(names.get(word, word) for word in split_words(statement))
        self.lines.append(words)
        if statement.startswith("v "):
            self.values.append(v)

    def statement(self, layers):
        kind = self.draw.random()
        if kind < 0.45:
            if layers and self.draw.random() < 0.1:
                name = self.draw.choice(layers)
            else:
                name = self.module(self.draw.choice(LAYERS))
                layers.append(name)
            self.says(f"v = self.{name}(a)")
        elif kind < 0.75:
            self.says(self.draw.choice(EXPRESSIONS))
        elif kind < 0.85:
            self.says(self.draw.choice(IN_PLACE))
        elif kind < 0.92:
            code, call, take = self.draw.choice(OF_CONTAINERS)
            box = self.new("t")
            self.says(call.replace("{m}", self.module(code)).replace("t =", f"{box} ="))
            self.says(take.replace("t[", f"{box}["))
        elif kind < 0.96:
            name = self.new("p")
            self.init.append(f"self.{name} = nn.Parameter(torch.linspace(0.5, 1.5, 8))")
            self.says(f"v = a * self.{name}")
        else:
            self.says("v = a if self.training else a * 0.9")

    def text(self, name, head, base="nn.Module"):
        init = "\n".join(f"        {line}" for line in ["super().__init__()", *self.init])
        body = "\n".join(f"        {line}" for line in self.lines)
        return f"class {name}({base}):\n    def __init__(self):\n{init}\n\n    def forward(self, {head}):\n{body}\n"


def split_words(statement):
    """The single letters a, b and v of a statement as words of their own."""
    return re.split(r"(?<![\w.\"'])([abv])(?![\w\"'(])", statement)


def net_with_forward(draw):
    """A module with a forward of its own."""
    writer, layers = Writer(draw), []
    enter = writer.module("nn.Linear(6, 8)")
    writer.lines.append(f"h0 = self.{enter}(x)")
    writer.values.append("h0")
    for _ in range(draw.randint(6, 14)):
        writer.statement(layers)
    if draw.random() < 0.15 and len(linear := [line.split()[0] for line in writer.init if "Linear(8, 8)" in line]) > 1:
        writer.init.append(f"{linear[0]}.weight = {linear[1]}.weight")
    head = writer.module("nn.Linear(8, 5)")
    writer.lines.append(f"return self.{head}({writer.pick()} + {writer.values[-1]})")
    return writer.text("Net", "x")


def chain_of_units(draw):
    """An nn.Sequential whose units hand on containers."""
    parts, state = [], "one"
    for number in range(draw.randint(4, 7)):
        writer, layers = Writer(draw), []
        for take in CHAIN_STATES[state][1]:
            name = writer.new("h")
            writer.lines.append(f"{name} = {take.format(s='s')}")
            writer.values.append(name)
        if number == 0:
            writer.lines = [f"h0 = self.{writer.module('nn.Linear(6, 8)')}(s)"]
            writer.values = ["h0"]
        for _ in range(draw.randint(1, 4)):
            writer.statement(layers)
        state = draw.choice([*CHAIN_STATES])
        a, b = writer.values[-1], writer.pick()
        writer.lines.append(f"return {CHAIN_STATES[state][0].format(a=a, b=b)}")
        parts.append(writer.text(f"Unit{number}", "s"))
    takes = " + ".join(take.format(s="s") for take in CHAIN_STATES[state][1])
    last = Writer(draw)
    last.lines.append(f"return self.{last.module('nn.Linear(8, 5)')}({takes})")
    parts.append(last.text("Head", "s"))
    units = ", ".join([*(f"Unit{number}()" for number in range(len(parts) - 1)), "Head()"])
    return "\n\n".join(parts) + f"\n\ndef Net():\n    return nn.Sequential({units})\n"


def program(seed):
    """The text of a network that torch itself can train, and how it is to be cut."""
    for attempt in range(100):
        draw = random.Random(seed * 1000 + attempt)
        source = HEADER + (net_with_forward(draw) if draw.random() < 0.7 else chain_of_units(draw))
        how = {
            "K": draw.choice([2, 2, 3, 3, 4, 5]),
            "M": draw.choice([1, 1, 2, 3]),
            "granularity": draw.choice(["block", "layer"]),
            "method": draw.choice(["adl", "adl", "adl", "ddg", "pipedream", "gpipe", "1f1b", "2bw"]),
        }
        if how["method"] == "2bw":  # which needs as many micro-batches per update as its pipeline is deep
            how["M"] = max(how["M"], how["K"] - 1)
        if not trains(build := compiled(source, seed)):
            continue
        case = Case(name=f"seed {seed}", build=build, optimizer=draw.choice([sgd, adamw]))
        return source, case, how
    raise AssertionError(f"no network for seed {seed}")


def compiled(source, seed):
    name = f"<network {seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {}
    exec(compile(source, name, "exec"), namespace)
    return namespace["Net"]


def trains(build):
    """Whether plain torch can: some weights move, and numbers stay finite."""
    torch.manual_seed(0)
    model = build().double()
    draw = torch.Generator().manual_seed(0)
    try:
        for size in (MICRO_BATCH, 2, MICRO_BATCH):
            x = torch.randn(size, 6, generator=draw, dtype=torch.float64)
            loss = model.train()(x).pow(2).mean()
            loss.backward()
            model.eval()(x)
    except RuntimeError:
        return False
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(torch.isfinite(loss)) and sum(float(g.abs().sum()) > 1e-6 for g in grads) >= 2


def pasteable(source, case, how):
    """A program that shows the case, to be run from the root of the repository."""
    optimizer = "sgd" if case.optimizer is sgd else "adamw"
    return (
        f"{source}\n\nfrom tests.adversarial.cases import Case, adamw, sgd\n"
        "from tests.adversarial.harness import outcome\n\n"
        f'print(outcome(Case(name="{case.name}", build=Net, optimizer={optimizer}), {how["K"]}, '
        f'"{how["granularity"]}", M={how["M"]}, method="{how["method"]}"))\n'
    )
