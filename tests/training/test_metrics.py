"""Metrics by name and by callable, of training and of validation, as sums and counts over all micro-batches."""

import json
import math

import pytest
import torch
from torch import nn

from adl_dist import EpochMetric, Loading
from adl_dist.errors import ConfigError
from tests.support.runs import toy_trainer
from tests.support.sentences import IGNORED, Sentences, encoder, padded
from tests.support.toys import FixedImages
from tests.support.values import QUIET, SILENT
from tests.training.test_structured_batches import batches


def entropy(out, target):
    """The mean entropy of the scores for words that count."""
    counts = target != IGNORED
    of_words = -(out.softmax(1) * out.log_softmax(1)).sum(1)
    return of_words[counts].sum(), counts.sum()


NAMES = ["accuracy", "top5", "perplexity", entropy]


def trained(K, M, metrics, *, run_dir=None, **options):
    more = {"dtype": torch.float64, "balance": "even", "metrics": metrics, **options}
    trainer = toy_trainer(K, M, "bp" if K == 1 else "gpipe", model=encoder(), loss_fn=nn.CrossEntropyLoss(), **more)
    how = {"loading": Loading(collate_fn=padded), "val_dataset": Sentences(10, 100), "run_dir": run_dir}
    summary = trainer.fit(Sentences(), epochs=1, batch_size=20, shuffle=False, monitoring=SILENT, **how)
    return trainer.full_state_dict(), summary


def by_torch(state):
    model = encoder().double().eval()
    model.load_state_dict(state)
    ((ids, mask), target) = batches(Sentences(10, 100), padded, 10)[0]
    with torch.no_grad():
        out, counts = model(ids, mask), target != IGNORED
    found = (out.topk(5, dim=1).indices == target[:, None]).any(1)
    return {
        "validation_accuracy": (out.argmax(1) == target)[counts].double().mean().item(),
        "validation_top5": found[counts].double().mean().item(),
        "validation_perplexity": math.exp(nn.functional.cross_entropy(out, target).item()),
        "validation_entropy": (entropy(out, target)[0] / counts.sum()).item(),
    }


@pytest.mark.parametrize(("K", "M"), [(1, 1), (3, 4)])
def test_metrics_of_validation_are_those_of_all_samples_at_once(K, M):
    state, summary = trained(K, M, NAMES)
    for name, value in by_torch(state).items():
        assert summary[name] == pytest.approx(value, rel=1e-12), name


def test_an_epoch_metric_gets_sentences_of_all_lengths():
    @EpochMetric
    def right(out, target):
        return (out.argmax(1) == target)[target != IGNORED].double().mean()

    state, summary = trained(3, 4, [right])
    assert summary["validation_right"] == pytest.approx(by_torch(state)["validation_accuracy"], rel=1e-12)
    with pytest.raises(ConfigError, match=r"__getitem__ fails: TypeError: .* \(outputs, targets\) of the whole"):
        trained(1, 1, [EpochMetric({}.__getitem__)])


@pytest.mark.parametrize("of", [0, 1], ids=["output", "target"])
def test_a_metric_that_writes_to_its_arguments_is_refused(of):
    def masked(*given):
        given[of][:, 0] = 0
        return 0, 1

    with pytest.raises(ConfigError, match="metrics: masked writes to the output or the target; let it compute with a"):
        trained(2, 4, [masked])


class Inferred(nn.Sequential):
    def forward(self, x):
        with torch.inference_mode(not self.training):
            return super().forward(x)


def test_metrics_take_outputs_of_inference_mode():
    trainer = toy_trainer(2, model=Inferred(nn.Flatten(), nn.Linear(72, 10)), balance="even", metrics=["top5"])
    data = {"train_dataset": FixedImages(4), "val_dataset": FixedImages(4)}
    assert "validation_top5" in trainer.fit(**data, epochs=1, batch_size=4, monitoring=SILENT)


def test_metrics_of_training_are_recorded_for_each_update(tmp_path):
    _, summary = trained(2, 4, NAMES, run_dir=tmp_path)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = {line["name"]: line["value"] for line in lines}
    model = encoder().double()
    ((ids, mask), target) = batches(Sentences(), padded, 20)[0]
    out = model(ids, mask)
    assert found["train/perplexity"] == pytest.approx(math.exp(nn.functional.cross_entropy(out, target).item()))
    assert found["train/entropy"] == pytest.approx((entropy(out, target)[0] / (target != IGNORED).sum()).item())
    assert found["validation/top5"] == summary["validation_top5"]
    assert found["train/tokens_per_second"] > 0
    assert summary["num_tokens"] == (target != IGNORED).sum()


class Last(nn.Module):
    """Scores [B, T, words], as most users have them."""

    def __init__(self):
        super().__init__()
        self.inner = encoder()

    def forward(self, ids, mask):
        return self.inner(ids, mask).transpose(1, 2)


def last_loss(out, target):
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


last_loss.num_terms = lambda target: (target != IGNORED).sum()


def test_accuracy_by_name_finds_classes_in_the_last_dimension():
    trainer = toy_trainer(1, 2, "bp", model=Last(), loss_fn=last_loss, metrics=["accuracy"], dtype=torch.float64)
    how = {"loading": Loading(collate_fn=padded), "val_dataset": Sentences(10, 100), "monitoring": QUIET}
    summary = trainer.fit(Sentences(), epochs=1, batch_size=20, shuffle=False, **how)
    state = {name.removeprefix("inner."): tensor for name, tensor in trainer.full_state_dict().items()}
    assert summary["validation_accuracy"] == pytest.approx(by_torch(state)["validation_accuracy"])


@pytest.mark.parametrize(("one", "name"), [("top5", "top5"), (entropy, "entropy")])
def test_one_name_is_a_list_of_one_metric(one, name):
    summary = toy_trainer(1, 1, metrics=one).fit(
        FixedImages(8), val_dataset=FixedImages(8), epochs=1, batch_size=8, monitoring=SILENT
    )
    assert f"validation_{name}" in summary
