"""Random networks, written as Python source: layers, blocks, and the ways in which real models use them."""

import functools
import linecache
import random
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.support import random_network_parts as parts

Batch = torch.Tensor | tuple[torch.Tensor, ...] | dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A random network and its data."""

    seed: int
    source: str  # of a module whose class ``Net`` is the model; it runs by itself
    build: Callable[[], nn.Module]  # a new model in float64; the same weights every time
    batches: list[Batch]  # four, of different sizes
    features: frozenset[str]  # names of the snippets and of all else that was chosen


def random_network(seed: int) -> Case:
    """Return the network of a seed; equal seeds give equal networks, weights and data."""
    writer = _Writer(random.Random(seed))
    chosen = writer.rng.choice(list(parts.INPUTS))
    source = writer.write_model(chosen)
    batches = _draw_batches(chosen, writer)
    return Case(seed, source, functools.partial(_build, seed, source), batches, frozenset(writer.features))


@functools.lru_cache(maxsize=64)
def _load(seed, source):
    """Run the source as a module of its own, so that tracebacks show its lines and its classes can be pickled."""
    module = types.ModuleType(f"random_network_{seed}")
    module.__file__ = f"<random network {seed}>"
    linecache.cache[module.__file__] = len(source), None, source.splitlines(keepends=True), module.__file__
    sys.modules[module.__name__] = module
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module


def _build(seed, source):
    """Return a new model; the random streams of the caller stay where they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _load(seed, source).Net().double()


def _draw_batches(chosen, writer):
    """Return four batches of the ``chosen`` kind of input, of four sizes; half of the networks get several lengths."""
    rng, generator = writer.rng, torch.Generator().manual_seed(writer.rng.randrange(2**32))
    sizes = [2, 3, 4, rng.choice([5, 5, 5, 8])]  # 8: as many samples as channels
    rng.shuffle(sizes)
    lengths = [rng.randint(3, 6)] * 4
    if chosen != "input_rows" and rng.random() < 0.5:
        lengths = [rng.randint(2, 6) for _ in sizes]
        writer.features.add("lengths_vary")
    return [_draw_batch(chosen, size, length, generator) for size, length in zip(sizes, lengths, strict=True)]


def _draw_batch(chosen, size, length, generator):
    shape = (size, 8) if chosen == "input_rows" else (size, length, 8)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    ids = torch.randint(10, (size, length), generator=generator)
    ids[:, 0].clamp_(min=3)  # a row of zeros would be masked as a whole
    others = {"input_ids": ids, "input_tuple": (x, ids), "input_dict": {"x": x, "ids": ids}}
    return {**others, "input_mask": {"x": x, "mask": ids > 2}}.get(chosen, x)


@dataclass(frozen=True)
class _Template:
    """A snippet, or what goes around one, as random_network_parts.py describes it."""

    name: str
    shape: str
    cost: int
    needs: frozenset[str]
    text: str


def _templates(text):
    found = re.findall(r"^# (\w+) (\S+) (\d+) ?(.*)\n((?:(?!# ).*\n)*)", text, re.MULTILINE)
    return [
        _Template(name, shape, int(cost), frozenset(needs.split()), body) for name, shape, cost, needs, body in found
    ]


SNIPPETS, WRAPS = _templates(parts.SNIPPETS), _templates(parts.WRAPS)
CHOICE = re.compile(r"<<((?:(?!<<|>>).)*)>>", re.DOTALL)
MODULES = re.findall(r"^# (\w+) (\S+) (\S+)\n((?:(?!# ).*\n)*)", parts.MODULES, re.MULTILINE)


@dataclass
class _Forward:
    """A class while its forward is being written."""

    shape: str
    has: set[str]  # the needs of snippets that it meets
    depth: int = 0  # of nested blocks
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=lambda: {"seq": [], "row": []})

    def flush(self, num=None):
        """Write the next ``num`` of the lines that come later; all of them if None."""
        self.body += self.later[:num]
        del self.later[:num]


