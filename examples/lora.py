"""LoRA by the library peft on the classifier of `hf_classifier.py`: a PeftModel is taken as it is.

    pip install transformers peft
    python examples/lora.py [FOLDER]

FOLDER gets the adapter, as PeftModel.from_pretrained reads it.
"""

import sys
from typing import Any

import peft
import torch
from hf_classifier import Sequences, make_model
from torch import nn

import adl_dist


def make_lora() -> nn.Module:
    """Freeze the classifier but its head, and add matrices of rank 4 to queries and values."""
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    return peft.get_peft_model(make_model(), config)  # type: ignore[no-any-return]


def main(adapter: str | None = None, run_dir: str | None = None, **settings: Any) -> None:
    """Train the matrices and the head, as two stages by default, and save them."""
    model = make_lora()
    trainer = adl_dist.Trainer(
        model,
        loss_fn="model",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        **{"method": adl_dist.method("adl", accumulation_steps=2), "num_stages": 2, **settings},
    )
    data, validation = Sequences(256, seed=1), Sequences(64, seed=2)
    summary = trainer.fit(data, epochs=1, batch_size=32, val_dataset=validation, run_dir=run_dir)
    state = trainer.full_state_dict()  # by the names of the PeftModel
    if trainer.rank == 0:
        model.load_state_dict(state)  # in K processes each rank has the weights of its stage
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"accuracy {summary['validation_accuracy']:.1%}; {trained:,} parameters were trained")
        if adapter is not None:
            model.save_pretrained(adapter)


if __name__ == "__main__":
    main(*sys.argv[1:2])
