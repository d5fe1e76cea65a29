"""Measure the Python of a stage: what a forward takes besides the calls of its own units, against the uncut model's.

    python -m benchmarks.stage_overhead

All units are replaced by stubs that return a ready tensor, in the stages and in the uncut model, so that only Python is
left. A stage may take as long as the uncut model and 40 additions of two one-element tensors. Medians of five, of the
time of the thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from adl_dist.batch import Batch, arguments_of, tensors_of
from adl_dist.models import cifar_resnet, gpt
from adl_dist.partition import Chain, even_sizes
from adl_dist.partition.containers import map_tensors

STAGES, ROUNDS, CALLS = 4, 5, 60


def networks() -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], str]]:
    """Return for each network how it is built, its input for a number of samples, and the granularity of its units."""
    import transformers

    def images(size: int) -> Callable[[int], Batch]:
        return lambda n: torch.randn(n, 3, size, size)

    def words(n: int) -> Batch:
        return torch.randint(0, 64, (n, 8))

    def ids(n: int) -> Batch:
        return {"input_ids": torch.randint(0, 64, (n, 8))}

    def gpt2() -> nn.Module:
        config = transformers.GPT2Config(n_layer=12, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
        return transformers.GPT2LMHeadModel(config)

    def llama() -> nn.Module:
        config = transformers.LlamaConfig(
            num_hidden_layers=16,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            vocab_size=64,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    def own_gpt() -> nn.Module:
        return gpt(64, 8, layers=12, width=32, heads=2)

    return {
        "ResNet-56, blocks": (lambda: cifar_resnet(56, num_classes=10), images(8), "block"),
        "GPT of 12 layers, blocks": (own_gpt, words, "block"),
        "GPT-2 (12), blocks": (gpt2, ids, "block"),
        "Llama (16), blocks": (llama, ids, "block"),
        "DenseNet-121, layers": (lambda: torchvision.models.densenet121(num_classes=10), images(32), "layer"),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Return the median of ROUNDS of the seconds of one call."""
    rounds = []
    for _ in range(10):
        call()
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time() - start) / CALLS)
    return statistics.median(rounds)


def stub(modules: list[nn.Module], run: Callable[[], Any]) -> None:
    """Have ``modules`` return what they return in one ``run``."""
    made: dict[nn.Module, Any] = {}
    hooks = [
        m.register_forward_hook(lambda module, args, out: made.__setitem__(module, _detached(out))) for m in modules
    ]
    run()
    for hook in hooks:
        hook.remove()
    for module in modules:
        if module in made:
            vars(module)["forward"] = lambda *args, ready=made[module], **kwargs: ready


def _detached(out: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return map_tensors(lambda tensor: tensor.detach().clone().as_subclass(Tensor), out)


def measure(
    build: Callable[[], nn.Module], inputs: Callable[[int], Batch], granularity: str
) -> tuple[float, list[float]]:
    """Return the seconds of the uncut model's Python, and of each stage's."""
    torch.manual_seed(0)
    model, batch = build(), inputs(1)
    chain = Chain(model, [inputs(2), inputs(4)], granularity=granularity)
    sizes = even_sizes(chain, STAGES)
    stages = chain.stages(model, chain.plan(sizes), sizes, range(STAGES))
    names = chain.block_names if granularity == "block" else chain.units
    model.eval()  # so that no buffer moves
    args, kwargs = arguments_of(batch)
    acts: list[tuple[Tensor, ...]] = [tensors_of(batch)]
    for stage in stages:
        stage.eval()
        acts.append(stage(*acts[-1]))
    times = []
    for stage, given in zip(stages, acts, strict=False):
        own = [vars(stage)["model"].get_submodule(name) for name in names if _is_module(model, name)]
        stub(own, lambda stage=stage, given=given: stage(*given))
        times.append(seconds(lambda stage=stage, given=given: stage(*given)))
    stub([model.get_submodule(name) for name in names if _is_module(model, name)], lambda: model(*args, **kwargs))
    return seconds(lambda: model(*args, **kwargs)), times


def _is_module(model: nn.Module, name: str) -> bool:
    try:
        return bool(name) and model.get_submodule(name) is not None
    except AttributeError:
        return False


def skipping() -> tuple[float, float]:
    """Return the seconds of a skipped unit, and of a call of nn.Identity."""
    layers = [nn.Linear(4, 4) for _ in range(100)]
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    chain = Chain(model, [torch.randn(2, 4), torch.randn(4, 4)])
    plan = chain.plan([100, 1])
    last = chain.stages(model, plan, [100, 1], [1])[0].eval()
    short = nn.Sequential(layers[0], nn.Linear(4, 4))
    one = Chain(short, [torch.randn(2, 4), torch.randn(4, 4)])
    few = one.stages(short, one.plan([1, 1]), [1, 1], [1])[0].eval()
    act = torch.randn(1, 4)
    identity, value = nn.Sequential(*(nn.Identity() for _ in range(100))), torch.randn(1, 4)
    skipped = (seconds(lambda: last(act)) - seconds(lambda: few(act))) / 99
    return skipped, (seconds(lambda: identity(value)) - seconds(lambda: nn.Identity()(value)) * 0) / 100


def main() -> None:
    """Print one line for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a name")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    one, other = torch.randn(1), torch.randn(1)
    additions = 40 * seconds(lambda: one + other)
    skipped, identity = skipping()
    print(f"40 additions: {1e6 * additions:.0f} us")
    print(f"a skipped unit: {1e6 * skipped:.2f} us, nn.Identity: {1e6 * identity:.2f} us")
    for name, how in networks().items():
        if flags.only.lower() in name.lower():
            with torch.no_grad():
                uncut, stages = measure(*how)
            shown = " ".join(f"{1e6 * one:.0f}" for one in stages)
            print(
                f"{name:26} uncut {1e6 * uncut:6.0f} us, stages {shown} us, allowed {1e6 * (uncut + additions):.0f} us"
            )


if __name__ == "__main__":
    main()
