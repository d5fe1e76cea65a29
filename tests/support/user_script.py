"""A user's own script: it knows adl_dist from its README only. Run plainly, or by torchrun with two processes."""

import hashlib
import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist


def main(run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(8 * 36, 2),
    )
    labels = torch.arange(200) % 2
    images = torch.randn(200, 1, 6, 6) + labels[:, None, None, None]
    train, validation = TensorDataset(images[:150], labels[:150]), TensorDataset(images[150:], labels[150:])

    trainer = adl_dist.Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        method=adl_dist.method("adl", accumulation_steps=4),
        num_stages=2,
    )
    quiet = adl_dist.Monitoring(quiet=True, report=False)
    summary = trainer.fit(train, epochs=8, batch_size=32, val_dataset=validation, run_dir=run_dir, monitoring=quiet)
    state = trainer.full_state_dict()

    if trainer.rank == 0:
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
        told = {"accuracy": summary["validation_accuracy"], "keys": list(state), "digest": digest}
        sys.stdout.write(json.dumps(told) + "\n")
        model.load_state_dict(state, strict=True)


if __name__ == "__main__":
    main(sys.argv[1])
