"""The transformers: sizes and values of those that they are named after, and what no cut may change."""

import pytest
import torch
from torch.nn import functional as F

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import gpt, llama, vit
from adl_dist.optimizers import Muon, mark_roles

VOCAB, CONTEXT = 13, 10
SIZES = {"layers": 3, "heads": 4, "width": 16}


@pytest.fixture(autouse=True)
def _initial_weights_are_the_same_every_time():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_the_default_sizes_are_those_of_gpt_2():
    """124,439,808 parameters, as published, where the head is tied."""
    config, _ = compose_run(["model=gpt", "model.vocab_size=50257", "model.context=1024", "model.tied=true"])
    with torch.device("meta"):
        model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_the_sizes_of_llama_2_make_its_7_billion_parameters():
    with torch.device("meta"):
        model = llama(32000, 4096, layers=32, heads=32, width=4096, hidden=11008)
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


@pytest.mark.parametrize("build", [gpt, llama])
def test_a_position_sees_those_before_it_and_itself_alone(build):
    model, ids = build(VOCAB, CONTEXT, **SIZES).double(), torch.randint(VOCAB, (2, CONTEXT))
    out = model(ids)
    assert out.shape == (2, CONTEXT, VOCAB)
    for at in range(CONTEXT):
        changed = ids.clone()
        changed[:, at] = (ids[:, at] + 1) % VOCAB
        differs = (model(changed) - out).abs().amax(dim=(0, 2)) > 1e-9
        assert differs.tolist() == [t >= at for t in range(CONTEXT)]
    torch.testing.assert_close(model(ids[:, :4]), out[:, :4], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_muon_gets_the_matrices_of_layers_and_no_table_or_head(name):
    model = vit(**SIZES) if name == "vit" else {"gpt": gpt, "llama": llama}[name](VOCAB, CONTEXT, **SIZES)
    mark_roles(model)
    names = {p: n for n, p in model.named_parameters()}
    matrices = {names[p] for p in Muon(model.parameters()).param_groups[0]["params"]}
    of_layers = {n for n, p in model.named_parameters() if n.startswith("layer") and p.ndim == 2}
    assert matrices == of_layers | ({"embedding.patches.weight"} if name == "vit" else set())
    assert len(of_layers) == 3 * (5 if name == "llama" else 4)


# --- Against transformers -------------------------------------------------------------------------------------------

HF = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}


def gpt_pair():
    """Our model and theirs, with the same weights."""
    package = pytest.importorskip("transformers")
    config = package.GPT2Config(
        n_positions=CONTEXT, n_embd=16, n_layer=3, n_head=4, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **HF,
    )  # fmt: skip
    theirs, ours = package.GPT2LMHeadModel(config), gpt(VOCAB, CONTEXT, **SIZES)
    theirs.load_state_dict({n: torch.randn_like(p) * 0.2 + (p.ndim == 1) for n, p in theirs.state_dict().items()})
    of = theirs.state_dict()
    state = {
        "embedding.tokens.weight": of["transformer.wte.weight"],
        "embedding.positions.weight": of["transformer.wpe.weight"],
        "head.norm.weight": of["transformer.ln_f.weight"],
        "head.norm.bias": of["transformer.ln_f.bias"],
        "head.output.weight": of["lm_head.weight"],
    }
    names = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "network_norm": "ln_2", "network.up": "mlp.c_fc", "network.out": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(3):
        for our_name, their_name in names.items():
            for kind in ("weight", "bias"):
                tensor = of[f"transformer.h.{layer}.{their_name}.{kind}"]  # theirs are [in, out]
                state[f"layer{layer}.{our_name}.{kind}"] = tensor.T.clone() if tensor.ndim == 2 else tensor
    ours.load_state_dict(state)
    return ours, theirs


def llama_pair():
    package = pytest.importorskip("transformers")
    config = package.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=False, **HF,
    )  # fmt: skip
    theirs = package.LlamaForCausalLM(config)
    ours = llama(VOCAB, CONTEXT, kv_heads=2, hidden=24, **SIZES)
    torch.manual_seed(0)  # whatever the two have drawn
    theirs.load_state_dict({n: torch.randn_like(p) * 0.2 + (p.ndim == 1) for n, p in theirs.state_dict().items()})
    of = theirs.state_dict()
    state = {
        "embedding.tokens.weight": of["model.embed_tokens.weight"],
        "head.norm.weight": of["model.norm.weight"],
        "head.output.weight": of["lm_head.weight"],
    }
    names = {
        "attention_norm": "input_layernorm", "attention.out": "self_attn.o_proj",
        "network_norm": "post_attention_layernorm", "network.gate": "mlp.gate_proj", "network.up": "mlp.up_proj",
        "network.out": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(3):
        for our_name, their_name in names.items():
            state[f"layer{layer}.{our_name}.weight"] = of[f"model.layers.{layer}.{their_name}.weight"]
        parts = [of[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        state[f"layer{layer}.attention.qkv.weight"] = torch.cat(parts)
    ours.load_state_dict(state)
    return ours, theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", [gpt_pair, llama_pair])
def test_outputs_and_gradients_are_those_of_transformers(pair):
    """The gradients of tokens and head, with which all others meet."""
    ours, theirs = (model.double().train() for model in pair())
    ids, target = torch.randint(VOCAB, (2, 3, CONTEXT))
    expected, found = theirs(ids).logits, ours(ids)
    assert expected.std().item() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    TokenCrossEntropy()(found, target).backward()
    F.cross_entropy(expected.flatten(0, 1), target.flatten()).backward()
    ends = zip((ours.embedding.tokens, ours.head.output), (theirs.get_input_embeddings(), theirs.lm_head), strict=True)
    for layer, same in ends:
        assert same.weight.grad.abs().max() > 1e-3
        torch.testing.assert_close(layer.weight.grad, same.weight.grad, rtol=1e-5, atol=1e-6)
