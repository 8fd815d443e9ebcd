"""Peak memory of a learner's step with many images, next to a count by hand.

    python scripts/bench_images.py                               64 images of 1,000 x 1,000, fp32
    python scripts/bench_images.py --images 8 --dtype bfloat16

A tiny model reads patches of 14 x 14 pixels as Qwen2.5-VL does, all images in one microbatch, with
recomputed activations. Counted: pixels for the model, pixels in the cache, and activations of the
tower and of the language model as `rl-core plan` counts them. Linux alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from bench_logprobs import MIB, peak_mib
from make_tiny_model import make_tiny_model
from script_tools import make_parser

from rl_core.algorithms import make_algorithm
from rl_core.config import Config, parse_config
from rl_core.data.image_families import PIXEL_CACHE_BYTES
from rl_core.data.images import read_image
from rl_core.data.pretrained import from_config
from rl_core.data.vision_models import load_family
from rl_core.learners import is_sharded, make_learner
from rl_core.learning.activation_memory import activation_bytes
from rl_core.models.loading import compute_dtype, load_model_config, model_class
from rl_core.run.process.joining import init_ranks
from rl_core.tools.memory_estimate import image_bytes, model_size
from rl_core.types import TrainingSample

PIXELS = {"patch_size": 14, "size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 16384}}


def tiny_model(folder: Path) -> str:
    """A model with Qwen2.5-VL's patches of 14 x 14 pixels, and windows of 8 x 8 patches."""
    make_tiny_model(folder, hidden=48, arch="qwen2_5_vl")
    config = load_model_config(str(folder))
    config.vision_config.patch_size, config.vision_config.window_size = 14, 112
    from_config(model_class(config), config).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PIXELS))
    return str(folder)


def make_samples(model: str, num: int, edge: int) -> list[TrainingSample]:
    """Samples of one image and three trained tokens."""
    family, samples = load_family(model), []
    assert not isinstance(family, str), family
    for number in range(num):
        draw = np.random.RandomState(number)
        image = read_image(draw.randint(0, 256, (edge, edge, 3), dtype=np.uint8))
        ids = np.array([*family.expand(image), 7, 8, 9, 10])
        mask = np.arange(len(ids)) >= len(ids) - 3
        columns = {"rollout_logprobs": -4.6 * mask, "policy_versions": mask - 1, "advantages": mask}
        made = TrainingSample(
            token_ids=ids, loss_mask=mask, group_id=str(number), images=(image,), **columns
        )
        samples.append(made)
    return samples


def counted_mib(config: Config, model: str, samples: list[TrainingSample]) -> dict[str, float]:
    actor, w = config.actors["policy"], compute_dtype(config).itemsize
    size, family = model_size(actor), load_family(model)
    assert not isinstance(family, str), family
    num_image = sum(int((sample.token_ids < 0).sum()) for sample in samples)
    num = sum(len(sample.token_ids) for sample in samples)
    pixels = w / 4 * family.bytes_per_token * num_image
    counted = {
        "pixels": pixels,
        "cache": min(pixels, PIXEL_CACHE_BYTES),
        "tower": image_bytes(config, model, size, w) * num_image - pixels,
        "language model": activation_bytes(size, w, 1, recomputes=True) * num,
    }
    counted["sum"] = sum(counted.values())
    return {name: num_bytes / MIB for name, num_bytes in counted.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--edge", type=int, default=1000, help="pixels of a side")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        samples = make_samples(model, args.images, args.edge)
        tokens = 1024 + sum(len(sample.token_ids) for sample in samples)
        flags = f"--algorithm sft --model {model} --out {folder}/run --data.train x.jsonl "
        flags += f"--learner.microbatch_tokens {tokens} --learner.activations recompute "
        config = parse_config((flags + f"--learner.dtype {args.dtype} --device cpu").split())
        ranks = init_ranks(60, is_sharded=is_sharded(config))
        algorithm = make_algorithm(config.algorithm, config.algo)
        learner = make_learner(config, algorithm, "policy", ranks)
        before = peak_mib("cpu")
        minibatches, _ = learner.shard(samples)
        learner.step(minibatches, 0)
        measured = peak_mib("cpu") - before
        counted = counted_mib(config, model, samples)
    print(f"measured: {measured:,.0f} MiB; counted: ", end="")
    print(", ".join(f"{name} {size:,.0f}" for name, size in counted.items()))


if __name__ == "__main__":
    main()
