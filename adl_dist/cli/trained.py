"""Commands on a checkpoint of a run: evaluate, export, generate."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adl_dist.checkpoint import layout, nested, state, tensor_files
from adl_dist.checkpoint.identity import class_name
from adl_dist.checkpoint.run_dir import chosen_checkpoint
from adl_dist.checkpoint.weight_files import SINGLE
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import content_of, is_of_script
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.folders import named_folder
from adl_dist.data.vocabulary import Vocabulary
from adl_dist.errors import AdlError, CheckpointError, ConfigError, in_one_line, place_of
from adl_dist.losses import ModelLoss
from adl_dist.models import generation
from adl_dist.models.from_transformers import read_config
from adl_dist.report import say, tell
from adl_dist.report.files import write_atomically
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.stage import in_dtype
from adl_dist.stage.metrics import PERPLEXITY

GROUPS = ("model", "data", "loss", "train.metrics")  # of the settings that these commands take
OF_TRANSFORMERS = "adl_dist.models.hf_model"  # model._target_ of a run whose weights from_pretrained can load
KEYS = {"_target_", "task", "config", "weights", "download"}  # of that node; others replace entries of config.json


def _read(
    command: str, arguments: Sequence[str], *takes: str
) -> tuple[PurePath, dict[str, str], list[str], dict[str, Any]]:
    """Return run folder, options and settings, and ``ema`` as a keyword."""
    run_dir, options, words = named_folder(command, arguments, (*takes, "checkpoint", "ema"), GROUPS)
    if (ema := options.get("ema", "false").lower()) not in ("true", "false"):
        raise ConfigError(f"ema={options['ema']}: expected true or false")
    return run_dir, options, words, {"ema": ema == "true"}


def evaluate(arguments: list[str]) -> None:
    """Run ``adl-dist evaluate``: evaluate a checkpoint in this process, uncut."""
    run_dir, options, words, ema = _read("evaluate", arguments)
    config = instantiate.run_with(run_dir, words)
    path = chosen_checkpoint(run_dir, options.get("checkpoint"))
    if is_of_script(plain := content_of(run_dir)):
        _complete(run_dir, path, plain, config, words)
    if config.runtime.device == "cuda" and not torch.cuda.is_available():
        config.runtime.device = "cpu"
        note = "has runtime.device=cuda, but torch finds no CUDA device here; computing on the CPU"
        tell(sys.stderr, f"adl-dist: {run_dir} {note}\n")
    trainer = instantiate.evaluator(config)
    trainer.load_checkpoint(path, **ema)
    _, val_data = instantiate.build_data(config.data)
    micro_batch_size = micro_batch_size_of(config.train.batch_size, config.method.micro_batches_per_update)
    how = {"num_workers": config.data.get("num_workers", 0), "loading": instantiate.loading(config, None)}
    metrics = trainer.evaluate(val_data, batch_size=micro_batch_size, **how)
    shown = [f"{n.replace('_', ' ')} {v:{'.2%' if n.endswith('accuracy') else '.4f'}}" for n, v in metrics.items()]
    say(f"{path}: {', '.join(shown)}, {len(val_data)} samples")  # type: ignore[arg-type]


def _complete(
    run_dir: PurePath, path: PurePath, plain: Mapping[str, Any], config: RunConfig, words: Sequence[str]
) -> None:
    """Add a script run's metrics; refuse to guess its data or own loss."""
    if not any(word.lstrip("+").startswith(("data=", "data._target_=")) for word in words):
        raise ConfigError(
            f"{run_dir} is the run of a script, so its data is not known here; add data._target_=MODULE.NAME, which "
            "makes (training dataset, validation dataset), or data=NAME"
        )
    saved = layout.read_manifest(path)["metrics"]
    config.train.metrics = config.train.metrics or [n for n in ("top5", PERPLEXITY) if f"validation_{n}" in saved]
    if any(word.startswith("loss") for word in words):
        return
    loss_fn, name, tensors = instantiate.build_loss(config), plain["loss"]["name"], state.loss_state(path)
    held = tensors.keys() - (loss_fn.state_dict() if isinstance(loss_fn, nn.Module) else {}).keys()
    if held or name not in (class_name(loss_fn), class_name(cross_entropy)):
        way_out = "and its arguments, or loss=cross_entropy to evaluate by torch's cross-entropy"
        if name == class_name(ModelLoss):
            way_out = "if it had num_terms, otherwise loss=model"
        raise ConfigError(
            f"{run_dir} is the run of a script whose loss was {name}{f' with {min(held)}' if held else ''}; add "
            f"loss._target_=MODULE.NAME, which makes it or is it, {way_out}"
        )
    note = (
        "is the run of a script: if its loss had arguments, like label_smoothing, give them as loss.label_smoothing=0.1"
    )
    tell(sys.stderr, f"note: {run_dir} {note}\n")


