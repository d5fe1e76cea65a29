"""Networks of transformers: cut, they are what the library's own forward computes; what cannot be taken is refused."""

import functools
import json

import pytest
import torch

from adl_dist.batch import Several, call, layout_of
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import gpt, hf_model, llama
from adl_dist.partition import Chain, even_sizes
from tests.support.runs import toy_trainer
from tests.support.staged import compare
from tests.support.values import SILENT

hf = pytest.importorskip("transformers")
from tests.support.hf_models import FAMILIES, GPT2, LENGTH, VOCAB, hf_input, hf_net  # noqa: E402

SUMMED = ("gemma3", "convnext")  # a value that modules on three stages use: its gradients are summed


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "distilbert", "gpt2 that classifies", "vit", "convnext"])
def test_a_network_in_five_stages_computes_the_same(family):
    """Logits, gradients and buffers, in training and in evaluation, to the bit; lengths of the last batch differ."""
    batches = [hf_input(family, size, dtype=torch.float64) for size in (2, 4)]
    if "ids" in str(layout_of(batches[0])):
        batches.append(hf_input(family, 3).map(lambda tensor: tensor[:, 2:6]))
    told = compare(lambda: hf_net(family).double(), batches, 5)
    assert told.kind == "equal" or (told.kind == "close" and family in SUMMED), told


def test_a_network_is_the_librarys_own():
    for family, (config, _, first, last) in FAMILIES.items():
        model, own = hf_net(family), type(hf_net(family)).__mro__[1](config())
        own.load_state_dict(model.state_dict())
        for module in (model, own):
            module.eval()
        given = hf_input(family, 2)
        args, kwargs = given.arguments if isinstance(given, Several) else ((given,), {})
        assert torch.equal(call(model, given), own(*args, **kwargs).logits), family
        chain = Chain(model, [given, hf_input(family, 4)])
        assert chain.units[0].startswith(first), family
        assert chain.units[-1].startswith(last), family


def test_rotary_tables_are_saved_by_no_stage():
    model = hf_net("llama")
    chain = Chain(model, [hf_input("llama", 2), hf_input("llama", 4)])
    sizes = even_sizes(chain, 4)
    stages = chain.stages(model, chain.plan(sizes), sizes, range(4))
    assert not any("rotary" in name for stage in stages for name in stage.state_dict())


def test_inputs_that_a_network_does_not_take_are_named():
    given = [Several.of({"input_ids": ids, "labels": ids}) for ids in (torch.ones(n, 5).long() for n in (2, 4))]
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


def test_an_entry_of_the_configuration_can_be_replaced(folder):
    model = from_command_line(f"model.config={folder}", "model.n_layer=1", "model.weights=false")
    assert len(model.transformer.h) == 1


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
        ([f"model.config={folder}", "model.task=foo"], "model.task=foo is none of causal-lm"),
        ([f"model.config={folder}", "model.n_layr=2"], "no key 'model.n_layr'; did you mean 'model.n_layer'"),
        ([f"model.config={folder}", "model.n_head=5"], "refuses the .*divisible by"),
        ([f"model.config={lama.parent / 'moe'}", "model.output_router_logits=false", "model.weights=true"], "has no"),
    ]:
        with pytest.raises(ConfigError, match=why) as refused:
            from_command_line(*overrides)
        assert "\n" not in str(refused.value)


def test_without_transformers_one_line_says_what_to_install(monkeypatch, folder):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the package transformers .*pip install adl_dist\[hf\]"):
        hf_model(str(folder), "causal-lm")


# --- Our reference models are those of the library -----------------------------------------------------------------


