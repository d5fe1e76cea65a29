"""A classifier of the transformers library, which computes its loss itself from `labels`: nothing is downloaded.

pip install transformers
python examples/hf_classifier.py
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import adl_dist

VOCABULARY, LENGTH = 32, 12


class Sequences(Dataset[Any]):
    """Sequences of tokens; the class is whether most of them are in the upper half of the vocabulary."""

    def __init__(self, number: int, seed: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.labels = ((self.tokens >= VOCABULARY // 2).sum(1) > LENGTH // 2).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        label = self.labels[index]
        return {"input_ids": self.tokens[index], "labels": label}, label  # the arguments of the model, and the target


def make_model(**changes: Any) -> nn.Module:
    """Build a BERT of four layers; use `from_pretrained(FOLDER)` for one with weights."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=LENGTH, num_labels=2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def main(run_dir: str | None = None, **settings: Any) -> None:
    """Train it, as two stages by default."""
    model = make_model()
    trainer = adl_dist.Trainer(
        model,
        loss_fn="model",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.002),
        **{"method": adl_dist.method("adl", accumulation_steps=2), "num_stages": 2, **settings},
    )
    data, validation = Sequences(1024, seed=1), Sequences(256, seed=2)
    summary = trainer.fit(data, epochs=3, batch_size=32, val_dataset=validation, run_dir=run_dir)
    first = next(iter(model.state_dict()))
    print(f"accuracy {summary['validation_accuracy']:.1%}; tensors have the names of the library, like {first}")


if __name__ == "__main__":
    main()
