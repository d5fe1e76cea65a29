"""One training step and one evaluation of a network of torchvision, cut and uncut, compared bit by bit."""

import random
from itertools import pairwise

import torch
from torch.utils._pytree import tree_leaves

from adl_dist.models import torchvision_model
from adl_dist.partition import even_sizes, linearise
from adl_dist.stage import Stage
from adl_dist.training.outcome import FIRST, Outcome
from adl_dist.training.samples import MicroBatch, Samples
from adl_dist.training.shape_inference import StageChain
from tests.support.values import spec_of

NUM_STAGES, BATCH, CLASSES = 4, 2, 10
# Pixels: as few as each network takes, for the operations are the same.
SIZE = 64
SIZES = {"inception_v3": 75, "inception_v3 with heads": 299, "maxvit_t": 224, "vit_h_14": 56}
# They return a named tuple in training, and a tensor in evaluation.
WITH_HEADS = ("googlenet with heads", "inception_v3 with heads")
# A gradient comes back over a cut with the strides of what went over it, and sums over dimensions of other strides run
# in another order. ConvNeXt permutes what it normalises.
ROUNDED = ("convnext",)


class MeanSquare:
    """A loss that takes whatever the model returns, and keeps it."""

    def __call__(self, out, target):
        self.out = out
        first, *others = (leaf.square().mean() for leaf in tree_leaves(out))
        return sum(others, first)


def assert_the_cut_network_equals_the_uncut_one(name, dtype, scratch):
    """At an even cut and at three random places, into K = 4; one step in training, one in evaluation.

    Bit for bit, but where ``ROUNDED`` says why not; there in float64 to 1e-12. ``name`` is a builder of torchvision or
    in ``WITH_HEADS``; what would take too much memory goes to ``scratch``. Returns what was compared, for a table.
    """
    model, size = network(name, dtype), SIZES.get(name, SIZE)
    # Drawn in float64, so that both dtypes see the same images.
    x = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    num_parameters = sum(p.numel() for p in model.parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = uncut_step(model, x)
    if num_parameters > 4e8:
        torch.save(expected, scratch / "uncut.pt")
        expected = torch.load(scratch / "uncut.pt", mmap=True, weights_only=True)
        (scratch / "uncut.pt").unlink()  # it is mapped, and pytest keeps the last folders
    chain = linearise(model, granularity="layer")
    sent, rounded = {}, 0
    for how, sizes in (("even", even_sizes(chain, NUM_STAGES)), ("random", random_sizes(chain, seed=name))):
        for buffer_name, buffer in model.named_buffers():
            buffer.copy_(buffers[buffer_name])
        pieces = chain.pieces(sizes)
        assert sorted(n for piece in pieces for n in piece.state_dict()) == sorted(model.state_dict())
        got, sent[how] = cut_step(model, pieces, x)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            if got[key] is value is None or torch.equal(got[key], value):
                continue
            told = f"{name}, {dtype}, cut into {sizes}: {key}"
            assert name.startswith(ROUNDED), told
            if dtype == torch.float64:
                torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=told)
            rounded += 1
    return {
        "network": name,
        "input": "x".join(map(str, x.shape)),
        "million parameters": round(num_parameters / 1e6, 1),
        "units": len(chain.units),
        "tensors over the even cuts": ", ".join(map(str, sent["even"])),
        "over three random ones": ", ".join(map(str, sent["random"])),
        str(dtype).removeprefix("torch."): f"{rounded} rounded" if rounded else "equal",
    }


def network(name, dtype):
    """The same weights every time, and nothing random in it: a stage draws other numbers than the uncut model."""
    builder, *heads = name.split(" with ")
    options = {"aux_logits": True} if heads else {}
    if name.startswith("vit"):
        options["image_size"] = SIZES.get(name, SIZE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torchvision_model(builder, num_classes=CLASSES, **options).to(dtype)
    for module in model.modules():
        for chance in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, chance, None), float):
                setattr(module, chance, 0.0)
    return model


def random_sizes(chain, *, seed):
    places = [cut + 1 for cut in range(len(chain.units) - 1) if cut not in chain.forbidden]
    cuts = sorted(random.Random(seed).sample(places, NUM_STAGES - 1))
    return [stop - start for start, stop in pairwise([0, *cuts, len(chain.units)])]


def uncut_step(model, x):
    """Return what one step leaves behind, by name; None: a parameter that got no gradient.

    The outputs in training and in evaluation after it, gradients of the input and of each parameter, and each buffer.
    """
    loss_fn, target, x = MeanSquare(), torch.zeros(len(x), dtype=torch.long), x.clone().requires_grad_()
    loss_fn(model.train()(x), target).backward()
    values = _left_by_training(model, x, loss_fn.out)
    with torch.no_grad():
        return values | _named("evaluation", model.eval()(x))


def cut_step(model, pieces, x):
    """The same with ``pieces`` of ``model`` as stages; and how many tensors cross each cut in training."""
    loss_fn, target, x = MeanSquare(), torch.zeros(len(x), dtype=torch.long), x.clone().requires_grad_()
    spec = spec_of(len(pieces), lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn)

    traits = found_in_a_trial(model, pieces, spec, MicroBatch(x.detach(), target))

    def stage(k, *, training):
        made = Stage(pieces[k], k, spec, traits=traits[k])
        made.begin(0, training=training)
        return made

    stages, acts = [], (x,)
    for k in range(len(pieces)):
        stages.append(stage(k, training=True))
        acts = stages[k].forward(0, acts, target if stages[k].is_last else None)
    sent = [len(s.in_flight[0].acts) for s in stages[1:]]
    grads = (torch.ones((), dtype=x.dtype),)
    for s in reversed(stages):
        grads = s.backward(0, grads)
    values = _left_by_training(model, x, loss_fn.out)
    acts = (x.detach(),)
    for k in range(len(pieces)):
        acts = stage(k, training=False).predict(0, acts, target)
    return values | _named("evaluation", loss_fn.out), sent


def found_in_a_trial(model, pieces, spec, batch):
    """The traits of ``pieces``, as the trainer finds them; what the trial moves is put back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    chain = StageChain(pieces, spec, batch.input_.device)
    chain._backward(chain.forward(batch), FIRST, {}, Outcome())  # chain.run would take four times as long
    traits = chain.agreed(Samples((batch, batch), trains=False), spec).traits
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.zero_grad()
    return traits


def _left_by_training(model, x, out):
    values = {"gradient of the input": x.grad, **_named("training", out)}
    for name, parameter in model.named_parameters():
        values[f"gradient of {name}"], parameter.grad = parameter.grad, None
    return values | {name: buffer.clone() for name, buffer in model.named_buffers()}


def _named(mode, out):
    kind = type(out).__name__
    return {f"output {place} in {mode}, a {kind}": leaf.detach() for place, leaf in enumerate(tree_leaves(out))}
