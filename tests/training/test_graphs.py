"""Stages as CUDA graphs, with a stand-in on the CPU: the values of the stages without graphs, to the bit."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import ConfigError, DataError, DivergedError
from adl_dist.schedule.slots import Slots, slots_of
from adl_dist.stage import Precision, graphed, graphs, ticks
from adl_dist.stage.static_weights import StaticWeights
from adl_dist.stage.traits import StageTraits
from adl_dist.training import build
from tests.support.commands import assert_same
from tests.support.graphs import StandIn, use_stand_in
from tests.support.ranks import run_ranks
from tests.support.runs import NUM_SAMPLES, nan_inputs, toy_trainer, train
from tests.support.tiers import slow
from tests.support.toys import NUM_CLASSES, UNET_BALANCE, FixedImages, batch_norm_net, tuple_net, unet
from tests.support.values import QUIET, spec_of

METHODS = ("adl", "fdg", "ddg", "bp", "gpipe", "1f1b", "pipedream", "2bw", "paci")
MICRO_BATCHES = 11  # of an epoch, the last one smaller


@pytest.fixture
def recorders(monkeypatch):
    return use_stand_in(monkeypatch)


def run(K, M, method="adl", *, dtype=torch.float32, **options):
    """Train; the values, evaluation between epochs among them."""
    state, summary = train(K, M, dtype, **{"method": method, "epochs": 2, **options})
    return state | {name: torch.tensor(summary[name]) for name in ("validation_loss", "train_loss") if name in summary}


def assert_graphs_change_nothing(K, M, method="adl", **options):
    assert_same(run(K, M, method, cuda_graphs=True, **options), run(K, M, method, **options))


# 2BW needs M of at least the first stage's delay.
ALL = [(name, K, M) for name in METHODS for K in (1, 2, 3, 4) for M in (1, 2, 3, 4) if name != "2bw" or M >= K - 1]
SOME = [("adl", 1, 3), ("adl", 3, 2), ("ddg", 3, 2), ("2bw", 3, 4), ("paci", 3, 2)]


@pytest.mark.parametrize(("method", "K", "M"), [case if case in SOME else slow(*case) for case in ALL])
def test_graphs_change_no_bit_of_any_method(method, K, M, recorders):
    assert_graphs_change_nothing(K, M, method, dropout=0.3)
    (recorder,) = recorders
    # Forwards and backwards of all stages in two epochs, but for the smaller last ones and some while it fills.
    fill = 0 if method in ("bp", "gpipe", "1f1b", "paci") else max(2 * (K - 1), M)
    assert recorder.num_replayed >= K * 2 * 2 * (MICRO_BATCHES - 1 - fill)


def ignoring():
    return nn.CrossEntropyLoss(ignore_index=1, weight=torch.linspace(0.5, 2.0, NUM_CLASSES))


OPTIONS = {
    "adamw": {
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.01),
        "clip_norm": 0.3,
        "shuffle": True,
        "ema": 0.9,
    },
    "skipped": {"clip_norm": 0.3, "non_finite": "skip", "plant": nan_inputs, "metrics": ["top5"]},
    "mitigated": {"options": {"mitigation": ["discount", "spike", "delay_compensation"]}},
    "flushed first": {"options": {"flush_epochs": 1, "order": "backward_first", "gradient_shrink": 0.9}},
    "lowered": {"autocast": torch.bfloat16, "codec": "int8", "channels_last": True},
    "several tensors": {"model": unet, "balance": UNET_BALANCE[3]},
    "fused": {"optimizer": functools.partial(torch.optim.AdamW, lr=0.01, fused=True)},
    "feedback": {"options": {"mitigation": ["error_feedback"]}},
    "latest": {"options": {"weights": "latest"}},
    "tuples": {"model": tuple_net, "balance": [1, 2, 1]},
}
SLOW = ("flushed first", "fused", "feedback", "latest", "tuples")


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in OPTIONS])
def test_graphs_change_no_bit_of_any_option(name, recorders):
    assert_graphs_change_nothing(3, 2, **OPTIONS[name])
    assert recorders[0].num_replayed > 50


def losses(K, **options):
    loss_fn = options.pop("loss_fn")
    trainer = toy_trainer(K, 2, loss_fn=loss_fn(), **options)
    trainer.fit(FixedImages(NUM_SAMPLES), epochs=2, batch_size=6, monitoring=QUIET)
    return trainer.full_state_dict()


def test_graphs_change_no_bit_where_a_loss_counts_terms(recorders):
    assert_same(losses(3, loss_fn=ignoring, cuda_graphs=True), losses(3, loss_fn=ignoring))


def test_a_resumed_run_with_graphs_is_one_without(recorders, tmp_path):
    options = {"dropout": 0.3, "run_dir": tmp_path / "run"}
    run(3, 2, epochs=1, cuda_graphs=True, **options)
    assert_same(run(3, 2, epochs=2, cuda_graphs=True, **options), run(3, 2, epochs=2, dropout=0.3))


@pytest.mark.parametrize("setting", [slow(True), "tick"])
def test_stages_that_were_warmed_up_are_recorded_alike(setting, recorders, monkeypatch):
    expected = run(2, 2, epochs=1)
    monkeypatch.setattr(build, "needs_warm_up", lambda spec, device: True)
    assert_same(run(2, 2, epochs=1, cuda_graphs=setting), expected)


def train_a_rank(options):
    with pytest.MonkeyPatch.context() as patched:
        use_stand_in(patched)
        return run(2, 2, **options)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_processes_with_graphs_are_one_without():
    expected = run(2, 2, dropout=0.3)
    for state in run_ranks(2, train_a_rank, {"dropout": 0.3, "cuda_graphs": True}, timeout_seconds=60):
        assert_same(state, expected)


# --- All stages in one graph: the stand-in does its branches in any order ---------------------------------------

TICKED = [("adl", 2, 1), ("adl", 3, 2)]
ALL_TICKED = [(name, K, M) for name in ("adl", "fdg") for K in (2, 3, 4) for M in (1, 2, 3, 4)]
LONG = {"num_samples": 65}  # 22 micro-batches


@pytest.mark.parametrize(("method", "K", "M"), [case if case in TICKED else slow(*case) for case in ALL_TICKED])
def test_a_graph_of_all_stages_changes_no_bit(method, K, M, recorders):
    assert_same(run(K, M, method, cuda_graphs="tick", **LONG), run(K, M, method, **LONG))
    # Two graphs for each tick of two epochs, but for those in which some stages only begin, or have come to their end.
    least = 2 * 2 * (21 - 2 * 2 * (K - 1) - M)
    assert recorders[0].num_replayed >= least > 0 or K == 4


TICKED_OPTIONS = {
    "adamw": {**OPTIONS["adamw"], "metrics": ["top5"], "codec": "int8"},
    "mitigated": {"options": {"mitigation": ["spike", "delay_compensation"], "flush_epochs": 1}},
    "several tensors": OPTIONS["several tensors"],
    "lowered": OPTIONS["lowered"],
}


@pytest.mark.parametrize("name", [name if name == "adamw" else slow(name) for name in TICKED_OPTIONS])
def test_a_graph_of_all_stages_changes_no_bit_of_any_option(name, recorders):
    options = {**LONG, **TICKED_OPTIONS[name]}
    assert_same(run(3, 2, cuda_graphs="tick", **options), run(3, 2, **options))
    assert recorders[0].num_replayed > 10


@pytest.mark.parametrize("num_samples", [3, 9, 14])
def test_epochs_shorter_than_a_delay_change_no_bit(num_samples, recorders):
    options = {"num_samples": num_samples, "options": {"flush_epochs": 1}}
    assert_same(run(3, 1, cuda_graphs="tick", **options), run(3, 1, **options))


def grey_images(model, data):
    """Give the images of micro-batch 12 one channel; the others have two."""
    data.images = [*data.images]
    for place in range(36, 39):
        data.images[place] = data.images[place][:1]


def test_a_tick_refuses_samples_of_another_form(recorders):
    """Copied to the place of the others they would be widened without a word."""
    with pytest.raises(DataError, match=r"stage 0: micro-batch 12 has tensors \[\[3, 1, .*were recorded"):
        run(2, 2, cuda_graphs="tick", plant=grey_images, **LONG)


@pytest.mark.slow
def test_a_resumed_run_with_a_graph_of_all_stages_is_one_without(recorders, tmp_path):
    options = {**LONG, "run_dir": tmp_path / "run"}
    run(3, 2, epochs=1, cuda_graphs="tick", **options)
    assert_same(run(3, 2, epochs=2, cuda_graphs="tick", **options), run(3, 2, epochs=2, **LONG))


def test_the_stand_in_shows_a_tick_with_too_few_slots(recorders, monkeypatch):
    def planned(pipeline, stage, **options):
        return Slots(2, 4, (0, 0, 1, 1))  # instead of 3 and 6

    monkeypatch.setattr(ticks, "slots_of", planned)
    monkeypatch.setattr(ticks.TickedStage, "can_replay", lambda self, b, size: size == self.slots[0].size)
    with pytest.raises((AssertionError, DivergedError, RuntimeError)):
        assert_same(run(3, 2, cuda_graphs="tick", **LONG), run(3, 2, **LONG))


TICK_REFUSED = [
    (2, {"dropout": 0.3}, "stage 1: it draws random numbers"),
    (1, {}, "needs several stages"),
    (3, {"method": "ddg"}, "with method=ddg RO0 has no place in a tick"),
    (3, {"method": "pipedream"}, "with method=pipedream "),
    (3, {"non_finite": "skip"}, "train.non_finite=skip"),
]


@pytest.mark.parametrize(("K", "options", "message"), TICK_REFUSED, ids=[message for _, _, message in TICK_REFUSED])
def test_stages_that_cannot_share_a_graph_are_refused(K, options, message, recorders):
    with pytest.raises(ConfigError, match=message) as refused:
        run(K, 2, cuda_graphs="tick", **options)
    assert "use runtime.cuda_graphs=true" in str(refused.value)
    assert "\n" not in str(refused.value)


# --- The same comparison finds what is wrong -------------------------------------------------------------------


def planned(change):
    """Have stages plan their slots otherwise."""

    def plant(monkeypatch):
        monkeypatch.setattr(graphed, "slots_of", lambda pipeline, stage: change(slots_of(pipeline, stage)))

    return plant


def fewer_versions(slots):
    V = max(1, slots.num_versions - 1)
    return replace(slots, num_versions=V, versions=tuple(v % V for v in slots.versions))


def fewer_micro_batches(slots):
    A = max(1, slots.num_micro_batches - 1)
    return Slots(slots.num_versions, A, slots.versions[:A])


def without_input(monkeypatch):
    def forward(self, acts, target):
        self.forward()

    monkeypatch.setattr(graphed.Slot, "go_forward", forward)


def without_seed(monkeypatch):
    compute = graphed.GraphedStage._compute

    def unseeded(self, micro_batch, *args, **kwargs):
        streams, self._random = self._random, Unseeded()
        try:
            return compute(self, micro_batch, *args, **kwargs)
        finally:
            self._random = streams

    monkeypatch.setattr(graphed.GraphedStage, "_compute", unseeded)


class Unseeded:
    def seed(self, micro_batch, device):
        pass


def freed_graph(monkeypatch):
    """Have autograd free its graph after the backward, and so the tensors that a replay reads."""

    def compute_backward(self):
        with self._stage.weights_in(self.version):
            torch.autograd.backward(self._ends, self._returning)

    monkeypatch.setattr(graphed.Slot, "compute_backward", compute_backward)


def gradients_left(monkeypatch):
    def clear(self, slot):
        self._used.discard(slot)

    monkeypatch.setattr(StaticWeights, "_clear", clear)


def any_weights(monkeypatch):
    def slot_for(self, micro_batch, kept, given):
        slot = self.slots[micro_batch % len(self.slots)] if self._memory is not None else None
        return slot if slot is not None and slot.fits(given, kept.target) else None

    monkeypatch.setattr(graphed.GraphedStage, "_slot_for", slot_for)


WRONG = {
    "one version too few": ("adl", planned(fewer_versions)),
    "one micro-batch too few": ("paci", planned(fewer_micro_batches)),
    "the slot without its weights": ("adl", any_weights),
    "no input": ("adl", without_input),
    "no seed": ("adl", without_seed),
    "autograd's graph freed": ("adl", freed_graph),
    "gradients of the group before": ("adl", gradients_left),
}


@functools.cache
def plain(method):
    return run(3, 2, method, dropout=0.3, epochs=1)


@pytest.mark.parametrize("fault", WRONG)
def test_the_stand_in_shows_what_a_graph_would_do_wrong(fault, recorders, monkeypatch):
    method, plant = WRONG[fault]
    expected = plain(method)
    plant(monkeypatch)
    with pytest.raises((AssertionError, DivergedError, RuntimeError)):
        assert_same(run(3, 2, method, cuda_graphs=True, dropout=0.3, epochs=1), expected)


# --- Refused ---------------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Asks for a number."""

    def forward(self, x):
        return x * 2 if bool(x.sum() > 0) else x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return checkpoint(self.conv, x, use_reentrant=False)


