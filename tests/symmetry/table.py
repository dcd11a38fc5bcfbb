"""What the attention of published families allows, worked out by hand from their equations: an oracle, as data.

Every row is a tiny model (``benchmarks/tiny.py``) with 4 heads of 8, 2 of them key heads where there are groups, and 2
layers, unless its attributes say otherwise. The dimensions are those of the largest group of linear maps of single
heads that leaves the model's function as it is: what acts on queries and keys (gains of their norms included), and on
values and outputs. Nothing here asks the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

LAYERS, HEADS, KEYS, HEAD = 2, 4, 2, 8

GENERAL = HEAD**2
"""GL(8)."""

ROTARY = HEAD
"""One complex number for each of 4 rotary frequencies."""

ANGLES = PAIRS = HEAD // 2
"""One angle, or one real factor, for each rotary frequency."""

ORTHOGONAL = HEAD * (HEAD - 1) // 2
"""O(8)."""

CENTRED = (HEAD - 1) * (HEAD - 2) // 2
"""What of O(8) keeps the vector of ones."""

WIDTH = HEADS * HEAD
"""Inputs of a projection: so many numbers can be added to all coordinates of a head."""

DIAGONAL = HEAD
"""A factor for each coordinate."""


def partly_rotary(turned: int) -> int:
    """A complex number for each frequency of the turned coordinates, and the general linear group of the others."""
    return turned + (HEAD - turned) ** 2


def partly_tied(turned: int) -> int:
    """A real factor for each frequency of the turned coordinates, and for each of the others."""
    return turned // 2 + HEAD - turned


@dataclass(frozen=True)
class Row:
    """A family with the dimensions of its two groups over the whole model, and how many means of heads are nothing."""

    type: str
    qk: int
    vo: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    means: int = 0

    def __str__(self) -> str:
        return f"{self.type} {self.variant}".strip()


def heads(*types: str, attentions: int = LAYERS) -> tuple[Row, ...]:
    """Families in which every head has the whole general linear group, twice."""
    return tuple(Row(t, attentions * HEADS * GENERAL, attentions * HEADS * GENERAL) for t in types)


def rotary(*types: str, keys: int = KEYS, one: int = ROTARY, **kwargs: Any) -> tuple[Row, ...]:
    """Rotary families: ``one`` dimension for queries and keys of a key head, the general group for its values."""
    return tuple(Row(t, LAYERS * keys * one, LAYERS * keys * GENERAL, **kwargs) for t in types)


def gains(*types: str, a_layer: int, keys: int = KEYS, **kwargs: Any) -> tuple[Row, ...]:
    """Families that norm queries and keys: factors move between the gains of both norms, so many in a layer."""
    return tuple(Row(t, LAYERS * a_layer, LAYERS * keys * GENERAL, **kwargs) for t in types)


_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}

TABLE: tuple[Row, ...] = (
    # ------------------------------------------------------------------------------------------------------- encoders
    *heads("bert", "roberta", "electra", "distilbert", "mpnet", "nystromformer", "squeezebert", "xlnet"),
    *heads("albert", attentions=1),  # one module, used in every layer
    Row("deberta", *2 * (LAYERS * HEADS * GENERAL,), _RELATIVE),
    Row("deberta-v2", *2 * (LAYERS * HEADS * GENERAL,), {**_RELATIVE, "share_att_key": True}, "shared"),
    Row("deberta-v2", *2 * (LAYERS * HEADS * GENERAL,), {**_RELATIVE, "share_att_key": False}, "own"),
    Row("longformer", 2 * LAYERS * HEADS * GENERAL, LAYERS * HEADS * GENERAL),
    *rotary("esm", "roformer", "modernbert", keys=HEADS),
    *heads("wav2vec2", "hubert", "wavlm", "wav2vec2-conformer"),
    # ----------------------------------------------------------------------------------------------- encoder-decoders
    *heads("bart", "mbart", "marian", "t5", "mt5", "whisper", attentions=3 * LAYERS),
    # ------------------------------------------------------------------------------------------------------- decoders
    *heads("gpt2", "gpt_neo", "opt", "bloom", "mpt"),
    *rotary("gpt_neox", keys=HEADS, one=partly_rotary(2)),
    *rotary("gptj", keys=HEADS, one=partly_rotary(4)),
    Row("codegen", LAYERS * 8 * partly_rotary(4), LAYERS * 8 * GENERAL),
    *rotary("falcon", keys=1, variant="7b"),
    *rotary("falcon", attributes={"new_decoder_architecture": True, "num_kv_heads": KEYS}, variant="40b"),
    Row("falcon", *2 * (LAYERS * HEADS * GENERAL,), {"multi_query": False, "alibi": True}, "rw"),
    *rotary("llama", "mistral", "mixtral", "olmo", "gemma2", "starcoder2", "phimoe", "phi3", "dbrx", "cohere"),
    *rotary("qwen2", "qwen2_moe", "gemma", attributes={"num_key_value_heads": KEYS}),
    Row("olmo", 0, 0, {"clip_qkv": 0.05}, "clipped"),
    *gains(
        "cohere",
        a_layer=KEYS * PAIRS,
        attributes={"use_qk_norm": True},
        variant="normed",
        means=LAYERS * (HEADS + KEYS) * WIDTH,
    ),
    Row("cohere2", KEYS * (ROTARY + GENERAL), LAYERS * KEYS * GENERAL),
    Row("smollm3", KEYS * (ROTARY + GENERAL), LAYERS * KEYS * GENERAL),
    *rotary("phi", "glm", "glm4", "nemotron", one=partly_rotary(4)),
    *rotary("stablelm", keys=HEADS, one=partly_rotary(2)),
    *gains(
        "phi",
        a_layer=partly_tied(4),
        attributes={"qk_layernorm": True},
        variant="normed",
        means=LAYERS * (HEADS + KEYS) * (WIDTH + 1),
    ),
    *gains(
        "stablelm",
        a_layer=HEADS * partly_tied(2),
        keys=HEADS,
        attributes={"qk_layernorm": True},
        variant="normed",
        means=LAYERS * 2 * HEADS * WIDTH,
    ),
    *gains(
        "persimmon",
        a_layer=partly_tied(4),
        keys=HEADS,
        attributes={"qk_layernorm": True},
        means=LAYERS * 2 * HEADS * (WIDTH + 1),
    ),
    *gains("chameleon", a_layer=HEADS * PAIRS, keys=HEADS, means=LAYERS * 2 * HEADS * WIDTH),
    # Two softmaxes share the values of a head, which are normalised together.
    Row("diffllama", LAYERS * KEYS * ROTARY, LAYERS * KEYS // 2 * HEAD * (2 * HEAD - 1), {"num_key_value_heads": KEYS}),
    # A factor of each coordinate beside the two norms, through a function; both norms come after the rotation.
    Row("timesfm2_5", LAYERS * DIAGONAL, LAYERS * HEADS * GENERAL),
    # Rotary in one layer of two; gates of each value with a bias for each head.
    Row("beam", PAIRS + DIAGONAL, LAYERS * KEYS * DIAGONAL),
    # A layer norm between values and output.
    Row("kosmos_2_text_model", LAYERS * HEADS * GENERAL, LAYERS * HEADS * CENTRED),
    *gains("qwen3", a_layer=PAIRS, attributes={"num_key_value_heads": KEYS}),
    *gains("qwen3_moe", "lfm2", "gemma3_text", a_layer=PAIRS),
    # Two layers of four have keys and values of their own; values are normed without a gain.
    Row("gemma3n_text", LAYERS * PAIRS, LAYERS * KEYS * ORTHOGONAL),
    # In the second layer a quarter of the coordinates is turned, the others stand still.
    Row("gemma4_text", PAIRS + partly_tied(2), LAYERS * KEYS * ORTHOGONAL),
    *gains("olmo2", "olmo3", "minimax_m2", a_layer=KEYS * PAIRS),
    Row("exaone4", PAIRS + DIAGONAL, LAYERS * KEYS * GENERAL, {"num_key_value_heads": KEYS}),
    Row("afmoe", PAIRS + DIAGONAL, LAYERS * KEYS * DIAGONAL),
    *gains("hunyuan_v1_dense", a_layer=DIAGONAL),
    *rotary("nanochat", one=ANGLES),
    Row("llama4_text", KEYS * (ANGLES + GENERAL), LAYERS * KEYS * GENERAL),
    # One layer of two has a softmax; its values pass a gate for each coordinate.
    Row("qwen3_next", partly_tied(2), KEYS * DIAGONAL),
    *rotary("gpt_oss"),
    Row("bitnet", LAYERS * KEYS * ROTARY, LAYERS * KEYS * ORTHOGONAL),
    # Latent attention: the rotary key, of 2 frequencies, is one for all heads.
    *(
        Row(t, LAYERS * (HEADS * GENERAL + 4), LAYERS * HEADS * GENERAL)
        for t in ("deepseek_v2", "deepseek_v3", "minicpm3", "mistral_large4_text")
    ),
    # One layer of two has a softmax, and a gate for each head.
    Row("bailing_hybrid", HEADS * GENERAL + 4, HEADS * GENERAL),
    Row("mamba", 0, 0),
    Row("rwkv", 0, 0),
    # --------------------------------------------------------------------------------------------------------- images
    *heads("vit", "deit", "beit", "dinov2"),
    *heads("mllama_vision_model", attentions=6),  # four layers, and two over all tiles
    *rotary("dinov3_vit", "pixtral", "qwen2_vl_vision", "qwen3_vl_vision", keys=HEADS),
    *heads("clip", attentions=2 * LAYERS),
    *heads("siglip", attentions=2 * LAYERS + 1),  # and the pooling of the images
    # Two stages of two layers with heads of 8 and 16.
    Row("swin", *2 * (2 * HEADS * (8**2 + 16**2),)),
    # Cosines: rotations, and a scale of the queries and one of the keys.
    Row("swinv2", 2 * HEADS * sum(h * (h - 1) // 2 + 2 for h in (8, 16)), 2 * HEADS * (8**2 + 16**2)),
    # Cosines without a softmax, in a function with a backward pass of its own; what is mixed is divided by its length.
    Row("yoso", LAYERS * HEADS * (ORTHOGONAL + 2), LAYERS * HEADS * (ORTHOGONAL + 1)),
    # All without a graph. Keys that are the queries, sorted by random planes: no element for those.
    Row("reformer", HEADS * GENERAL, LAYERS * HEADS * GENERAL),
    # One layer of attention beside one with a state; the angles of half of each head, or none.
    *(Row(t, KEYS * GENERAL, KEYS * GENERAL) for t in ("jamba", "granitemoehybrid")),
    *(Row(t, KEYS * partly_rotary(HEAD // 2), KEYS * GENERAL) for t in ("bamba", "recurrent_gemma")),
    # Four stages of two layers with 1, 2, 4, 4 heads on a width of 32.
    *(Row(t, *2 * (2 * (32**2 + 2 * 16**2 + 2 * 4 * 8**2),)) for t in ("segformer", "pvt_v2")),
    # Stages of one, two and three layers with 1, 4, 4 heads.
    Row("cvt", *2 * (32**2 + (2 + 3) * 4 * 8**2,)),
    # Tables of relative positions are read by all heads: one element for them all.
    Row("sam_vision_model", LAYERS * GENERAL, LAYERS * HEADS * GENERAL),
    # The first self-attention of the decoder reads zeros: its queries and keys may be moved, and do nothing.
    *heads("detr", attentions=3 * LAYERS),
    # Self-attentions, and values that are sampled at computed places: in both halves, and in the decoder alone.
    Row("deformable_detr", LAYERS * HEADS * GENERAL, 3 * LAYERS * HEADS * GENERAL),
    # Its backbone has a layer for each of the four stages that it gives.
    Row("rf_detr", (4 + LAYERS) * HEADS * GENERAL, (4 + 2 * LAYERS) * HEADS * GENERAL),
)

UNLIKE = {
    "gemma3n_text": "a tiny one has four layers there",
    "detr": "it needs timm there",
    "deformable_detr": "it needs timm there",
    "stablelm normed": "it cannot be initialised there",
}
"""Rows that are other models, or none, on transformers 4.x."""


def unknown(row: Row) -> str | None:
    """Why this transformers has no model that a row is about; None if it has."""
    if row.type not in CONFIG_MAPPING:
        return "this transformers does not know it"
    return UNLIKE.get(str(row)) if transformers.__version__.startswith("4.") else None
