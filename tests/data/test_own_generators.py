"""Generators of a dataset's own are found where a sample draws from them, put back, and told."""

import random

import numpy as np
import pytest
import torch

from adl_dist.training.own_generators import drawn_from
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

DRAWS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g)),
    "numpy": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "numpy's old": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "python": (lambda: random.Random(0), lambda g: g.random()),
}


class Noisy(FixedImages):
    """Draws from the second of two generators that its transforms keep."""

    def __init__(self, make, draw):
        super().__init__(8)
        self.transforms = {"first": (make(), 0.5), "second": [make()]}
        self.draw = draw

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image * float(self.draw(self.transforms["second"][0])), label


@pytest.mark.parametrize("kind", DRAWS)
def test_a_generator_that_a_sample_draws_from_is_found(kind):
    dataset = Noisy(*DRAWS[kind])
    assert drawn_from(dataset) == ["transforms['second'][0]"]
    torch.testing.assert_close(dataset[0][0], Noisy(*DRAWS[kind])[0][0])
    assert drawn_from(FixedImages(8)) == []


class Reseeds(FixedImages):
    """Seeds its generator for each sample, and has another one that has no state."""

    def __init__(self):
        super().__init__(8)
        self.generator, self.system = torch.Generator(), random.SystemRandom()
        self.tokens = [[1] * 1000] * 1000

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image * torch.rand((), generator=self.generator.manual_seed(index)), label


def test_one_that_each_sample_seeds_is_repeatable():
    assert drawn_from(Reseeds()) == []


def test_it_is_told_where_it_matters(tmp_path, capfd):
    def told(**options):
        toy_trainer(1, 1, "bp").fit(Noisy(*DRAWS["numpy"]), epochs=1, batch_size=4, monitoring=SILENT, **options)
        return capfd.readouterr().err

    assert "generator of its own" not in told()
    found = told(run_dir=tmp_path)
    assert "generator of its own ('transforms['second'][0]'): a resume does not put it back; draw from the glo" in found
