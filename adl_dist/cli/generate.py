"""``adl-dist generate RUN_DIR prompt=TEXT``: text from a trained model, token by token, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from adl_dist.checkpoint.run_dir import chosen_checkpoint
from adl_dist.checkpoint.state import load_weights, signature, verify
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import known_run
from adl_dist.cli.config.schema import LARGEST_SEED, RunConfig
from adl_dist.cli.run_folder import named_folder, wants_averages
from adl_dist.data.vocabulary import Vocabulary
from adl_dist.errors import ConfigError
from adl_dist.report import say

# Keys, each with an example.
TAKES = {"prompt": "TEXT", "max_tokens": "200", "temperature": "1.0", "top_k": "40", "seed": "0", "checkpoint": "best"}
TAKES |= {"ema": "true"}
EXAMPLE = 'like prompt="def main"'


def generate(arguments: Sequence[str]) -> None:
    """Print the prompt and what the model makes of it."""
    run_dir, options = named_folder("generate", arguments, TAKES)
    config = known_run(run_dir)
    vocabulary = _vocabulary(config, run_dir)
    prompt = vocabulary.encode(options.get("prompt", "")).tolist()
    if not prompt:
        raise ConfigError(f"adl-dist generate needs a prompt of at least one token, {EXAMPLE}")
    max_tokens = int(_number(options, "max_tokens", 200, least=1))
    temperature = _number(options, "temperature", 1.0, least=0.0)
    top_k = int(_number(options, "top_k", vocabulary.size, least=1))
    generator = torch.Generator().manual_seed(int(_number(options, "seed", 0, least=0)))
    path, ema = chosen_checkpoint(run_dir, options.get("checkpoint")), wants_averages(options)
    model = instantiate.build_model(config)
    verify(path, signature(model))
    load_weights(path, model, ema=ema)
    model.to(instantiate.precision(config).dtype).eval()
    num_kinds = min(vocabulary.size, config.model.get("vocab_size", vocabulary.size))
    chosen = continued(
        model, prompt, context=config.data["context"], num_kinds=num_kinds, temperature=temperature, top_k=top_k,
        generator=generator,
    )  # fmt: skip
    say(vocabulary.decode([*prompt, *(token for token, _ in zip(chosen, range(max_tokens), strict=False))]))


@torch.inference_mode()
def continued(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    context: int,
    num_kinds: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield tokens behind ``prompt`` for ever, each drawn by what ``model`` makes of the ``context`` before it.

    Args:
        model: int[1, T] -> float[1, T, V], in evaluation.
        prompt: tokens to begin with.
        context: T at most.
        num_kinds: tokens to choose from, 0 to ``num_kinds`` - 1; the model may have more outputs.
        temperature: what outputs are divided by; 0: the largest is taken.
        top_k: as many of the largest outputs are drawn from.
        generator: draws.
    """
    tokens = list(prompt)
    while True:
        outputs: Tensor = model(torch.tensor([tokens[-context:]]))[0, -1, :num_kinds].double()
        if temperature == 0:
            tokens.append(int(outputs.argmax()))
        else:
            largest, places = outputs.topk(min(top_k, num_kinds))
            shares = (largest / temperature).softmax(dim=0)
            tokens.append(int(places[torch.multinomial(shares, 1, generator=generator)]))
        yield tokens[-1]


def _vocabulary(config: RunConfig, run_dir: Path) -> Vocabulary:
    if not {"train", "context"} <= config.data.keys():
        raise ConfigError(f"{run_dir} was not trained on tokens; adl-dist generate takes a run of data=tokens")
    path = Path(config.data["train"]).expanduser()
    if (vocabulary := Vocabulary.next_to(path)) is None:
        raise ConfigError(
            f"{path.parent} has no vocabulary of adl-dist tokenize, which generate needs to read and to write text"
        )
    return vocabulary


def _number(options: Mapping[str, str], key: str, default: float, *, least: float) -> float:
    """Return a whole number, or one with a point where ``default`` has one."""
    text = options.get(key)
    if text is None:
        return default
    try:
        number = type(default)(text)
    except ValueError:
        number = None
    if number is None or not least <= number <= LARGEST_SEED:
        kind = "whole number" if isinstance(default, int) else "number"
        raise ConfigError(f"{key}={text}: expected a {kind} of at least {least:g}, like {TAKES[key]}")
    return number
