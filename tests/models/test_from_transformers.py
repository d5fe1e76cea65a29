"""Networks of transformers: cut, they are what the library's own forward computes; what cannot be taken is refused."""

import pytest
import torch

from adl_dist.batch import arguments_of, call
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from adl_dist.models import hf_model
from adl_dist.partition import Chain

hf = pytest.importorskip("transformers")
from tests.support.hf_models import FAMILIES, GPT2, hf_input, hf_net  # noqa: E402


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


def test_without_transformers_one_line_says_what_to_install(monkeypatch, folder):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the package transformers .*pip install transformers"):
        hf_model(str(folder), "causal-lm")
