"""Train small networks of transformers and timm at K = 1, 2 and 4, and print a table of their losses.

python benchmarks/families.py [NAME ...]                all stages in one process; takes some minutes on one core
python benchmarks/families.py --processes [NAME ...]    K processes, and whether their weights are those of one process

A network that fails has the error, a line, in the place of its loss.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from adl_dist import Monitoring, ProcessOptions, Trainer
from adl_dist.batch import rows_of
from adl_dist.errors import AdlError
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models.from_transformers import build
from adl_dist.partition import Chain

sys.path.append(str(Path(__file__).parents[1]))
from tests.partition.zoo import TIMM

VOCAB, LENGTH, CLASSES, BATCH = 64, 16, 3, 16
NUM, NUM_VALIDATION, EPOCHS, STAGES = 128, 96, 3, (1, 2, 4)
RATE = 3e-3
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 32, "num_labels": CLASSES}
DECODER = {**TEXT, "num_key_value_heads": 2, "tie_word_embeddings": False}
DECODER |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
OF_HF = {
    "GPT-2": ("causal-lm", hf.GPT2Config(**GPT2, tie_word_embeddings=False)),
    "GPT-2, tied": ("causal-lm", hf.GPT2Config(**GPT2)),
    "Llama": ("causal-lm", hf.LlamaConfig(**DECODER)),
    "Qwen2": ("causal-lm", hf.Qwen2Config(**DECODER)),
    "Qwen3": ("causal-lm", hf.Qwen3Config(**DECODER, head_dim=8)),
    "Gemma": ("causal-lm", hf.GemmaConfig(**DECODER, head_dim=8)),
    "Gemma, tied": ("causal-lm", hf.GemmaConfig(**DECODER | {"tie_word_embeddings": True}, head_dim=8)),
    "BERT": ("sequence-classification", hf.BertConfig(**TEXT)),
    "DistilBERT": (
        "sequence-classification",
        hf.DistilBertConfig(
            vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=4, n_heads=4, max_position_embeddings=32,
            num_labels=CLASSES,
        ),
    ),
    "ViT": (
        "image-classification",
        hf.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, image_size=64,
            patch_size=16, num_labels=CLASSES,
        ),
    ),
    "Swin": (
        "image-classification",
        hf.SwinConfig(
            image_size=64, patch_size=4, embed_dim=16, depths=[1, 1, 2], num_heads=[2, 2, 4], window_size=4,
            num_labels=CLASSES,
        ),
    ),
    "ConvNeXt": (
        "image-classification",
        hf.ConvNextConfig(
            image_size=64, patch_size=4, hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 2, 1], num_labels=CLASSES
        ),
    ),
}  # fmt: skip
OF_TIMM = {name: TIMM[name] for name in [*TIMM][:12] if name != "mobilenetv3_small_050"}


class Data(Dataset[tuple[Tensor | dict[str, Tensor], Tensor]]):
    """Sequences that count up by a step, texts with a frequent word and padding, or images with a bright channel."""

    def __init__(self, name: str, num: int, seed: int) -> None:
        self._task, self._num, self._seed = task_of(name), num, seed
        self._has_types = name == "BERT"

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        draws, label = torch.Generator().manual_seed(self._seed * 100_000 + index), index % CLASSES
        if self._task == "image-classification":
            image = torch.randn(3, 64, 64, generator=draws)
            image[label] += 0.5
            return image, torch.tensor(label)
        if self._task == "causal-lm":
            start, step = (int(torch.randint(low, high, (), generator=draws)) for low, high in ((0, 61), (1, 4)))
            ids = (torch.arange(LENGTH + 1) * step + start) % 61 + 3
            return ids[:-1], ids[1:]
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=draws))
        ids, mask = torch.randint(3, VOCAB, (LENGTH,), generator=draws), (torch.arange(LENGTH) < length).long()
        ids[:length:3] = 10 + label
        given = {"input_ids": ids * mask, "attention_mask": mask}
        if self._has_types:
            given["token_type_ids"] = (torch.arange(LENGTH) >= length // 2).long() * mask
        return given, torch.tensor(label)


def main() -> None:
    """Train what the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", action="store_true", help="a process for each stage, compared with one process")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)  # this is one of so many processes
    options = parser.parse_args()
    names = options.names or [*OF_HF, *OF_TIMM]
    if options.rank_of:
        train_as_rank(names, options.rank_of)
        return
    by_processes = {K: train_in_processes(names, K) if options.processes else {} for K in STAGES}
    print("| network | units | loss before | K = 1 | K = 2 | K = 4 |" + " K processes |" * options.processes)
    print("|---|---|---|---|---|---|" + "---|" * options.processes)
    for name in names:
        try:
            print(row(name, {K: found.get(name) for K, found in by_processes.items()}), flush=True)
        except AdlError as error:
            print(f"| {name} | {' '.join(str(error).split())} |", flush=True)


