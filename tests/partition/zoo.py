"""Networks of torchvision, timm and transformers that must be cut: how each is built small, and what it is fed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (2, 3)  # of the two batches
CLASSES, VOCAB, LENGTH = 5, 37, 7

# Pixels other than 64, by the name of the builder.
PIXELS = {"inception_v3": 75, "inception_v3 with heads": 299, "maxvit_t": 224, "vit_h_14": 56, "crossvit_9_240": 240}
PIXELS |= dict.fromkeys(("efficientformer_l1", "efficientformerv2_s0", "levit_128s", "tiny_vit_5m_224"), 224)
WITH_HEADS = ("googlenet with heads", "inception_v3 with heads")
SEGMENTATION = (
    *("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "deeplabv3_resnet101"),
    *("fcn_resnet50", "fcn_resnet101", "lraspp_mobilenet_v3_large"),
)
LARGE = ("vit_h_14", "regnet_y_128gf", "vit_l_16", "vit_l_32")  # in float32: float64 would take more than 20 GB

# timm, at least one of most families; first those that take other pixels, or fewer blocks.
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "beit_base_patch16_224": {"img_size": 64, "depth": 3},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "depths": (1, 1, 2, 1),
        "embed_dim": 24,
        "num_heads": (1, 2, 2, 4),
    },
    "convnext_atto": {"depths": (1, 1, 2, 1)},
    "densenet121": {"block_config": (2, 2, 2, 2)},
}
SMALL_IMAGES = """
botnet26t_256 coat_lite_tiny coatnet_nano_rw_224 convit_tiny efficientvit_m0 gcvit_xxtiny gmlp_ti16_224
lambda_resnet26t mixer_s32_224 mvitv2_tiny nest_tiny pit_ti_224 resmlp_12_224 visformer_tiny xcit_nano_12_p16_224
"""
AS_THEY_ARE = """
caformer_s18 crossvit_9_240 cs3darknet_s davit_tiny dla60x_c dpn48b edgenext_xx_small efficientformer_l1
efficientformerv2_s0 efficientnet_b0 efficientvit_b0 ese_vovnet19b_slim fasternet_t0 fastvit_t8 focalnet_tiny_srf
ghostnet_050 hgnetv2_b0 hrnet_w18_small inception_next_atto lcnet_050 legacy_seresnet18 levit_128s mambaout_femto
mnasnet_small mobilenetv3_small_050 mobilevit_xxs poolformer_s12 pvt_v2_b0 regnetx_002 repvit_m0_9 res2net50_26w_4s
resnest14d resnet10t resnetv2_50 rexnet_100 selecsls42 skresnet18 tf_efficientnetv2_b0 tiny_vit_5m_224
twins_pcpvt_small vgg11 xception41
"""
TIMM |= {name: {"img_size": 64} for name in SMALL_IMAGES.split()}
TIMM |= {name: {} for name in AS_THEY_ARE.split()}

TEXT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 16}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {**TEXT, **TOKENS, "num_key_value_heads": 1, "tie_word_embeddings": False}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, **TOKENS}
ENCODER = {**TEXT, **TOKENS, "num_labels": CLASSES}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": "c2p|p2c"}
LONG = {**ENCODER, "attention_window": 4, "max_position_embeddings": 24}
MODERN = {**ENCODER, "global_attn_every_n_layers": 2, "local_attention": 4}
IMAGE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
IMAGE |= {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
EAGER = {"experts_implementation": "eager"}  # the library's own default takes no float64
EXPERTS = {**EAGER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2}
SEQ2SEQ |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16}
SEQ2SEQ |= {**TOKENS, "decoder_start_token_id": 2, "forced_eos_token_id": 2}

CAUSAL, SEQUENCE = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
PICTURE, TRANSLATE = "AutoModelForImageClassification", "AutoModelForSeq2SeqLM"
# transformers: type of the configuration, class that builds the network, entries, and arguments of the forward.
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", CAUSAL, DECODER, ("ids",)),
    "llama with a mask": ("llama", CAUSAL, DECODER, ("ids", "mask")),
    "llama with a cache": ("llama", CAUSAL, {**DECODER, "use_cache": True}, ("ids",)),
    "llama with labels": ("llama", CAUSAL, DECODER, ("ids", "labels")),
    "llama with hidden states": ("llama", CAUSAL, {**DECODER, "output_hidden_states": True}, ("ids",)),
    "llama, tied": ("llama", CAUSAL, {**DECODER, "tie_word_embeddings": True}, ("ids",)),
    "llama that checkpoints": ("llama", CAUSAL, DECODER, ("ids",)),
    "qwen3": ("qwen3", CAUSAL, {**DECODER, "head_dim": 8}, ("ids", "mask")),
    "mistral": ("mistral", CAUSAL, {**DECODER, "sliding_window": 4}, ("ids", "mask")),
    "gemma": ("gemma", CAUSAL, {**DECODER, "head_dim": 8}, ("ids", "mask")),
    "gemma2": ("gemma2", CAUSAL, {**DECODER, "head_dim": 8, "sliding_window": 4}, ("ids", "mask")),
    "gemma3": ("gemma3_text", CAUSAL, {**DECODER, "head_dim": 8, "sliding_window": 4}, ("ids", "mask")),
    "glm": ("glm", CAUSAL, {**DECODER, "head_dim": 8}, ("ids", "mask")),
    "gpt2": ("gpt2", CAUSAL, {**GPT2, "tie_word_embeddings": False}, ("ids", "mask")),
    "gpt2, tied": ("gpt2", CAUSAL, GPT2, ("ids",)),
    "gpt2 with a cache": ("gpt2", CAUSAL, {**GPT2, "use_cache": True, "tie_word_embeddings": False}, ("ids",)),
    "gpt2 that classifies": ("gpt2", SEQUENCE, {**GPT2, "num_labels": CLASSES}, ("ids", "mask")),
    "opt": (
        "opt",
        CAUSAL,
        {**TEXT, **TOKENS, "ffn_dim": 24, "word_embed_proj_dim": 16, "tie_word_embeddings": False},
        ("ids", "mask"),
    ),
    "bloom": (
        *("bloom", CAUSAL),
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 4, "n_head": 2, **TOKENS},
        ("ids", "mask"),
    ),
    "falcon": ("falcon", CAUSAL, {**TEXT, **TOKENS}, ("ids", "mask")),
    "gpt_neox": ("gpt_neox", CAUSAL, {**TEXT, **TOKENS}, ("ids", "mask")),
    "gpt_neo": (
        "gpt_neo",
        CAUSAL,
        {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "max_position_embeddings": 16}
        | {"attention_types": [[["global", "local"], 2]], "window_size": 4, **TOKENS},
        ("ids", "mask"),
    ),
    "gptj": ("gptj", CAUSAL, {**GPT2, "rotary_dim": 4}, ("ids", "mask")),
    "mixtral": (
        *("mixtral", CAUSAL),
        {**DECODER, **EAGER, "num_local_experts": 4, "num_experts_per_tok": 2},
        ("ids", "mask"),
    ),
    "mixtral with routers": (
        *("mixtral", CAUSAL),
        {**DECODER, **EAGER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        ("ids", "labels"),
    ),
    "qwen2_moe": ("qwen2_moe", CAUSAL, {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 8}, ("ids", "mask")),
    "qwen3_moe": ("qwen3_moe", CAUSAL, {**DECODER, **EXPERTS, "head_dim": 8}, ("ids", "mask")),
    "olmoe": ("olmoe", CAUSAL, {**DECODER, **EAGER, "num_experts": 4, "num_experts_per_tok": 2}, ("ids", "mask")),
    "deepseek_v3": (
        "deepseek_v3",
        CAUSAL,
        {**DECODER, **EAGER, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "q_lora_rank": 8}
        | {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        ("ids", "mask"),
    ),
    "mamba": (
        "mamba",
        CAUSAL,
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, **TOKENS},
        ("ids",),
    ),
    "mamba2": (
        "mamba2",
        CAUSAL,
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, "num_heads": 4}
        | {"head_dim": 8, "n_groups": 1, "chunk_size": 4, **TOKENS},
        ("ids",),
    ),
    "rwkv": (
        "rwkv",
        CAUSAL,
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 4, "attention_hidden_size": 16, **TOKENS},
        ("ids",),
    ),
    "bert": ("bert", SEQUENCE, ENCODER, ("ids", "mask", "types")),
    "electra": ("electra", SEQUENCE, {**ENCODER, "embedding_size": 16}, ("ids", "mask")),
    "deberta": ("deberta", SEQUENCE, DEBERTA, ("ids", "mask")),
    "deberta-v2": ("deberta-v2", SEQUENCE, DEBERTA, ("ids", "mask")),
    "albert": ("albert", SEQUENCE, {**ENCODER, "embedding_size": 8}, ("ids", "mask")),
    "modernbert": ("modernbert", SEQUENCE, MODERN, ("ids", "mask")),
    "distilbert": (
        "distilbert",
        SEQUENCE,
        {"vocab_size": VOCAB, "dim": 16, "hidden_dim": 24, "n_layers": 4, "n_heads": 2}
        | {"max_position_embeddings": 16, "num_labels": CLASSES, "pad_token_id": 0},
        ("ids", "mask"),
    ),
    "longformer": ("longformer", SEQUENCE, LONG, ("ids", "mask")),
    "funnel": (
        "funnel",
        SEQUENCE,
        {"vocab_size": VOCAB, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [2, 2]}
        | {"num_labels": CLASSES, "num_decoder_layers": 1},
        ("ids", "mask"),
    ),
    "t5": (
        "t5",
        TRANSLATE,
        {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, **TOKENS}
        | {"decoder_start_token_id": 0},
        ("ids", "decoder"),
    ),
    "bart": ("bart", TRANSLATE, SEQ2SEQ, ("ids", "mask", "decoder")),
    "marian": ("marian", TRANSLATE, SEQ2SEQ, ("ids", "mask", "decoder")),
    "whisper": (
        "whisper",
        "AutoModelForSpeechSeq2Seq",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        ("sound", "decoder"),
    ),
    "wav2vec2": (
        "wav2vec2",
        "AutoModelForAudioClassification",
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
        | {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_labels": CLASSES}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        | {"mask_time_prob": 0.0, "classifier_proj_size": 8},
        ("wave",),
    ),
    "deit": ("deit", "DeiTForImageClassification", IMAGE, ("pixels",)),
    "yolos": (
        *("yolos", "AutoModelForObjectDetection"),
        {**IMAGE, "image_size": [16, 16], "num_detection_tokens": 3},
        ("pixels",),
    ),
    "swin": (
        "swin",
        PICTURE,
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2, 1], "num_heads": [1, 2, 2]}
        | {"window_size": 2, "num_labels": CLASSES},
        ("pixels",),
    ),
    "convnext": (
        "convnext",
        PICTURE,
        {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 8, 12], "depths": [1, 2, 1], "num_stages": 3}
        | {"num_labels": CLASSES},
        ("pixels",),
    ),
    "resnet": (
        "resnet",
        PICTURE,
        {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [2, 2], "layer_type": "basic", "num_labels": CLASSES},
        ("pixels",),
    ),
    "segformer": (
        "segformer",
        PICTURE,
        {"hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}
        | {"decoder_hidden_size": 8, "sr_ratios": [2, 1, 1, 1], "num_labels": CLASSES},
        ("pixels",),
    ),
    "clip": (
        "clip",
        "AutoModel",
        {"projection_dim": 8, "text_config": {**TEXT, **TOKENS}, "vision_config": {**IMAGE, "projection_dim": 8}},
        ("ids", "pixels"),
    ),
    "perceiver": (
        "perceiver",
        "PerceiverForSequenceClassification",
        {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 3}
        | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "vocab_size": VOCAB}
        | {"max_position_embeddings": 16, "num_labels": CLASSES},
        ("inputs",),
    ),
}  # fmt: skip
PLAIN = ["qwen2", "phi", "phi3", "olmo2", "granite", "stablelm", "starcoder2", "cohere", "nemotron"]
TRANSFORMERS |= {name: (name, CAUSAL, DECODER, ("ids", "mask")) for name in PLAIN}
TRANSFORMERS |= {name: (name, SEQUENCE, ENCODER, ("ids", "mask")) for name in ("roberta", "xlm-roberta", "camembert")}
TRANSFORMERS |= {name: (name, PICTURE, IMAGE, ("pixels",)) for name in ("vit", "beit", "dinov2")}


def network(library: str, name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the network with the same weights every time, without dropout, which stages draw by themselves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _BUILDERS[library](name)
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and (key == "p" or "drop" in key):
                setattr(module, key, 0.0)
    return model.to(dtype)


def batches(library: str, name: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Return batches of two sizes for the network."""
    if library == "transformers":
        kinds = TRANSFORMERS[name][3]
        return [{ARGUMENTS[kind]: _given(kind, n, size, dtype) for kind in kinds} for n, size in enumerate(SIZES)]
    own = TIMM.get(name, {}) if library == "timm" else {}
    pixels = PIXELS.get(name, own.get("img_size", 64))
    return [_drawn(n, size, 3, pixels, pixels).to(dtype) for n, size in enumerate(SIZES)]


