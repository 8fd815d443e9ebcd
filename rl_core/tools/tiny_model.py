"""A tiny untrained language model with a tokenizer of characters and a chat template, for laptops
and tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.types import JSONObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROLES = ("system", "user", "assistant", "tool")
PAD, END, UNKNOWN, BEGIN = "<|pad|>", "<|end|>", "<|unk|>", "<|begin|>"
SPECIALS = (PAD, END, UNKNOWN, BEGIN, *(f"<|{role}|>" for role in ROLES))
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{%- if message['role'] not in {list(ROLES)} -%}}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

ARCHITECTURES = ("qwen3", "llama", "qwen2")


def character_tokenizer(more: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE):
    """A fast tokenizer with 104 tokens: 8 special ones, the newline and the 95 printable ASCII
    characters; and `more` special ones."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS, *more))}
    # Byte-pair encoding without any pair to merge leaves single characters.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return with_chat_template(tokenizer, (*SPECIALS, *more), chat_template)


def with_chat_template(tokenizer, specials=SPECIALS, chat_template=CHAT_TEMPLATE):
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[token for token in specials if token not in (PAD, END, UNKNOWN)],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    out: str | Path,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    seed: int = 0,
    arch: str = "qwen3",
    tokenizer=None,
    make_config: Callable[[str, JSONObject], PretrainedConfig] | None = None,
) -> None:
    """Writes config, fp32 weights drawn from seed, and the tokenizer (by default of characters)
    into out. `make_config`: (arch, sizes) -> config, instead of transformers' own."""
    import torch
    from transformers import AutoConfig, GenerationConfig

    from rl_core.data.pretrained import from_config
    from rl_core.models.loading import model_class, save_as_published

    if hidden % heads or hidden // heads % 2:
        nearest = 2 * heads * max(1, hidden // heads // 2)
        raise ValueError(
            f"hidden={hidden} must be an even multiple of heads={heads}; try {nearest}"
        )
    tokenizer = tokenizer or character_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        # With the usual 0.02 a model this narrow learns nothing for its first hundreds of steps.
        "initializer_range": 0.06,
        "bos_token_id": None,
        "dtype": "float32",
        **ends,
    }
    config = make_config(arch, sizes) if make_config else AutoConfig.for_model(arch, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = from_config(model_class(config), config)
        for value in model.parameters():
            if not value.any() and value.ndim == 2:  # Gemma 3's projector would be blind.
                value.data.normal_(std=sizes["initializer_range"])
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    save_as_published(model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