class Hooked(nn.Identity):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, args, out: None)


def with_unit(unit):
    def model():
        net = batch_norm_net()
        net[3] = unit()
        return net

    return model


REFUSED = [
    ({"model": with_unit(Reads)}, "stage 1: .* hands a number, or a size, from the device to the host"),
    ({"model": with_unit(Counts)}, "stage 1: it changes more than buffers"),
    ({"model": with_unit(Replaces)}, "stage 1: its forward puts another tensor in the place of '.*mean'"),
    ({"model": with_unit(Again)}, "stage 1: it computes again in its backward"),
    ({"model": with_unit(Hooked)}, "stage 1: it has a hook at module"),
    ({"method": "fr"}, "method=fr as it is set, which replays forwards"),
    ({"method": "dgl"}, "has heads of its own"),
    ({"options": {"split_backward": True}}, "divides a backward"),
    ({"options": {"mitigation": ["predict"]}}, "forwards with weights made for it"),
    ({"compile": True}, "runtime.compile"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_no_graph_can_hold_is_refused_at_the_start(options, message, recorders):
    with pytest.raises(ConfigError, match=message) as refused:
        run(3, 2, cuda_graphs=True, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has them")
def test_graphs_without_a_gpu_are_refused():
    with pytest.raises(ConfigError, match=r"runtime.cuda_graphs needs runtime.device=cuda, but .* cpu; use"):
        run(2, 2, cuda_graphs=True)


@pytest.mark.parametrize("does", ["rehearse", "record"])
def test_a_device_that_cannot_record_is_told_in_one_line(does, recorders, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(StandIn, does, refuse)
    with pytest.raises(ConfigError, match=r"cannot be recorded: .*operation not permitted.*; use") as refused:
        run(2, 2, cuda_graphs=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("setting", [True, "tick"])
def test_a_target_is_recorded_where_the_stage_computes(setting):
    """Targets come on the CPU. The meta device stands for a GPU: what a stage computes there it must find there."""
    meta, sgd = torch.device("meta"), functools.partial(torch.optim.SGD, lr=0.1)
    spec = replace(spec_of(1, sgd), precision=Precision(cuda_graphs=setting))
    kind = ticks.TickedStage if setting == "tick" else graphed.GraphedStage
    stage = kind(batch_norm_net().to(meta), 0, spec, device=meta, traits=StageTraits())
    images, target = torch.zeros(3, 2, 6, 6, device=meta), torch.zeros(3, dtype=torch.long)
    stage.prepare(StandIn(), (images,), (target,), ())
    assert stage.slots[0].fits((images,), target)


def test_work_that_leaves_the_device_is_refused():
    """As ``tensor.cpu()`` and ``tensor.tolist()`` do; to the meta device, since there is no other one here."""
    refused = pytest.raises(ConfigError, match=r"stage 0: .* _to_copy takes a tensor from cpu to meta")
    with refused, graphs.recordable("stage 0", torch.device("cpu")):
        torch.ones(2).to("meta")


class Changing:
    """Changes something when an epoch has ended."""

    def __init__(self, change):
        self.on_epoch = lambda now: change()


def changed(setting, change):
    """Train with a callback that has ``change`` change the model."""
    model = batch_norm_net()
    trainer = toy_trainer(3, 2, model=model, cuda_graphs=setting)
    callbacks = [Changing(lambda: change(model))]
    trainer.fit(FixedImages(65), epochs=2, batch_size=6, callbacks=callbacks, monitoring=QUIET)
    return trainer.full_state_dict()


def new_hook(model):
    model[0].register_forward_hook(lambda module, args, out: 2 * out)


def test_a_hook_that_a_callback_puts_on_is_refused(recorders):
    with pytest.raises(ConfigError, match=r"stage 0: a hook was put on module '0'"):
        changed(True, new_hook)


@pytest.mark.parametrize("setting", [True, "tick"])
def test_weights_may_be_written_between_epochs(setting, recorders):
    def shrink(model):
        with torch.no_grad():
            model[0][0].weight.mul_(0.9)
            model[0][1].running_mean.mul_(0.9)

    assert_same(changed(setting, shrink), changed(False, shrink))


class Replacing:
    """Puts other memory under a parameter when an epoch has ended."""

    def __init__(self, parameter):
        self.parameter = parameter

    def on_epoch(self, now):
        self.parameter.data = self.parameter.data.clone()


def test_a_parameter_with_other_memory_is_refused(recorders):
    model = batch_norm_net()
    trainer = toy_trainer(2, 2, model=model, balance=[3, 4], cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"stage 0: '.*0.weight' was replaced after the start"):
        trainer.fit(
            FixedImages(12), epochs=2, batch_size=6, callbacks=[Replacing(model[0][0].weight)], monitoring=QUIET
        )