ARGUMENTS = {
    "ids": "input_ids", "mask": "attention_mask", "types": "token_type_ids", "labels": "labels", "inputs": "inputs",
    "decoder": "decoder_input_ids", "pixels": "pixel_values", "sound": "input_features", "wave": "input_values",
}  # fmt: skip


def _given(kind: str, seed: int, size: int, dtype: torch.dtype) -> Tensor:
    if kind in ("pixels", "sound", "wave"):
        shape = {"pixels": (3, 16, 16), "sound": (8, 20), "wave": (400,)}[kind]
        return _drawn(seed, size, *shape).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    if kind == "mask":
        mask = torch.ones(size, LENGTH, dtype=torch.long)
        mask[0, -2:] = 0
        return mask
    highest = 2 if kind == "types" else VOCAB
    return torch.randint(0 if kind == "types" else 3, highest, (size, LENGTH), generator=generator)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    builder, _, with_heads = name.partition(" with ")
    if name in SEGMENTATION:
        return models.get_model(
            name, weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss="lraspp" not in name or None
        )
    options: dict[str, Any] = {"num_classes": CLASSES}
    if builder.startswith("vit"):
        options["image_size"] = PIXELS.get(name, 64)
    if builder in ("googlenet", "inception_v3"):
        options |= {"aux_logits": bool(with_heads), "init_weights": False}
    return models.get_model(builder, weights=None, **options)


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES, **TIMM[name])


def _transformers(name: str) -> nn.Module:
    import transformers as hf

    kind, auto, entries, _ = TRANSFORMERS[name]
    config: Any = hf.AutoConfig.for_model(kind, **{"use_cache": False, **entries})
    for part in (config, *(getattr(config, f"{which}_config", None) for which in ("text", "vision"))):
        for key, value in vars(part).items() if part is not None else ():
            if isinstance(value, float) and ("drop" in key):
                setattr(part, key, 0.0)
    builder = getattr(hf, auto)
    model: Any = builder(config) if not auto.startswith("Auto") else builder.from_config(config)
    if "checkpoints" in name:
        model.activation_checkpointing_enable()
    return model


_BUILDERS = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}


def names(library: str) -> Sequence[str]:
    """Return the networks of a library, those that take much memory last."""
    if library != "torchvision":
        return [*(TIMM if library == "timm" else TRANSFORMERS)]
    from torchvision import models

    known = [*models.list_models(module=models), *WITH_HEADS, *SEGMENTATION]
    return sorted(known, key=LARGE.__contains__)
