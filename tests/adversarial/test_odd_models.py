"""Every odd model in stages is equal to the uncut one, or refused by one line, as verdicts.txt says."""

import pytest
import torch

import adl_dist
from tests.adversarial.cases import CASES
from tests.adversarial.verdicts import EQUAL, STAGES, expected, is_as, verdict_of
from tests.support.ranks import run_ranks
from tests.support.runs import sgd, toy_trainer
from tests.support.staged import loss_of
from tests.support.tiers import slow
from tests.support.values import SILENT

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what it has deprecated
VERDICTS = expected()


@pytest.mark.parametrize("K", [pytest.param(K) if max(STAGES) == K else slow(K) for K in STAGES])
@pytest.mark.parametrize("name", CASES)
def test_an_odd_model_is_equal_or_refused(name, K):
    kind, text = VERDICTS.get((name, K), EQUAL)
    found = verdict_of(name, K)
    assert is_as(found, kind, text), f"{found.kind}: {found.text}; expected {kind}: {text}"


REPLAYED = ("contiguous_already", "autocasting", "pruned", "old_weight_norm", "hook_on_activation")
REPLAYED += ("weights_like_a_value", "rounds_its_weights")
# Those that draw have a stream of their own for each stage there; that one keeps a value of the micro-batch before.
OTHERWISE = ("dropouts", "gumbel_choice", "checkpointed_dropout", "python_depth", "remembers_the_last")


@pytest.mark.parametrize("name", [name if name in REPLAYED else slow(name) for name in CASES if name not in OTHERWISE])
def test_a_replay_computes_with_the_present_weights(name):
    """A forward recorded with other weights and replayed with these is equal to the uncut model's."""
    kind, text = VERDICTS.get((name, 3), EQUAL)
    found = verdict_of(name, 3, replays=True)
    assert found.kind in ("equal", "close") or is_as(found, kind, text), f"{found.kind}: {found.text}"


def test_verdicts_are_of_models_that_there_are():
    assert {name for name, _ in VERDICTS} <= {*CASES}
    assert len(CASES) > 130


# --- Through the trainer -----------------------------------------------------------------------------------------


def loss(out, target):
    return loss_of(out)


def trained(name, K, folder=None, **of_fit):
    """Return the state and the figures that a run leaves, or the kind of its refusal."""
    case = CASES[name]
    options = {"dtype": torch.float64, "granularity": "layer", "loss_reduction": "batch", "optimizer": sgd}
    if name == "channels_last":
        options["channels_last"] = True
    trainer = toy_trainer(K, 2, model=case.model(), loss_fn=loss, balance="flops", **options)
    of_fit = {"epochs": 2, "batch_size": 2 * case.size, "val_dataset": case.dataset(), "run_dir": folder, **of_fit}
    try:
        summary = trainer.fit(case.dataset(), monitoring=SILENT, **of_fit)
    except adl_dist.AdlError as error:
        return type(error).__name__
    tensors = {name: t.to_dense() for name, t in trainer.full_state_dict().items() if isinstance(t, torch.Tensor)}
    return tensors, summary["validation_loss"]


def assert_same(found, right, name):
    assert not isinstance(right, str), f"{name}: {right}"
    assert not isinstance(found, str), f"{name}: {found}"
    assert found[0].keys() == right[0].keys(), name
    assert [key for key, tensor in right[0].items() if not torch.equal(found[0][key], tensor)] == [], name
    assert found[1] == right[1], name


def train_all(K, names):
    return [trained(name, K) for name in names]


SOME = {
    2: ["padding_mask", "memory_bank", "dropout_path", "argmax_in_the_middle"],
    3: ["detached_branch", "flow", "scaled_by_its_statistics"],
}
TRAINED = [name for name in CASES if not {(name, 2), (name, 3)} & {*VERDICTS}]
AT_A_TIME = 24
RUNS = [pytest.param(K, names, id=f"{K}") for K, names in SOME.items()]
RUNS += [slow(K, TRAINED[i : i + AT_A_TIME], id=f"{K} {i}") for K in SOME for i in range(0, len(TRAINED), AT_A_TIME)]


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("K", "names"), RUNS)
def test_k_processes_train_odd_models_as_one_does(K, names):
    by_rank = run_ranks(K, train_all, K, names, timeout_seconds=220)
    for name, right, *of_ranks in zip(names, train_all(K, names), *by_rank, strict=True):
        for found in of_ranks:
            assert_same(found, right, name)


@pytest.mark.ranks
def test_each_of_k_processes_refuses_what_one_refuses():
    in_one = trained("hands_on_list_of_samples", 2)
    assert isinstance(in_one, str)
    by_rank = [found for (found,) in run_ranks(2, train_all, 2, ["hands_on_list_of_samples"])]
    assert in_one in by_rank
    assert {*by_rank} <= {in_one, "StageFailed"}  # as one rank tells another


# Their state is not in state_dict(), so a resume begins without it.
UNSAVED = {"own_generator", "counter", "remembers_the_last"}
RESUMED = ["memory_bank", "hands_on_pair", "skips_by_torchs_stream", "spectral_norm"]


@pytest.mark.parametrize("name", [*RESUMED, *(slow(n) for n in TRAINED if n not in {*UNSAVED, *RESUMED})])
def test_an_odd_model_resumes_to_the_same_bits(name, tmp_path):
    updates = -(-len(CASES[name].dataset()) // (2 * CASES[name].size))
    trained(name, 2, tmp_path, max_updates=updates)
    torch.manual_seed(12345)  # a new process would have another stream
    assert_same(trained(name, 2, tmp_path), trained(name, 2), name)
