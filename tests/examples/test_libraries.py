"""The examples with transformers, peft and timm log the losses of a plain loop, for any K."""

import importlib
import json
import sys
from functools import partial

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.data import Loader
from tests.support.commands import ROOT

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OWN_LOSS = lambda model, x, y: model(**x).loss  # noqa: E731
CROSS_ENTROPY = lambda model, x, y: nn.functional.cross_entropy(model(x), y)  # noqa: E731
# For each the functions that make the model and the samples, epochs, the learning rate and the loss.
EXAMPLES = {
    "hf_classifier": ("make_model", "Sequences", 3, 0.002, OWN_LOSS),
    "lora": ("make_lora", "Sequences", 1, 0.01, OWN_LOSS),
    "timm_mixup": ("make_model", "images", 2, 0.002, CROSS_ENTROPY),
}
NUM = 64
RUNS = {torch.float32: [(2, "bp"), (4, "1f1b")], torch.float64: [(1, "bp"), (2, "1f1b"), (4, "bp"), (4, "1f1b")]}


def plain_losses(one, name, dtype):
    make, data, epochs, lr, loss_of = EXAMPLES[name]
    model = getattr(one, make)().to(dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    loading, dataset = adl_dist.Loading(collate_fn=getattr(one, "mixed", None)), getattr(one, data)(NUM, 1)
    loader, losses = Loader(dataset, seed=0, shuffle=True, loading=loading), []
    for epoch in range(epochs):
        micro_batches = loader.batches(epoch, [16] * (NUM // 16))
        for group in zip(micro_batches, micro_batches, strict=True):
            optimizer.zero_grad()
            parts = [loss_of(model, *(floating(of, dtype) for of in batch)) / 2 for batch in group]
            for part in parts:
                part.backward()
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
    return losses


def floating(of, dtype):
    return of.to(dtype) if isinstance(of, torch.Tensor) and of.is_floating_point() else of


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks transformers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_logs_the_losses_of_a_plain_loop(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    one, bert = (importlib.import_module(each) for each in (name, "hf_classifier"))
    for module in {one, bert} if name != "timm_mixup" else ():
        monkeypatch.setattr(module, "make_model", partial(bert.make_model, **NO_DROPOUT))
    monkeypatch.setattr("adl_dist.training.trainer.default_threads", lambda processes: 1)
    make_data = getattr(one, EXAMPLES[name][1])
    monkeypatch.setattr(one, EXAMPLES[name][1], lambda number, seed: make_data(min(number, NUM), seed))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        expected = plain_losses(one, name, dtype)
        for K, method in RUNS[dtype]:
            run_dir, precision = tmp_path / f"{dtype}-{K}-{method}", adl_dist.Precision(dtype=dtype)
            method = adl_dist.method(method, accumulation_steps=2)
            one.main(run_dir=run_dir, num_stages=K, method=method, precision=precision)
            records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
            losses = [record["value"] for record in records if record["name"] == "train/loss"]
            assert losses == pytest.approx(expected, abs=tolerance), (dtype, K)
    sys.modules.pop(name)


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_adapter_alone_makes_the_trained_model(tmp_path, monkeypatch, capsys):
    """So nothing else was trained, and it has the names of peft."""
    import peft

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    lora = importlib.import_module("lora")
    lora.main(tmp_path / "adapter", tmp_path / "run")
    model, data = peft.PeftModel.from_pretrained(lora.make_model(), tmp_path / "adapter").eval(), lora.Sequences(64, 2)
    expected = model(input_ids=data.tokens, labels=data.labels).loss.item()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["validation_loss"] == pytest.approx(expected)
    sys.modules.pop("lora")
