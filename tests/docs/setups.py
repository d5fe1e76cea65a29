"""What blocks of the documentation take for granted: name -> (language, text)."""

SMALL = "train.max_updates=2 runtime.processes=false runtime.threads=1 runtime.tensorboard=false"

TEXT = "python -c \"print('The quick brown fox jumps. ' * 2000)\""
TOKENS = f"{TEXT} > a.txt && adl-dist tokenize a.txt --out tokens"

SETUPS = {
    "some text": ("sh", f"mkdir -p text docs && {TEXT} > FILE... && cp FILE... text/a.txt && cp FILE... docs/a.md"),
    "tokens": ("sh", TOKENS),
    "a run": ("sh", f"adl-dist train {SMALL} run_dir=runs/NAME"),
    "two runs": ("sh", f"adl-dist train {SMALL} run_dir=runs/A && adl-dist train {SMALL} seed=1 run_dir=runs/B"),
    "a sweep and a run": (
        "sh",
        f"adl-dist train {SMALL} run_dir=runs/sweep-cifar10-resnet20/adl && adl-dist train {SMALL} run_dir=runs/mine",
    ),
    "a text model": ("sh", f"{TOKENS} && adl-dist train experiment=gpt {SMALL} train.ema=0.9 run_dir=runs/NAME"),
    "a callback": (
        "python",
        """\
# mine.py
import adl_dist


class Watch(adl_dist.Callback):
    def on_epoch(self, now):
        print(now.epoch, now.metrics["validation_loss"])
""",
    ),
    "model and data": (
        "python",
        """\
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist
import adl_dist.models

torch.manual_seed(0)
x = torch.randn(64, 4)
train_dataset = val_dataset = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential()
model.add_module("embed", nn.Linear(4, 8))
for width in (8, 8, 2):
    model.append(nn.Linear(8, width))
loss_fn = nn.CrossEntropyLoss()
""",
    ),
    "a trainer": (
        "python",
        """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist

torch.manual_seed(0)
x = torch.randn(256, 4)
train_dataset = val_dataset = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
trainer = adl_dist.Trainer(
    model, loss_fn=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), num_stages=2
)
""",
    ),
}
