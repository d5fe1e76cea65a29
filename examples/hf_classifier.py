"""A classifier of the transformers library, from a configuration: nothing is downloaded.

    pip install transformers
    python examples/hf_classifier.py

With a folder that has weights, `hf_model(FOLDER, "sequence-classification")` begins with them (docs/huggingface.md).
"""

import tempfile

import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.models import hf_model

VOCABULARY, LENGTH = 32, 12


def sequences(number: int, seed: int) -> TensorDataset:
    """Return sequences of tokens; the class is whether most of them are in the upper half of the vocabulary."""
    tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens >= VOCABULARY // 2).sum(1) > LENGTH // 2).long()
    return TensorDataset(tokens, labels)


def main() -> None:
    """Train a BERT of four layers as two stages."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = hf_model(folder, "sequence-classification")
    trainer = adl_dist.Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.002),
        method=adl_dist.method("adl", accumulation_steps=2),
        num_stages=2,
    )
    summary = trainer.fit(sequences(1024, seed=1), epochs=3, batch_size=32, val_dataset=sequences(256, seed=2))
    first = next(iter(model.state_dict()))
    print(f"accuracy {summary['validation_accuracy']:.1%}; tensors have the names of the library, like {first}")


if __name__ == "__main__":
    main()
