"""How full microbatches of equal work are, and how long the plan takes, on log-normal lengths.

    python scripts/bench_packing.py [--out result.json]

Work is that of Qwen3-0.6B: a token that sees 7,680 others costs twice its matrix products. Fill is the work of all bins over that
of as many as the fullest.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from rl_core.data.packing import balanced_bins

NUM, MULTIPLE = 4096, 8


def measure(max_tokens: int) -> dict:
    draw = random.Random(0)
    lengths = [min(4096, max(16, int(draw.lognormvariate(6, 1)))) for _ in range(NUM)]
    work = [n + n * n / 7680 for n in lengths]
    start = time.process_time()
    bins = balanced_bins(lengths, max_tokens, MULTIPLE, work)
    seconds = time.process_time() - start
    tokens, works = ([sum(values[i] for i in b) for b in bins] for values in (lengths, work))
    fills = {name: sum(v) / max(v) / len(v) for name, v in (("work_fill", works), ("token_fill", tokens))}
    return {"max_tokens": max_tokens, "bins": len(bins), "ms": 1e3 * seconds, **fills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    args = parser.parse_args()
    print(f"{'max tokens':>10} {'bins':>5} {'CPU ms':>7} {'fill, work':>11} {'fill, tokens':>13}")
    lines = [measure(max_tokens) for max_tokens in (10_240, 12_000, 16_384, 32_768)]
    for r in lines:
        print(f"{r['max_tokens']:>10} {r['bins']:>5} {r['ms']:>7.1f} {r['work_fill']:>11.1%} {r['token_fill']:>13.1%}")
    if args.out:
        args.out.write_text(json.dumps({"sequences": NUM, "lines": lines}, indent=2))


if __name__ == "__main__":
    main()