class _Writer:
    """Writes the source of one network."""

    def __init__(self, rng):
        self.rng, self.features, self.classes, self.num = rng, set(), [], 0

    def write_model(self, chosen):
        """Return the source of a network with 4 to 14 calls of layers; ``chosen`` is its kind of input."""
        parameters, shape, first = parts.INPUTS[chosen]
        forward = _Forward(shape, {"net", "state"} | ({"rows"} if shape == "row" else set()))
        if "ids" in parameters + first:
            forward.has.add("ids")
        if "x" in parameters:
            forward.values[shape].append("x")
        self.add(forward, first)
        self.fill(forward, self.rng.randint(3, 11 - (chosen == "input_ids")))
        forward.flush()
        for names in ("norm", "late"), ("linear", "mlp"):  # a last norm in half of them, as most models have
            last = self.rng.choice([t for t in SNIPPETS if t.name in names])
            self.add(forward, self.fill_in(forward, last.text))
        forward.flush()
        output = self.rng.choice(list(parts.OUTPUTS))
        self.features |= {chosen, output}
        result = "return " + self.fill_in(forward, parts.OUTPUTS[output])
        self.classes.append(_class_source("Net", "", parameters, forward.init, [*forward.body, result]))
        return self.assemble()

    def assemble(self):
        """Return the source: imports, the parts of the library that the classes name, and the classes."""
        text = "\n\n\n".join(self.classes)
        named = [(re.search(r"(?:class|def) (\w+)", d)[1], d) for d in parts.DEFINITIONS.strip().split("\n\n\n")]
        library = [definition for name, definition in named if re.search(rf"\b{name}\b", text)]
        for name, built_from, called_with, body in MODULES:
            if re.search(rf"\b{name}\b", text):
                module = _Forward("seq", set())
                self.add(module, self.fill_in(module, body))
                parameters = built_from.strip("-"), called_with.replace(",", ", ")
                library.append(_class_source(name, *parameters, module.init, module.body))
        return "\n\n\n".join([parts.HEADER.rstrip(), *library, text]) + "\n"

    def fill(self, forward, budget):
        """Write snippets and blocks until ``budget`` calls of modules with parameters are used."""
        while budget > 0:
            if self.rng.random() < 0.3:
                forward.flush(1)
            if forward.depth < 2 and self.rng.random() < 0.25:
                budget -= self.write_block(forward, budget)
            else:
                budget -= self.write_snippet(forward, budget)

    def write_snippet(self, forward, budget):
        """Write one snippet and return its cost; some within a branch or a loop."""
        template = self.draw(SNIPPETS, forward, budget)
        lines = self.fill_in(forward, template.text)
        _, _, after = template.shape.partition(">")
        if after:
            forward.flush()
            forward.shape = after
        self.features.add(template.name)
        keeps = re.search(r"^~|lambda|return", lines, re.MULTILINE)  # what is read later, or ends the forward
        wrap = self.draw(WRAPS, forward, 0) if self.rng.random() < 0.3 and not after and not keeps else None
        repeats = 2 if wrap and wrap.name == "repeat" else 1
        if wrap and template.cost * repeats <= budget:
            self.features.add(wrap.name)
            lines = _within(self.fill_in(forward, wrap.text), lines)
        else:
            repeats = 1
        self.add(forward, lines)
        return template.cost * repeats

    def write_block(self, forward, budget):
        """Write a class with a forward of its own and the calls of it; return their cost."""
        rng = self.rng
        holder = rng.choice(["one"] * 3 + [name for name, (calls, *_) in parts.HOLDERS.items() if calls <= budget])
        calls, held, loop, function = parts.HOLDERS[holder]
        forms = [name for name, form in parts.FORMS.items() if "ids" in forward.has or "ids" not in form[0]]
        form = "plain" if holder in ("sequential", "checkpointed_block") else rng.choice(forms)
        parameters, result, use = parts.FORMS[form]
        self.features |= {holder, f"block_{form}"}

        has = forward.has & {"state"} if holder != "checkpointed_block" else set()
        block = _Forward(forward.shape, has | ({"ids"} if "ids" in parameters else set()), forward.depth + 1)
        block.body += parts.FIRST_LINES.get(form, [])
        inner = rng.randint(1, budget // calls)
        self.fill(block, inner)
        block.flush()
        self.num += 1
        name = f"Block{self.num}"
        body = [*block.body, *self.fill_in(block, result).splitlines()]
        self.classes.append(_class_source(name, "", parameters, block.init, body))

        if holder == "checkpointed_block":
            function, use = f"checkpoint({function}", "h = {f}, h, use_reentrant=False)"
        use = _within(loop, use) if loop else use
        self.add(forward, self.fill_in(forward, f"{held}\n{use}", c=name, f=function))
        return calls * inner

    def draw(self, templates, forward, budget):
        """Draw a template that fits the shape of ``h``, the budget and what the forward has."""
        needed = [(t, t.needs - {"often"}) for t in templates if t.cost <= budget]
        fit = [t for t, needs in needed if needs <= forward.has and t.shape.split(">")[0] in ("any", forward.shape)]
        if not forward.values["seq"]:
            fit = [t for t in fit if t.shape != "row>seq" or "rows" in t.needs]
        return self.rng.choices(fit, [3 if "often" in t.needs else 1 for t in fit])[0]

    def fill_in(self, forward, text, **names):
        """Return a template's text with its choices made and its names put in."""
        self.num += 1
        while "<<" in text:  # the innermost choices first
            text = CHOICE.sub(lambda m: self.rng.choice(re.split(r"\|\|\n?", m[1])), text)
        for key, value in {**names, "n": str(self.num)}.items():
            text = text.replace(f"{{{key}}}", value)
        text = re.sub(r"\{s\}", lambda _: self.rng.choice(forward.values["seq"]), text)
        return re.sub(r"\{v\}", lambda _: self.rng.choice([*forward.values[forward.shape][-4:], "h"]), text)

    def add(self, forward, lines):
        """Add lines to a class: to its ``__init__`` (+), to the end of its forward, or to what comes later (~)."""
        for line in lines.splitlines():
            if line.startswith("+"):
                forward.init.append(line[1:])
            elif line.startswith("~"):
                forward.later.append(line[1:])
            else:
                forward.body.append(line)
                forward.values[forward.shape] += re.findall(r"\bv\d+(?= =)", line)


def _within(opening, lines):
    """Return ``lines`` indented under the last line of ``opening``, except those of ``__init__`` and of later."""
    indented = [line if line[0] in "+~" else f"    {line}" for line in lines.splitlines()]
    return "\n".join([opening.rstrip(), *indented])


def _class_source(name, built_from, called_with, init, body):
    """Return the source of a module, from the parameters and lines of its ``__init__`` and of its forward."""
    lines = [f"    def __init__(self{built_from and ', '}{built_from}):", "        super().__init__()"]
    lines += [f"        {line}" for line in init]
    lines += ["", f"    def forward(self, {called_with}):"]
    return "\n".join([f"class {name}(nn.Module):", *lines, *(f"        {line}" for line in body)])
