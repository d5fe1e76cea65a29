"""Text sampled from a trained language model."""

from collections.abc import Sequence

import torch
from torch import nn

from adl_dist.batch import logits_of
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
    """Sample ``max_tokens`` tokens after ``prompt``.

    Args:
        model: a network int[1, T] -> float[1, T, V], or -> an output that begins with this tensor, on the CPU; it is
            left in evaluation mode.
        prompt: at least one token; :meth:`adl_dist.data.Vocabulary.encode` converts text.
        max_tokens: number of new tokens.
        context: the largest T.
        num_kinds: sample from tokens 0 to ``num_kinds`` - 1; by default from all V.
        temperature: divisor of the outputs; 0 for the largest output.
        top_k: sample from the ``top_k`` largest outputs; by default from all.
        seed: the seed of the random samples.

    Returns:
        The new tokens; :meth:`adl_dist.data.Vocabulary.decode` converts them to text.

    Raises:
        ConfigError: If ``prompt`` is empty, ``temperature`` is negative, or a number is below 1.
    """
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ConfigError('prompt is empty; give at least one token to begin with, like prompt="def main"')
    for name, number in {"max_tokens": max_tokens, "context": context, "num_kinds": num_kinds, "top_k": top_k}.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature} must be at least 0; 0 takes the likeliest token")
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        logits = logits_of(model(torch.tensor([tokens[-context:]])))
        assert logits is not None, "the model returns no tensor"
        outputs = logits[0, -1, :num_kinds].double()
        if temperature == 0:
            tokens.append(int(outputs.argmax()))
        else:
            largest, places = outputs.topk(min(top_k or len(outputs), len(outputs)))
            shares = (largest / temperature).softmax(dim=0)
            tokens.append(int(places[torch.multinomial(shares, 1, generator=generator)]))
    return tokens[len(prompt) :]
