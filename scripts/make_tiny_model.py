"""Makes a tiny untrained language model with a tokenizer and a chat template, for laptops, tests and benchmarks.

    python scripts/make_tiny_model.py --out models/tiny
    python scripts/make_tiny_model.py --out models/small --hidden 192 --layers 5 --bpe_text train.jsonl

The first has 0.1M parameters and one token per printable ASCII character; the second has 3M and 4096
byte-level BPE tokens trained on the given text.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

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


def character_tokenizer():
    """A fast tokenizer with 104 tokens: 8 special ones, the newline and the 95 printable ASCII characters."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    # Byte-pair encoding without any pair to merge leaves single characters.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return _with_chat_template(tokenizer)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int = 4096):
    """A fast byte-level BPE tokenizer of at most vocab_size tokens, trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = {"vocab_size": vocab_size, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(**size, special_tokens=list(SPECIALS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _with_chat_template(tokenizer)


def _with_chat_template(tokenizer):
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[token for token in SPECIALS if token not in (PAD, END, UNKNOWN)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def read_texts(path: str | Path) -> Iterator[str]:
    """Every text of a file: the string columns of a .jsonl file (messages included), or the lines of any other; .gz is
    unpacked."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    is_jsonl = path.name.removesuffix(".gz").endswith(".jsonl")
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if not is_jsonl:
                yield line
                continue
            row = json.loads(line)
            yield from (value for value in row.values() if isinstance(value, str))
            yield from (message["content"] for message in row.get("messages", []))


def make_tiny_model(
    out: str | Path,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    seed: int = 0,
    arch: str = "qwen3",
    tokenizer=None,
) -> None:
    """Writes config, fp32 weights drawn from seed, and the tokenizer (by default of characters) into out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if hidden % heads or hidden // heads % 2:
        nearest = 2 * heads * max(1, hidden // heads // 2)
        raise ValueError(f"hidden={hidden} must be an even multiple of heads={heads}; try {nearest}")
    tokenizer = tokenizer or character_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        arch,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        # With the usual 0.02 a model this narrow learns nothing for its first hundreds of steps.
        initializer_range=0.06,
        bos_token_id=None,
        dtype="float32",
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--hidden", type=int, default=64, help="width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4, help="query heads; half as many key and value heads")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--arch", default="qwen3", choices=ARCHITECTURES)
    parser.add_argument("--bpe_text", nargs="+", help="train a BPE tokenizer on these .txt, .jsonl or .gz files")
    parser.add_argument("--vocab_size", type=int, default=4096, help="of that tokenizer")
    args = parser.parse_args()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # two bars for a file of half a megabyte
    tokenizer = None
    if args.bpe_text:
        tokenizer = bpe_tokenizer((text for path in args.bpe_text for text in read_texts(path)), args.vocab_size)
    try:
        make_tiny_model(args.out, args.hidden, args.layers, args.heads, args.seed, args.arch, tokenizer)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
