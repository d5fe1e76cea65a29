"""Networks of transformers: cut, they are what the library's own forward computes; what cannot be taken is refused."""

import json

import pytest
import torch

from adl_dist.batch import arguments_of, call, rows_of
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from adl_dist.models import hf_model
from adl_dist.partition import Chain
from tests.support.staged import compare

hf = pytest.importorskip("transformers")
from tests.support.hf_models import FAMILIES, GPT2, hf_input, hf_net  # noqa: E402

SUMMED = ("gemma3", "convnext")  # a value that modules on three stages use: its gradients are summed


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "distilbert", "gpt2 that classifies", "vit", "convnext"])
def test_a_network_in_five_stages_computes_the_same(family):
    """Logits, gradients and buffers, in training and in evaluation, to the bit; lengths of the last batch differ."""
    batches = [hf_input(family, size, dtype=torch.float64) for size in (2, 4)]
    if isinstance(batches[0], dict):
        batches.append(rows_of(hf_input(family, 3), (slice(None), slice(2, 6))))
    told = compare(lambda: hf_net(family).double(), batches, 5)
    assert told.kind == "equal" or (told.kind == "close" and family in SUMMED), told


def test_a_network_is_the_librarys_own():
    for family, (config, _, first, last) in FAMILIES.items():
        model, own = hf_net(family), type(hf_net(family)).__mro__[1](config())
        own.load_state_dict(model.state_dict())
        for module in (model, own):
            module.eval()
        given = hf_input(family, 2)
        args, kwargs = arguments_of(given)
        assert torch.equal(call(model, given), own(*args, **kwargs).logits), family
        chain = Chain(model, [given, hf_input(family, 4)])
        assert chain.units[0].startswith(first), family
        assert chain.units[-1].startswith(last), family


def test_inputs_that_a_network_does_not_take_are_named():
    given = [{"input_ids": ids, "labels": ids} for ids in (torch.ones(n, 5).long() for n in (2, 4))]
    with pytest.raises(TypeError, match=r"takes input_ids, attention_mask, .* has input_ids, labels by name|by name"):
        Chain(hf_net("llama"), given)
    with pytest.raises(TypeError, match="takes input_ids, attention_mask"):
        hf_net("llama")(input_ids=torch.ones(1, 2).long(), labels=torch.ones(1, 2).long())


# --- From a folder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with weights, as save_pretrained makes it."""
    path = tmp_path_factory.mktemp("hf") / "gpt2"
    type(hf_net("gpt2")).__mro__[1](hf.GPT2Config(**GPT2)).save_pretrained(path)
    return path


def from_command_line(*overrides):
    config, _ = compose_run(["model=hf", *overrides])
    return build_model(config)


def test_weights_in_the_folder_are_loaded_unless_told_not_to(folder):
    saved = hf.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    loaded = from_command_line(f"model.config={folder}").state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    drawn = from_command_line(f"model.config={folder}", "model.weights=false").state_dict()
    assert not torch.equal(drawn["transformer.wte.weight"], saved["transformer.wte.weight"])
    again = from_command_line(f"model.config={folder}", "model.weights=false").state_dict()
    assert torch.equal(drawn["transformer.wte.weight"], again["transformer.wte.weight"])


def test_weights_that_the_folder_lacks_are_named(folder):
    """Like those of another head: they would be drawn in silence."""
    with pytest.warns(UserWarning, match=r"lacks the weights of 1 tensors, newly drawn: score\.weight"):
        hf_model(str(folder), "sequence-classification", pad_token_id=0)


def written(path, **entries):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(entries))
    return path


def test_a_configuration_that_cannot_be_taken_is_refused(tmp_path, folder):
    lama = written(tmp_path / "lama", model_type="lama")
    t5 = written(tmp_path / "t5", model_type="t5", is_encoder_decoder=True)
    moe = written(tmp_path / "moe", model_type="mixtral", output_router_logits=True)
    for overrides, why in [
        ([f"model.config={tmp_path}"], "has no config.json"),
        ([f"model.config={tmp_path}/nowhere"], "is no folder; expected one with a config.json"),
        (["model.config=nowhere/at-all"], "not in the local cache of the hub; .*model.download=true"),
        ([f"model.config={lama}"], "'lama' is none that transformers .* knows; did you mean llama"),
        ([f"model.config={t5}"], "has an encoder and a decoder"),
        ([f"model.config={moe}"], "adds a loss of its routers"),
        (
            [f"model.config={folder}", "model.task=image-classification"],
            "no such network of type gpt2; use model.task=",
        ),
        ([f"model.config={folder}", "model.task=foo"], "model.task: there is no 'foo'; choose one of causal-lm"),
        ([f"model.config={folder}", "model.n_layr=2"], "no key 'model.n_layr'; did you mean 'model.n_layer'"),
        ([f"model.config={folder}", "model.n_head=5"], "refuses the .*divisible by"),
        ([f"model.config={lama.parent / 'moe'}", "model.output_router_logits=false", "model.weights=true"], "has no"),
    ]:
        with pytest.raises(ConfigError, match=why) as refused:
            from_command_line(*overrides)
        assert "\n" not in str(refused.value)


def test_without_transformers_one_line_says_what_to_install(monkeypatch, folder):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the package transformers .*pip install transformers"):
        hf_model(str(folder), "causal-lm")
