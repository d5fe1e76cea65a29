"""Whole runs meet the samples that (seed, epoch, index) say, in that order and with that augmentation, and no others.

Seen where the first stage gets them. What the loader alone promises is in test_data.py.
"""

import hashlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import adl_dist
from adl_dist import engine
from adl_dist.data import epoch_order
from adl_dist.seeds import stream_seed
from tests.support.tiers import slow
from tests.support.values import SILENT, values

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SEED, NUM_SAMPLES, BATCH_SIZE = 5, 22, 12  # the last update has 10: uneven micro-batches for M = 3 and 4


class Augmented(Dataset):
    """Images cropped, flipped and dimmed, with draws from all three global streams."""

    def __init__(self):
        self.images = torch.rand(NUM_SAMPLES, 3, 24, 24, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        top, left = torch.randint(9, (2,)).tolist()
        image = self.images[index, :, top : top + 16, left : left + 16] * random.random()
        return image.flip(2) if np.random.rand() < 0.5 else image, index % 2


def hashes(images):
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in images]


@pytest.fixture(scope="module")
def expected():
    """Hashes of the samples of two epochs, each drawn by itself with neither loader nor trainer."""
    dataset, images = Augmented(), []
    for epoch in range(2):
        for index in epoch_order(NUM_SAMPLES, seed=SEED, epoch=epoch, shuffle=True).tolist():
            seed = stream_seed(SEED, "sample", epoch, index)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
            images.append(dataset[index][0])
    assert len(set(hashes(images))) == 2 * NUM_SAMPLES
    return hashes(images)


def given(K, M, *, epochs=2, **options):
    """Train; return the hashes of what the first stage got, in the order in which it came."""
    conv, got, run, is_trial = nn.Conv2d(3, 4, 3, stride=3), [], engine.run, [True]

    @conv.register_forward_pre_hook
    def write(conv, args):
        found = hashes(args[0])  # in the trial, too: what a hook asks of tensors is recorded there
        if conv.training and not is_trial[0]:
            got.extend(found)

    def recorded(*args):  # the trial at the start takes the first samples without it
        is_trial[0] = False
        run(*args)

    model = nn.Sequential(
        nn.Sequential(conv),
        nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    )
    trained_by = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "threads": 1}
    trained_by["method"] = adl_dist.method("adl", accumulation_steps=M)
    trainer = adl_dist.Trainer(model, num_stages=K, seed=SEED, **values(**trained_by))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", recorded)
        trainer.fit(Augmented(), epochs=epochs, batch_size=BATCH_SIZE, monitoring=SILENT, **options)
    return got


ALONE = [(1, 1, 0), (1, 3, 0), (2, 2, 0), (2, 4, 0), (3, 1, 0), (3, 3, 0)]
BY_WORKERS = [(2, 3, 1), slow(2, 3, 4), slow(3, 4, 4), (3, 4, 2)]


@pytest.mark.parametrize(("K", "M", "num_workers"), [*ALONE, *BY_WORKERS])
def test_neither_stages_nor_sizes_nor_workers_change_a_sample(K, M, num_workers, expected):
    assert given(K, M, num_workers=num_workers) == expected


@pytest.mark.parametrize(
    ("stop", "num_workers"), [("epochs", 0), slow("epochs", 4), slow("max_updates", 0), ("max_updates", 2)]
)
def test_a_run_that_goes_on_meets_what_it_would_have_met(stop, num_workers, expected, tmp_path):
    """Stopped between two epochs, or in the middle of one."""
    before = given(3, 2, run_dir=tmp_path, **{stop: 1})
    after = given(3, 2, run_dir=tmp_path, num_workers=num_workers, resume="auto")
    assert len(before) == (NUM_SAMPLES if stop == "epochs" else BATCH_SIZE)
    assert before + after == expected
