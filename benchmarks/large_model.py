"""The most memory that each process of a model on meta holds, at the start and after the first update.

torchrun --standalone --nproc-per-node 4 benchmarks/large_model.py

With --folder the Llama of transformers, from the files in it: python benchmarks/large_model.py --folder FOLDER --save
makes them, and the command above with --folder FOLDER reads them.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import hf_model, llama


def most() -> float:
    """Return the most MiB that this process has had in memory, as Linux counts: libraries and their files included."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def save(options: argparse.Namespace, transformers: Any) -> None:
    """Write a Llama of the same sizes as ours, newly drawn, into several files."""
    hidden = -(-8 * options.width // 3 // 64) * 64
    settings = transformers.LlamaConfig(
        vocab_size=options.vocab, hidden_size=options.width, intermediate_size=hidden, num_attention_heads=16,
        num_hidden_layers=options.layers, max_position_embeddings=options.context, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(settings).save_pretrained(options.folder, max_shard_size="200MB")


def main() -> None:
    """Train for one update, and print what each process has held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--whole", action="store_true", help="build the model with its weights, on every rank")
    parser.add_argument("--folder", help="of a network of transformers")
    parser.add_argument("--save", action="store_true", help="make the folder, and do nothing else")
    options = parser.parse_args()
    if options.folder:
        import transformers

        if options.save:
            save(options, transformers)
            return
        transformers.LlamaForCausalLM  # noqa: B018  which imports it
    figures = {"imports": most()}
    torch.manual_seed(0)
    with torch.device("cpu" if options.whole else "meta"):
        if options.folder:
            model = hf_model(options.folder, "causal-lm")
        else:
            model = llama(options.vocab, options.context, layers=options.layers, heads=16, width=options.width)
    share: list[float] = []

    def optimizer(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # It is made when the stage has its weights, and nothing else yet.
        parameters = list(given)
        share.append(sum(p.nbytes for p in parameters) / 2**20)
        figures["start"] = most()
        return torch.optim.SGD(parameters, lr=0.01)

    ids = torch.randint(options.vocab, (4, options.context))
    trainer = adl_dist.Trainer(
        model,
        loss_fn=TokenCrossEntropy(),
        optimizer=optimizer,
        method=adl_dist.method("adl", accumulation_steps=2),
        num_stages=int(os.environ["WORLD_SIZE"]),
    )
    trainer.fit(TensorDataset(ids, ids), epochs=1, batch_size=2, max_updates=1)
    figures["update"] = most()
    above = figures["start"] - figures["imports"] - share[-1]
    print(
        f"rank {os.environ['RANK']}: weights of its stage {share[-1]:.0f} MiB of "
        f"{sum(p.nbytes for p in model.parameters()) / 2**20:.0f}; most after imports {figures['imports']:.0f}, before "
        f"the first update {figures['start']:.0f} ({above:.0f} above both together), after it {figures['update']:.0f}"
    )


if __name__ == "__main__":
    main()
