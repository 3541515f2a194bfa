"""Model shapes that the serving benchmark knows, and the directories that make an engine of them.

A synthetic shape has the layers of a published model and random weights (`--load-format dummy`): the KV cache has the
real geometry and the kernels do the real work, while nothing has to be downloaded. What the model says is meaningless.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a Qwen3 decoder, from the `config.json` of the published models; head_dim is 128 throughout."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    head_dim: int = 128
    max_position: int = 40_960

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token leaves in a bfloat16 cache."""
        return self.layers * self.kv_heads * 2 * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A name for `--shape`; `decoder` is None for the demo's model, which is real."""

    name: str
    device: str
    max_model_len: int
    decoder: Decoder | None = None


SHAPES = {
    "0.6b": Shape("0.6b", "cuda", 20_000, Decoder(28, 1024, 3072, 16, 8)),
    "8b": Shape("8b", "cuda", 20_000, Decoder(36, 4096, 12_288, 32, 8)),
    "32b": Shape("32b", "cuda", 20_000, Decoder(64, 5120, 25_600, 64, 8)),
    "smollm2": Shape("smollm2", "cpu", 4_096),
    # For trying the benchmark itself on any machine; the summary takes no figures from it.
    "tiny": Shape("tiny", "cpu", 2_048, Decoder(2, 128, 256, 2, 2, vocabulary=2_000, max_position=4_096)),
}


def shape_named(name: str) -> Shape:
    """Raises ValueError naming the shapes that exist."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def model_config(decoder: Decoder) -> dict[str, Any]:
    """The `config.json` of a Qwen3 model with these sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "hidden_size": decoder.hidden,
        "initializer_range": 0.02,
        "intermediate_size": decoder.intermediate,
        "max_position_embeddings": decoder.max_position,
        "max_window_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_hidden_layers": decoder.layers,
        "num_key_value_heads": decoder.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": decoder.vocabulary,
    }


def tokenizer_files(decoder: Decoder) -> dict[str, dict[str, Any]]:
    """A word-level tokenizer in which token i is the word `t{i}`, by file name.

    t0 begins a text, t1 ends one, t2 stands for unknown words. Written as JSON, so that neither transformers nor
    tokenizers need to be importable here.
    """
    special = [
        {
            "id": i,
            "content": f"t{i}",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i in (0, 1)
    ]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {f"t{i}": i for i in range(decoder.vocabulary)},
                "unk_token": "t2",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "t0",
            "eos_token": "t1",
            "unk_token": "t2",
            "model_max_length": decoder.max_position,
            "clean_up_tokenization_spaces": False,
        },
    }


def write_synthetic_model(decoder: Decoder, directory: Path) -> Path:
    """Writes config and tokenizer of a model and returns the directory; weights come from `--load-format dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": model_config(decoder), **tokenizer_files(decoder)}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def vocabulary_of(model: Path) -> int:
    """Number of token ids of the model in `model`. Raises ValueError if that is no model directory."""
    path = model / "config.json"
    try:
        size = json.loads(path.read_text())["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} gives no vocab_size: {error!r}") from None
    if not isinstance(size, int) or size < 16:
        raise ValueError(f"{path}: vocab_size must be a whole number of at least 16, not {size!r}")
    return size
