"""What blocks of the documentation take for granted: name -> (language, text)."""

from tests.support.commands import ROOT

SMALL = "train.max_updates=2 runtime.processes=false runtime.threads=1 runtime.tensorboard=false"

TEXT = "python -c \"print('The quick brown fox jumps. ' * 2000)\""
TOKENS = f"{TEXT} > a.txt && adl-dist tokenize a.txt --out tokens"

SETUPS = {
    "some text": ("sh", f"mkdir -p text docs && {TEXT} > FILE... && cp FILE... text/a.txt && cp FILE... docs/a.md"),
    "a run": ("sh", f"adl-dist train {SMALL} run_dir=runs/NAME"),
    "two runs": ("sh", f"adl-dist train {SMALL} run_dir=runs/A && adl-dist train {SMALL} seed=1 run_dir=runs/B"),
    "a sweep and a run": (
        "sh",
        f"adl-dist train {SMALL} run_dir=runs/sweep-cifar10-resnet20/adl && adl-dist train {SMALL} run_dir=runs/mine",
    ),
    "a text model": ("sh", f"{TOKENS} && adl-dist train experiment=gpt {SMALL} train.ema=0.9 run_dir=runs/NAME"),
    "a GPT": (
        "python",
        f"""\
import sys

import torch

import adl_dist

sys.path.insert(0, "{ROOT}/examples/nanogpt")
from model import GPT

torch.manual_seed(0)
tokens = torch.randint(256, (1000,))
model, optimizer = GPT(256, 32, layers=2, heads=2, width=16), torch.optim.AdamW
""",
    ),
    "a causal model": (
        "python",
        """\
import peft
import torch
import transformers

import adl_dist

torch.manual_seed(0)
sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model, optimizer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.optim.AdamW
rows_dataset, data_collator = [], torch.utils.data.default_collate
for padded in [0, 1, 2, 3] * 8:
    ids, mask = torch.randint(32, (12,)), torch.arange(12) < 12 - padded
    rows_dataset.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask, torch.tensor(-100))})
""",
    ),
    "images": (
        "python",
        """\
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate
from torchvision.transforms import v2

import adl_dist

train_dataset = val_dataset = TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 10)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
loss_fn = nn.CrossEntropyLoss()
trainer = adl_dist.Trainer(model, loss_fn=loss_fn, optimizer=torch.optim.SGD, num_stages=2)
""",
    ),
    "old weights": (
        "python",
        """\
import torch
import torchvision

import adl_dist

torch.save(torchvision.models.resnet18().state_dict(), "old.pt")
loss_fn, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD
""",
    ),
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
