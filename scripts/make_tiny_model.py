"""Makes a tiny untrained language model with a tokenizer and a chat template, for laptops, tests
and benchmarks.

    python scripts/make_tiny_model.py --out models/tiny
    python scripts/make_tiny_model.py --out models/small --hidden 192 --layers 5 --bpe_text t.jsonl

The first has 0.1M parameters and one token per printable ASCII character; the second has 3M and
4096 byte-level BPE tokens trained on the given text.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from script_tools import make_parser
from tiny_vision_model import VISION_MODELS, make_vision_model

from rl_core.tools import tiny_model
from rl_core.tools.tiny_model import ARCHITECTURES, CHARACTERS, SPECIALS, with_chat_template

__all__ = ["CHARACTERS", "make_tiny_model"]


def make_tiny_model(out: str | Path, *sizes, arch: str = "qwen3", tokenizer=None, **more) -> None:
    """Writes a tiny model, also of the architectures of VISION_MODELS."""
    make = make_vision_model if arch in VISION_MODELS else tiny_model.make_tiny_model
    make(out, *sizes, arch=arch, tokenizer=tokenizer, **more)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int = 4096):
    """A fast byte-level BPE tokenizer of at most vocab_size tokens, trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = {"vocab_size": vocab_size, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(**size, special_tokens=list(SPECIALS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return with_chat_template(tokenizer)


def read_texts(path: str | Path) -> Iterator[str]:
    """The texts of a file: string columns and messages of a .jsonl file, or the lines of another
    file. A .gz file is unpacked."""
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--hidden", type=int, default=64, help="width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--heads", type=int, default=4, help="query heads; half as many key and value heads"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--arch", default="qwen3", choices=[*ARCHITECTURES, *VISION_MODELS])
    parser.add_argument(
        "--bpe_text", nargs="+", help="train a BPE tokenizer on these .txt, .jsonl or .gz files"
    )
    parser.add_argument("--vocab_size", type=int, default=4096, help="size of that tokenizer")
    args = parser.parse_args()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = None
    if args.bpe_text:
        tokenizer = bpe_tokenizer(
            (text for path in args.bpe_text for text in read_texts(path)), args.vocab_size
        )
    try:
        sizes = args.hidden, args.layers, args.heads, args.seed
        make_tiny_model(args.out, *sizes, arch=args.arch, tokenizer=tokenizer)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
