"""Tiny networks of transformers, each with inputs that it takes."""

import torch
import transformers as hf

from adl_dist.models.from_transformers import build

VOCAB, LENGTH, CLASSES = 17, 7, 3
TEXT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 12}
DECODER = {**TEXT, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ENCODER = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
IMAGE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8}
IMAGE |= {"patch_size": 4, "num_labels": CLASSES}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 12, "tie_word_embeddings": False}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 2, 1], "num_heads": [1, 2, 2]}
SWIN |= {"window_size": 4, "num_labels": CLASSES, "drop_path_rate": 0.0}
DISTILBERT = {"vocab_size": VOCAB, "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2, "dropout": 0.0}
DISTILBERT |= {"max_position_embeddings": 12, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}

# Each with its configuration, its task, and the names of its first and its last unit.
FAMILIES = {
    "gpt2": (lambda: hf.GPT2Config(**GPT2), "causal-lm", "transformer.wte", "lm_head"),
    "llama": (lambda: hf.LlamaConfig(**DECODER, num_key_value_heads=1), "causal-lm", "model.embed_tokens", "lm_head"),
    "gemma": (
        lambda: hf.GemmaConfig(**DECODER, num_key_value_heads=1, head_dim=8),
        *("causal-lm", "model.embed_tokens", "lm_head"),
    ),
    "gemma3": (  # with two kinds of masks and of rotary positions
        lambda: hf.Gemma3TextConfig(**DECODER, num_key_value_heads=1, head_dim=8, sliding_window=4),
        *("causal-lm", "model.embed_tokens", "lm_head"),
    ),
    "bert": (lambda: hf.BertConfig(**ENCODER), "sequence-classification", "bert.embeddings", "classifier"),
    "distilbert": (
        lambda: hf.DistilBertConfig(**DISTILBERT, num_labels=CLASSES),
        *("sequence-classification", "distilbert.embeddings", "classifier"),
    ),
    "gpt2 that classifies": (  # whose head asks where the padding begins
        lambda: hf.GPT2Config(**GPT2, pad_token_id=0, num_labels=CLASSES),
        *("sequence-classification", "transformer.wte", "score"),
    ),
    "vit": (
        lambda: hf.ViTConfig(**IMAGE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        *("image-classification", "vit.embeddings", "classifier"),
    ),
    "swin": (lambda: hf.SwinConfig(**SWIN), "image-classification", "swin.embeddings", "classifier"),
    "convnext": (
        lambda: hf.ConvNextConfig(
            image_size=32, patch_size=2, hidden_sizes=[8, 8, 12], depths=[1, 2, 1], num_stages=3, num_labels=CLASSES
        ),
        *("image-classification", "convnext.embeddings", "classifier"),
    ),
}


def hf_net(family):
    """Return the network, with the same weights every time."""
    config, task, *_ = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(config(), task)


def hf_input(family, size, *, dtype=torch.float32, masked=True):
    """Return an input of ``size`` samples; the first two of a text end with padding."""
    config, task, *_ = FAMILIES[family]
    generator = torch.Generator().manual_seed(size)
    if task == "image-classification":
        side = config().image_size
        return torch.randn(size, 3, side, side, generator=generator, dtype=dtype)
    ids = torch.randint(3, VOCAB, (size, LENGTH), generator=generator)
    if not masked:
        return ids
    mask = torch.ones_like(ids)
    mask[:2, -3:] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask}
    if family == "bert":
        given["token_type_ids"] = torch.randint(2, (size, LENGTH), generator=generator)
    return given
