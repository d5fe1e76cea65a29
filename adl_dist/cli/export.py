"""``adl-dist export``: write a checkpoint's weights for other programs."""

import os
from pathlib import Path

import torch

from adl_dist.checkpoint import layout, nested, state, tensor_files
from adl_dist.checkpoint.run_dir import chosen_checkpoint
from adl_dist.checkpoint.state import signature
from adl_dist.checkpoint.weight_files import SINGLE
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import content_of, is_of_script
from adl_dist.cli.run_folder import OF_MODEL, named_folder, wants_averages
from adl_dist.errors import CheckpointError, ConfigError
from adl_dist.models.from_transformers import read_config
from adl_dist.report import say
from adl_dist.report.files import write_atomically

OF_TRANSFORMERS = "adl_dist.models.hf_model"  # model._target_ of a run whose weights from_pretrained can load
KEYS = {"_target_", "task", "config", "weights", "download"}  # of that node; others replace entries of config.json


def export(arguments: list[str]) -> None:
    """Write a state_dict of the uncut model, or a folder for transformers.

    A safetensors file is written tensor by tensor, from one to the other, so that the model may be of any size.
    """
    run_dir, options, words = named_folder("export", arguments, ("out", "checkpoint", "ema"), groups=OF_MODEL)
    if not options.get("out"):
        shown = os.path.relpath(run_dir) if isinstance(run_dir, Path) else run_dir
        raise ConfigError(f"adl-dist export needs out=, for example: adl-dist export {shown} out={SINGLE}")
    out = Path(options["out"]).absolute()
    if os.path.lexists(out):
        raise CheckpointError(f"out={out} is there already and would be written over; choose another name")
    if not out.parent.is_dir():
        raise CheckpointError(f"out={out} cannot be written: there is no folder {out.parent}")
    needs_model = not is_of_script(content_of(run_dir))
    path, wants_average = chosen_checkpoint(run_dir, options.get("checkpoint")), wants_averages(options)
    model, settings = None, None
    if needs_model or words:  # otherwise the checkpoint says it all
        config = instantiate.run_with(run_dir, words)
        model = instantiate.described_model(config)
        if not out.suffix and config.model.get("_target_") == OF_TRANSFORMERS:
            replaced = {key: value for key, value in config.model.items() if key not in KEYS}
            settings = read_config(config.model["config"], options=replaced)
            if config.partition.tied == "untie":  # or the library could tie them again, and drop one of both
                settings.tie_word_embeddings = False
    if not out.suffix and settings is None:
        raise ConfigError(
            f"out={options['out']}: only the model of a run with model=hf is written as a folder; give a name like "
            f"{SINGLE} or model.pt. A folder of your own model is made by "
            f"model.load_state_dict(safetensors.torch.load_file('{SINGLE}')) and model.save_pretrained"
        )
    manifest = layout.verify(path) if model is None else state.verify(path, signature(model))
    found, texts = tensor_files.scan(path, tensor_files.MODEL, manifest["files"])
    extra = {name: stored for name, stored in found.items() if name.startswith(nested.ENTRY)}, texts
    if wants_average:
        found = state.averaged(path, found, model)
    names = sorted(found.keys() - extra[0].keys()) if model is None else signature(model)
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
    if settings is not None:
        say(f"{out}: {len(tensors)} tensors of {path}; transformers' from_pretrained('{out}') loads them")
        return
    loader = "safetensors.torch.load_file" if out.suffix == tensor_files.SUFFIX else "torch.load"
    say(f"{out}: {len(tensors)} tensors of {path}; model.load_state_dict({loader}('{out}')) takes them")