def as_gpt2(theirs):
    """Return our model with the weights of GPT-2; its linear layers hold theirs transposed."""
    ours, own = gpt(VOCAB, 12, layers=3, heads=2, width=16), theirs.state_dict()
    state = {"embedding.tokens.weight": own["transformer.wte.weight"]}
    state["embedding.positions.weight"] = own["transformer.wpe.weight"]
    for layer in range(3):
        here, there = f"layer{layer}", f"transformer.h.{layer}"
        for name, other in {"attention_norm": "ln_1", "network_norm": "ln_2"}.items():
            state |= {f"{here}.{name}.{kind}": own[f"{there}.{other}.{kind}"] for kind in ("weight", "bias")}
        linear = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
        for name, other in {**linear, "network.up": "mlp.c_fc", "network.out": "mlp.c_proj"}.items():
            state[f"{here}.{name}.weight"] = own[f"{there}.{other}.weight"].T
            state[f"{here}.{name}.bias"] = own[f"{there}.{other}.bias"]
    state |= {f"head.norm.{kind}": own[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    ours.load_state_dict({**state, "head.output.weight": own["lm_head.weight"]})
    return ours


def as_llama(theirs):
    ours = llama(VOCAB, 12, layers=3, heads=2, width=16, kv_heads=1, hidden=24, norm_eps=theirs.config.rms_norm_eps)
    own = theirs.state_dict()
    state = {"embedding.tokens.weight": own["model.embed_tokens.weight"], "head.norm.weight": own["model.norm.weight"]}
    for layer in range(3):
        here, there = f"layer{layer}", f"model.layers.{layer}"
        qkv = [own[f"{there}.self_attn.{name}_proj.weight"] for name in "qkv"]
        state[f"{here}.attention.qkv.weight"] = torch.cat(qkv)
        others = {"attention.out": "self_attn.o_proj", "attention_norm": "input_layernorm"}
        others |= {"network_norm": "post_attention_layernorm", "network.gate": "mlp.gate_proj"}
        for name, other in {**others, "network.up": "mlp.up_proj", "network.out": "mlp.down_proj"}.items():
            state[f"{here}.{name}.weight"] = own[f"{there}.{other}.weight"]
    ours.load_state_dict({**state, "head.output.weight": own["lm_head.weight"]})
    return ours


OURS = {"gpt2": as_gpt2, "llama": as_llama}


@pytest.mark.parametrize("name", OURS)
def test_our_reference_models_have_the_librarys_logits(name):
    """To 1e-5, with weights large enough that attention is far from uniform."""
    theirs = hf_net(name)
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(10.0 if p.ndim > 1 else 1.0)
    ours, ids = OURS[name](theirs), hf_input(name, 4, masked=False)
    expected = theirs(ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(ids), expected, rtol=1e-5, atol=1e-5)


class Sequences(torch.utils.data.Dataset):
    """Tokens, each with the one behind it as its target; none is the 0 of padding, whose vector is not trained."""

    def __len__(self):
        return 100

    def whole(self, index):
        return torch.randint(1, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))

    def __getitem__(self, index):
        return self.whole(index)[:-1], self.whole(index)[1:]


@pytest.mark.parametrize("name", OURS)
def test_fifty_updates_of_ours_have_the_losses_of_a_plain_loop(name, tmp_path):
    """Return the losses of the library's own model with its own loss, which shifts the labels itself."""
    theirs = type(hf_net(name)).__mro__[1](FAMILIES[name][0]()).double()
    theirs.load_state_dict(hf_net(name).state_dict())
    sgd = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    of_trainer = {"loss_fn": TokenCrossEntropy(), "dtype": torch.float64, "optimizer": sgd}
    trainer = toy_trainer(1, 1, "bp", model=OURS[name](hf_net(name)), **of_trainer)
    data, optimizer, plain = Sequences(), sgd(theirs.parameters()), []
    trainer.fit(data, epochs=1, batch_size=2, shuffle=False, monitoring=SILENT, run_dir=tmp_path)
    for update in range(50):
        whole = torch.stack([data.whole(2 * update + row) for row in range(2)])
        optimizer.zero_grad()
        loss = theirs(whole, labels=whole, use_cache=False).loss
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    losses = [line["value"] for line in lines if line["name"] == "train/loss"]
    # Llama's norms are of float32 in the library.
    assert losses == pytest.approx(plain, rel=1e-6 if name == "gpt2" else 1e-5)
    assert len(losses) == 50
