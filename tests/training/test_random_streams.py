"""What layers draw from Python's and numpy's global streams is seeded, or ends the run; the caller's stay in place."""

import random

import numpy as np
import pytest
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.streams import Streams
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

DRAW = {"python": random.random, "numpy": np.random.rand}


class DrawsLate(nn.Module):
    """Draws from one stream, but for the first time after the trial at the start."""

    def __init__(self, stream):
        super().__init__()
        self.stream, self.calls = stream, 0

    def forward(self, x):
        self.calls += 1
        return x * DRAW[self.stream]() if self.calls > 12 else x


@pytest.mark.parametrize(("stream", "told"), [("python", "Python's"), ("numpy", "numpy's")])
def test_a_draw_that_the_trial_did_not_see_ends_the_run(stream, told):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), DrawsLate(stream), nn.Linear(6, 5))
    trainer, streams = toy_trainer(2, 1, model=model, balance=[2, 2]), Streams()
    with pytest.raises(ConfigError, match=rf"stages 0, 1: something drew from {told} global random stream"):
        trainer.fit(FixedImages(60), epochs=1, batch_size=3, monitoring=SILENT)
    assert not streams.moved()


def test_a_dataset_may_draw_from_all_streams_unseen():
    class Draws(FixedImages):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image * random.random() * np.random.normal(), label

    trainer, streams = toy_trainer(2, 2), Streams()
    trainer.fit(Draws(20), epochs=1, batch_size=4, val_dataset=Draws(6), monitoring=SILENT)
    assert not streams.moved()


def test_another_numpy_generator_is_compared_and_put_back():
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        streams = Streams()
        first = np.random.rand()
        assert streams.moved() == {"numpy"}
        streams.restore()
        assert not streams.moved()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(own)
