"""``adl-dist generate RUN_DIR prompt=TEXT``: text from a trained model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adl_dist.checkpoint.run_dir import chosen_checkpoint
from adl_dist.checkpoint.state import load_weights, signature, verify
from adl_dist.cli.config import instantiate
from adl_dist.cli.run_folder import OF_MODEL, named_folder, wants_averages
from adl_dist.data.vocabulary import Vocabulary
from adl_dist.errors import ConfigError
from adl_dist.models import generation
from adl_dist.report import say
from adl_dist.stage import in_dtype

TAKES = ("prompt", "max_tokens", "temperature", "top_k", "seed", "checkpoint", "ema")


def generate(arguments: Sequence[str]) -> None:
    """Print the prompt and its continuation by the model."""
    run_dir, options, words = named_folder("generate", arguments, TAKES, groups=OF_MODEL)
    config = instantiate.run_with(run_dir, words)
    if not {"train", "context"} <= config.data.keys():
        raise ConfigError(
            f"{run_dir} was not trained on data=tokens, as far as is known; if it is the run of a script that was, add "
            "data=tokens data.train=FILE data.validation=FILE data.context=LENGTH"
        )
    tokens = Path(config.data["train"]).expanduser()
    if (vocabulary := Vocabulary.next_to(tokens)) is None:
        raise ConfigError(
            f"{tokens.parent} has no vocabulary of adl-dist tokenize, which generate needs to read and to write text"
        )
    prompt = vocabulary.encode(options.get("prompt", "")).tolist()
    max_tokens, top_k = int(_number(options, "max_tokens", 200)), int(_number(options, "top_k", vocabulary.size))
    temperature, seed = _number(options, "temperature", 1.0), int(_number(options, "seed", 0))
    path, ema = chosen_checkpoint(run_dir, options.get("checkpoint")), wants_averages(options)
    model = instantiate.build_model(config)
    verify(path, signature(model))
    load_weights(path, model, ema=ema)
    in_dtype(model, instantiate.precision(config).dtype)
    new = generation.generate(
        model, prompt, max_tokens=max_tokens, context=config.data["context"], num_kinds=vocabulary.size,
        temperature=temperature, top_k=top_k, seed=seed,
    )  # fmt: skip
    say(vocabulary.decode([*prompt, *new]))


def _number(options: Mapping[str, str], key: str, default: float) -> float:
    """Return a whole number, or one with a point where ``default`` has one."""
    try:
        return type(default)(options.get(key, default))
    except ValueError:
        raise ConfigError(f"{key}={options[key]}: expected a number, like {default}") from None
