"""What a run of each method measures, keeps and saves, against what its schedule predicts."""

import json
import statistics
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file

from adl_dist.schedule import METHODS, Pipeline, figures, method
from adl_dist.schedule.interleaving import downstream_first
from adl_dist.training import build
from tests.support.kill import records
from tests.support.runs import BALANCE, pick, toy_trainer, warm_up_schedule
from tests.support.tiers import grid
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

K = 4
VARIANTS = [
    *((name, {}) for name in METHODS),
    ("adl", {"weights": "recompute"}),
    ("adl", {"weights": "latest"}),
    ("adl", {"order": "backward_first", "lr_clock": "global", "lr_factors": [2.0, 1.0, 1.0, 0.5]}),
    ("gpipe", {"recompute": "except_last"}),
    ("dsp", {"activation_queue": 2}),
    ("dni", {"head_layers": 0, "head_delay": 5, "head_sees_target": True}),
    *(("adl", {"mitigation": ["predict", "spike"], "weights": w}) for w in ("stash", "latest")),
    ("adl", {"split_backward": True, "delay": "third"}),
    ("gpipe", {"split_backward": True, "recompute": "except_last"}),
]


def told(variant):
    name, options = variant
    return " ".join([name, *map(str, options.values())])


def trainer_of(name, options, M, K=K, **of_trainer):
    of_trainer = {"balance": BALANCE[K], "lr_schedule": warm_up_schedule, **of_trainer}
    return toy_trainer(K, M, name, options, model=batch_norm_net(dropout=0.2), verify=False, **of_trainer)


def records_of(run_dir, name):
    return [r for r in records(run_dir) if r["name"] == name]


class Watching:
    """Looks at what the stages hold between any two actions of a run in one process."""

    def __init__(self):
        self.contexts, self.most = {}, defaultdict(lambda: [0, 0, 0, 0])

    def __call__(self, runnable):
        for k, context in self.contexts.items():
            kept = context.stage.in_flight.values()
            graphs = sum(m.grad_edges is not None for m in kept)
            inputs = sum(m.grad_edges is None for m in kept)
            policy = context.stage._policy
            copies = [*getattr(policy, "_older", ()), *(getattr(policy, "_copies", None) or ())]
            outputs = len(context.stage.gradient_head._awaited) if context.stage.gradient_head is not None else 0
            now = graphs, inputs, len(copies), outputs
            self.most[k] = [max(pair) for pair in zip(self.most[k], now, strict=True)]
        return downstream_first(runnable)


@pytest.mark.parametrize(
    ("variant", "M"),
    grid(VARIANTS, [1, 2, 3, 4], default=[(v, 1 if i % 2 and v[0] != "2bw" else 3) for i, v in enumerate(VARIANTS)]),
    ids=lambda value: value if isinstance(value, int) else told(value),
)
def test_a_run_is_as_stale_and_holds_what_is_predicted(variant, M, tmp_path, monkeypatch):
    """Memory follows from three figures (2(K-1-k)+1 graphs and ceil(d/M) copies of the weights for ADL)."""
    (name, options), N, watching = variant, 18, Watching()
    if name == "2bw" and M < K - 1:
        pytest.skip("2bw needs M of at least the delay of stage 0")
    make = build.connect_stages
    monkeypatch.setattr(build, "connect_stages", lambda *a: watching.contexts.update(made := make(*a)) or made)
    trainer = trainer_of(name, options, M)
    with pick(watching):
        trainer.fit(FixedImages(N * 2), epochs=1, batch_size=2 * M, run_dir=tmp_path, monitoring=SILENT)
    pipeline = Pipeline(method(name, accumulation_steps=M, **options), K)
    for k, figure in enumerate(figures(pipeline)):
        groups = [r for r in records_of(tmp_path, "stage/staleness") if r["stage"] == k]
        assert [r["update"] for r in groups] == list(range(-(-N // M))), "every stage makes ceil(N / M) updates"
        measured = [value for r in groups for value in r["by_offset"]]
        assert measured == [pipeline.staleness(k, b) for b in range(N)]
        assert all(r["value"] == statistics.mean(r["by_offset"]) and r["unit"] == "updates" for r in groups)
        assert figure.stage == k
        held = [figure.graphs, figure.inputs, figure.weight_copies, figure.outputs]
        assert watching.most[k] == held, f"stage {k}"


def test_heads_are_saved_and_recorded_but_not_of_the_model(tmp_path):
    trainer = trainer_of("dgl", {}, 2)
    trainer.fit(FixedImages(16), epochs=1, batch_size=8, run_dir=tmp_path, monitoring=SILENT)
    assert trainer.full_state_dict().keys() == batch_norm_net().state_dict().keys()
    (path,) = (tmp_path / "checkpoints").glob("update-*")
    assert all(key.startswith("head0:") for key in load_file(path / "heads-00001-of-00004.safetensors"))
    assert any(key.startswith("head0:") for key in load_file(path / "optimizer-00001-of-00004.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == batch_norm_net().state_dict().keys()
    plain = trainer_of("adl", {}, 2)
    plain.load_checkpoint(path)  # of whatever method
    assert torch.equal(plain.full_state_dict()["1.conv.weight"], trainer.full_state_dict()["1.conv.weight"])
    assert {r["stage"] for r in records_of(tmp_path, "stage/local_loss")} == {0, 1, 2}
    assert {r["stage"] for r in records_of(tmp_path, "train/loss")} == {3}