def train_in_processes(names: list[str], num_stages: int) -> dict[str, Any]:
    """Return what :func:`trained` does for each network, from ``num_stages`` processes; text: why it has failed."""
    found: dict[str, Any] = {}
    while left := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            rank = [__file__, "--rank-of", str(num_stages), *left]
            environment = {**os.environ, "FOUND": str(path), "TORCH_CPP_LOG_LEVEL": "FATAL"}
            run = subprocess.run(
                [*torchrun, str(num_stages), *rank], env=environment, capture_output=True, text=True, check=False
            )
            lines = path.read_text().splitlines() if path.exists() else []
        new = dict(json.loads(line) for line in lines)
        found |= new
        has_told = any(isinstance(one, str) for one in new.values())
        if run.returncode and not has_told and (left := [name for name in left if name not in found]):
            print(run.stderr, file=sys.stderr)
            found[left[0]] = f"exit code {run.returncode}, see above"
    return found


def train_as_rank(names: list[str], num_stages: int) -> None:
    """Train each network as one process of ``num_stages``; rank 0 writes what comes of it into the file FOUND."""
    for name in names:
        try:
            found: Any = trained(name, num_stages)
        except AdlError as error:
            found = " ".join(str(error).split())
        if os.environ["RANK"] == "0":
            with open(os.environ["FOUND"], "a") as file:
                file.write(json.dumps([name, found]) + "\n")
        if isinstance(found, str):
            sys.exit(1)  # the processes have left each other; what is left is for others


def row(name: str, by_processes: dict[int, Any]) -> str:
    """Return a row of the table: the network, its units, and the validation losses before and after training."""
    given = next(iter(DataLoader(Data(name, 4, 0), batch_size=4)))[0]
    units = len(Chain(network(name), (rows_of(given, slice(2)), given)).units)
    before = trainer_of(name, 1).evaluate(Data(name, NUM_VALIDATION, 1), batch_size=BATCH)["validation_loss"]
    cells, equal = [f"{name}", f"{units}", f"{before:.3f}"], True
    for num_stages, found in by_processes.items():
        alone = trained(name, num_stages)
        cells.append(found if isinstance(found, str) else f"{alone[0]:.3f}")
        equal &= found == alone
    if any(by_processes.values()):
        cells.append("same bits" if equal else "other bits")
    return f"| {' | '.join(cells)} |"


def trained(name: str, num_stages: int) -> list[Any]:
    """Train a network; return its validation loss and a hash of its weights."""
    trainer = trainer_of(name, num_stages)
    summary = trainer.fit(
        Data(name, NUM, 0), val_dataset=Data(name, NUM_VALIDATION, 1), epochs=EPOCHS, batch_size=BATCH,
        monitoring=Monitoring(quiet=True),
    )  # fmt: skip
    digest = hashlib.sha256()
    for tensor in trainer.full_state_dict().values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [summary["validation_loss"], digest.hexdigest()]


def trainer_of(name: str, num_stages: int) -> Trainer:
    """Return what trains a network, newly built."""
    torch.manual_seed(0)
    return Trainer(
        network(name),
        loss_fn=TokenCrossEntropy() if task_of(name) == "causal-lm" else nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=RATE),
        method="adl",
        num_stages=num_stages,
        processes=ProcessOptions(threads=1),
    )


def task_of(name: str) -> str:
    """Return the task of the network of that name."""
    return OF_HF[name][0] if name in OF_HF else "image-classification"


def network(name: str) -> nn.Module:
    """Return the network of that name, newly built."""
    if name in OF_HF:
        return build(OF_HF[name][1], task_of(name))
    return timm.create_model(name, num_classes=CLASSES, **OF_TIMM[name])


if __name__ == "__main__":
    main()
