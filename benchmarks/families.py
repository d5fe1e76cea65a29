"""Train small networks of transformers and timm at K = 1, 2 and 4, all stages in one process, and print a table.

python benchmarks/families.py [NAME ...]     takes some minutes on one core
"""

import argparse

import timm
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from adl_dist import Monitoring, PartitionSpec, ProcessOptions, Trainer
from adl_dist.batch import Several
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models.from_transformers import build
from adl_dist.partition import linearise

VOCAB, LENGTH, CLASSES, NUM, EPOCHS, BATCH = 64, 16, 3, 128, 3, 16
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 32, "num_labels": CLASSES}
DECODER = {**TEXT, "num_key_value_heads": 2, "tie_word_embeddings": False}
DECODER |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OF_HF = {
    "GPT-2": (
        "causal-lm",
        hf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=32, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2,
        ),
    ),
    "Llama": ("causal-lm", hf.LlamaConfig(**DECODER)),
    "Qwen2": ("causal-lm", hf.Qwen2Config(**DECODER)),
    "Qwen3": ("causal-lm", hf.Qwen3Config(**DECODER, head_dim=8)),
    "Gemma": ("causal-lm", hf.GemmaConfig(**DECODER, head_dim=8)),
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
OF_TIMM = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "depths": (1, 1, 2, 1),
        "embed_dim": 24,
        "num_heads": (1, 2, 2, 4),
    },
    "mixer_s32_224": {"img_size": 64},
    "convnext_atto": {},
    "resnet10t": {},
    "regnetx_002": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "densenet121": {"block_config": (2, 2, 2, 2)},
}


class Data(Dataset[tuple[Tensor | dict[str, Tensor], Tensor]]):
    """Sequences that count up by a step, texts with a frequent word and padding, or images with a bright channel."""

    def __init__(self, task: str, num: int, seed: int) -> None:
        self._task, self._num, self._seed = task, num, seed

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
        return {"input_ids": ids * mask, "attention_mask": mask}, torch.tensor(label)


def main() -> None:
    """Train what the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names or [*OF_HF, *OF_TIMM]
    print("| network | units | loss before | K = 1 | K = 2 | K = 4 |\n|---|---|---|---|---|---|")
    for name in names:
        print(row(name), flush=True)


def row(name: str) -> str:
    """Return a row of the table: the network, its units, and the validation losses before and after training."""
    losses = []
    task, model = network(name)
    given = next(iter(DataLoader(Data(task, 4, 0), batch_size=4)))[0]
    whole = Several.of(given) if isinstance(given, dict) else given
    units = len(linearise(model, samples=(whole[:2], whole)).units)
    for num_stages in (1, 2, 4):
        torch.manual_seed(0)
        task, model = network(name)
        trainer = Trainer(
            model,
            loss_fn=TokenCrossEntropy() if task == "causal-lm" else nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
            method="adl",
            num_stages=num_stages,
            partition=PartitionSpec(),
            processes=ProcessOptions(threads=1),
        )
        data = Data(task, NUM, 0), Data(task, 96, 1)
        if num_stages == 1:
            losses.append(trainer.evaluate(data[1], batch_size=BATCH)["validation_loss"])
        summary = trainer.fit(
            data[0], val_dataset=data[1], epochs=EPOCHS, batch_size=BATCH, monitoring=Monitoring(quiet=True)
        )
        losses.append(summary["validation_loss"])
    return f"| {name} | {units} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |"


def network(name: str) -> tuple[str, nn.Module]:
    """Return the task and the network of that name."""
    if name in OF_HF:
        task, config = OF_HF[name]
        return task, build(config, task)
    return "image-classification", timm.create_model(name, num_classes=CLASSES, **OF_TIMM[name])


if __name__ == "__main__":
    main()
