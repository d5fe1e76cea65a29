"""What a trained language model writes, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_tokens: int = 200,
    context: int,
    num_kinds: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Return ``max_tokens`` tokens behind ``prompt``, each drawn by what ``model`` makes of the ``context`` before it.

    Args:
        model: int[1, T] -> float[1, T, V], on the CPU; it is left in evaluation mode.
        prompt: tokens to begin with, at least one; of text, :meth:`adl_dist.data.Vocabulary.encode` makes them.
        max_tokens: how many to draw.
        context: T at most.
        num_kinds: tokens to choose from, 0 to ``num_kinds`` - 1; None: all V of the model's outputs.
        temperature: what outputs are divided by; 0: the largest is taken.
        top_k: as many of the largest outputs are drawn from; None: all.
        seed: of what is drawn.

    Returns:
        the new tokens, without the prompt; :meth:`adl_dist.data.Vocabulary.decode` makes text of them.

    Raises:
        ConfigError: an empty ``prompt``, a negative ``temperature``, or a number below 1.
    """
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ConfigError("prompt is empty; give at least one token to begin with")
    for name, number in {"max_tokens": max_tokens, "context": context, "num_kinds": num_kinds, "top_k": top_k}.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature} must be at least 0; 0 takes the likeliest token")
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        outputs: Tensor = model(torch.tensor([tokens[-context:]]))[0, -1, :num_kinds].double()
        if temperature == 0:
            tokens.append(int(outputs.argmax()))
        else:
            largest, places = outputs.topk(min(top_k or len(outputs), len(outputs)))
            shares = (largest / temperature).softmax(dim=0)
            tokens.append(int(places[torch.multinomial(shares, 1, generator=generator)]))
    return tokens[len(prompt) :]