def export(arguments: list[str]) -> None:
    """Write a state_dict of the uncut model, or a folder for transformers.

    Safetensors files are copied tensor by tensor, so the model may be of any size.
    """
    run_dir, options, words, ema = _read("export", arguments, "out")
    if not options.get("out"):
        shown = shlex.quote(os.path.relpath(run_dir) if isinstance(run_dir, Path) else str(run_dir))
        raise ConfigError(f"adl-dist export needs out=, for example: adl-dist export {shown} out={SINGLE}")
    out = Path(options["out"]).absolute()
    if os.path.lexists(out):
        raise CheckpointError(f"out={out} is there already and would be written over; choose another name")
    if out.suffix.lower() in (".onnx", ".gguf", ".h5", ".npz"):
        raise ConfigError(f"out={out}: export writes a state_dict; give a name like {SINGLE} or model.pt")
    if not out.parent.is_dir():
        raise CheckpointError(f"out={out} cannot be written: there is no folder {out.parent}")
    is_known, path = not is_of_script(content_of(run_dir)), chosen_checkpoint(run_dir, options.get("checkpoint"))
    config = instantiate.run_with(run_dir, words) if is_known or words else None  # else the checkpoint says it all
    model = None if config is None else instantiate.described_model(config)
    settings = None if config is None or out.suffix else _of_transformers(config)
    if not out.suffix and settings is None:
        raise ConfigError(
            f"out={options['out']}: only the model of a run with model=hf is written as a folder; give a name like "
            f"{SINGLE} or model.pt. A folder of your own model is made by "
            f"model.load_state_dict(safetensors.torch.load_file('{SINGLE}')) and model.save_pretrained"
        )
    manifest = layout.verify(path) if model is None else state.verify(path, state.signature(model))
    found, texts = tensor_files.scan(path, tensor_files.MODEL, manifest["files"])
    extra = {name: stored for name, stored in found.items() if name.startswith(nested.ENTRY)}, texts
    if ema["ema"]:
        found = state.averaged(path, found, model)
    names = sorted(found.keys() - extra[0].keys()) if model is None else state.signature(model)
    tensors = {name: found[name] for name in names}
    try:
        with write_atomically(out) as unfinished:
            if settings is not None:
                unfinished.mkdir()
                tensor_files.copy(unfinished / SINGLE, tensors)
                settings.save_pretrained(unfinished)
            elif out.suffix == tensor_files.SUFFIX:
                tensor_files.copy(unfinished, tensors)
            else:
                read = dict(tensor_files.read(tensors))
                with unfinished.open("wb") as file:
                    torch.save({name: read[name] for name in tensors} | nested.unpacked_state(*extra), file)
    except OSError as error:
        raise CheckpointError(f"out={out} cannot be written: {error.strerror}; choose another place") from error
    loader = "safetensors.torch.load_file" if out.suffix == tensor_files.SUFFIX else "torch.load"
    how = f"model.load_state_dict({loader}('{out}')) takes them"
    if settings is not None:
        how = f"transformers' from_pretrained('{out}') loads them"
    say(f"{out}: {len(tensors)} tensors of {path}; {how}")


def _of_transformers(config: RunConfig) -> Any:
    """Return the configuration of a transformers model, or None."""
    if config.model.get("_target_") != OF_TRANSFORMERS:
        return None
    replaced = {key: value for key, value in config.model.items() if key not in KEYS}
    settings: Any = read_config(config.model["config"], options=replaced)
    if config.partition.tied == "untie":  # or the library could tie them again, and drop one of both
        settings.tie_word_embeddings = False
    return settings


def generate(arguments: Sequence[str]) -> None:
    """Print the prompt and its continuation by the model."""
    numbers = {"max_tokens": 200, "top_k": None, "temperature": 1.0, "seed": 0}
    run_dir, options, words, ema = _read("generate", arguments, "prompt", *numbers)
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
    how = {
        key: _number(options, key, vocabulary.size if default is None else default) for key, default in numbers.items()
    }
    path, model = chosen_checkpoint(run_dir, options.get("checkpoint")), instantiate.build_model(config)
    state.verify(path, state.signature(model))
    state.load_weights(path, model, **ema)
    in_dtype(model, instantiate.precision(config).dtype)
    context = config.data["context"]
    try:
        new = generation.generate(model, prompt, context=context, num_kinds=vocabulary.size, **how)
    except AdlError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model fails with {in_one_line(error)}{place_of(error)}; its input has at most data.context={context} "
            "tokens: is that more than it takes? Give data.context=LENGTH"
        ) from error
    say(vocabulary.decode([*prompt, *new]))


def _number(options: Mapping[str, str], key: str, default: float) -> Any:
    """Return option ``key`` or ``default``, as a number of its type."""
    try:
        return type(default)(options.get(key, default))
    except ValueError:
        raise ConfigError(f"{key}={options[key]}: expected a number, like {default}") from None
