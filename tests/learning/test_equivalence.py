"""One table: every option, on every mesh, however a batch is split, has the loss and the gradient of
plain autograd over whole logits (oracle.py), which are TRL's where TRL computes the same.

As a program it is one rank of the comparison.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from kit import answer, assert_same, make_learner, of_ranks, sample
from models_table import make_family
from oracle import Oracle, old_logprobs, rollout_logprobs
from safetensors.torch import load_file, save_file
from test_experts import imitated
from test_learner import ragged_samples
from test_trees import forest
from tiny_vision_model import VISION_MODELS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rl_core.data.images import read_image
from rl_core.distributed import Mesh, Ranks, on_mesh
from rl_core.learning.padded_forward import choose_forward
from rl_core.metrics import reduce_metrics

SGD = "--optim.name sgd --optim.lr 1 --optim.betas 0,0 --optim.eps 0 --optim.max_grad_norm 0"
KEPT = 5  # Most ids that a token was drawn from.
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 104,
    "num_labels": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "dtype": "float32",
}
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
# Name -> (architecture, changes of SIZES). Sizes that tp divides and tp x dp does not.
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "intermediate_size": 70}),
    "other": ("qwen3", {"hidden_size": 32, "tie_word_embeddings": False}),
    "judge": ("llama", {"tie_word_embeddings": True}),
    "critic": ("qwen3", {}),
    "qwen2": (
        "qwen2",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 12},
    ),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 6}),
}


def draw_model(folder: Path, arch: str, seed: int = 0, is_scoring: bool = False, **sizes) -> None:
    """Saves a model. Every weight is drawn, norms and biases too, so that none is neutral."""
    from rl_core.tools.tiny_model import character_tokenizer

    kind = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(arch, **SIZES | sizes))
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.data = ("norm" in name) + 0.1 * torch.randn(weight.shape, generator=draw)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def make_models(folder: Path) -> None:
    for seed, (name, (arch, changes)) in enumerate(MODELS.items()):
        draw_model(folder / name, arch, seed, name == "critic", **changes)


def add_score(folder: Path, model: Path) -> None:
    """Copies a model that sees, with the head of a classifier, in the shape of an export."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    weights["score.weight"] = 0.1 * torch.randn((1, 48), generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = [config["architectures"][0].replace("ConditionalGeneration", "SequenceClassification")]
    text = json.dumps(config | {"architectures": names, "id2label": {"0": "LABEL_0"}})
    (folder / "config.json").write_text(text)


@pytest.fixture(scope="session")
def models(made_once, make_model) -> Callable[[str], str]:
    """models(name) -> folder of a model of MODELS, or a tiny one of a family."""

    def get(name: str) -> str:
        if name.startswith("scorer"):
            arch = name.removeprefix("scorer ")
            model = make_model(arch, hidden=48, seed=2)
            return str(made_once(f"scorer_{arch}", lambda folder: add_score(folder, model)))
        if name in MODELS:
            return str(made_once("equivalence_models", make_models) / name)
        if name in VISION_MODELS:
            return str(make_model(name, hidden=48))
        if name == "seer":
            return str(make_model("qwen2_5_vl", hidden=48, seed=1))
        return str(made_once(f"family_{name}", lambda folder: make_family(folder, name)))

    return get


def pairs(seed: int = 0) -> list:
    """Pairs of replies behind one prompt each, the chosen one first, with a margin."""
    draw, samples = random.Random(seed), []
    for group in range(6):
        prompt = [draw.randrange(8, 104) for _ in range(12)]
        for margin in (0.3, 0.0):
            reply = [draw.randrange(8, 104) for _ in range(draw.randint(2, 9))]
            mask = [0] * len(prompt) + [1] * len(reply)
            samples.append(sample(prompt + reply, mask, margin, f"{group}"))
    return samples


def labelled() -> list:
    """Replies with their labels, and behind each the mismatched one. Their KL is above 0."""
    samples = pairs(3)
    for s, sign in zip(samples, [1, 0, -1, 0] * 3, strict=True):
        s.advantages = (sign * s.loss_mask).astype("float32")
    return samples


def with_experts(samples: list) -> list:
    """Two of four experts at random for each token, those of a prompt for all that share it."""
    for s in samples:
        prompt, drawn = int(s.loss_mask.argmax()), []
        for tokens, seed in ((prompt, s.group_id), (None, str(s.token_ids.tolist()))):
            draw = random.Random(seed)
            for _ in s.token_ids[len(drawn) : tokens]:
                drawn.append([draw.sample(range(4), 2) for _ in range(2)])
        s.experts = np.array(drawn[:-1], np.int16)
    return samples


def picture(number: int, height: int = 16, width: int = 24, model: str = "") -> list:
    """[an image of 8 x 8 pixels a token, its tokens between those of its begin and end]."""
    draw = np.random.RandomState(number)
    image = read_image(draw.randint(0, 256, (height, width, 3), dtype=np.uint8))
    seen = [-image.key] * (height * width // 64)
    if model:
        seen = FRAMES[model](image, height // 8, width // 8)
    return [image, [104, *seen, 105]]


def mistral3(image, rows: int, columns: int) -> list[int]:
    return [*([*[-image.key] * columns, 108] * rows)[:-1], 109]


def internvl(image, rows: int, columns: int) -> list[int]:
    num_tiles = {(2, 3): 5, (4, 4): 5, (1, 5): 5, (3, 2): 3}[rows, columns]
    return [108, *[-image.key] * num_tiles, 109]


def idefics3(image, rows: int, columns: int) -> list[int]:
    """Two rows of two tiles, one row of a flat image; then the image in one tile."""
    tile, newline, ids = -image.key, 8, []
    for number in range(1 if columns == 5 else 2):
        ids += [108, 110 + 2 * number, tile, 108, 111 + 2 * number, tile, newline]
    return [*ids, newline, 108, 109, tile, 108]


def gemma3(image, rows: int, columns: int) -> list[int]:
    return [8, 8, 108, *[-image.key] * 4, 109, 8, 8]


def gemma4(image, rows: int, columns: int) -> list[int]:
    """At most 70 tokens of the image's proportions."""
    num = {(2, 3): 6 * 10, (4, 4): 8 * 8, (1, 5): 3 * 18, (3, 2): 10 * 6}[rows, columns]
    return [108, *[-image.key] * num, 109]


def llava(image, rows: int, columns: int) -> list[int]:
    return [-image.key] * 4


def llava_next(image, rows: int, columns: int) -> list[int]:
    """One tile of four tokens, then the rows of two by two tiles without those of padding, each with
    a token at its end."""
    num = {(2, 3): 2 * 5, (4, 4): 4 * 5, (1, 5): 0, (3, 2): 4 * 3}[rows, columns]
    return [-image.key] * (4 + num)


FRAMES = {"mistral3": mistral3, "internvl": internvl, "idefics3": idefics3, "gemma3": gemma3}
FRAMES |= {
    "gemma4": gemma4,
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_next,
}
# transformers' gradients of this model in fp32 differ by 1e-5 from those in fp64.
TOLERANCES = {"gemma4": 2e-5}
TWO_RANKS = ("gemma3", "llava_next")  # Families with separate forwards.


def pictures(model: str = "") -> list:
    """Two groups that begin with one image each of one size; a tree whose second turns see images
    of one size; a sample with two images, one twice; groups without an image."""
    draw, samples = random.Random(0), []

    def text(num: int) -> list[int]:
        return [draw.randrange(8, 104) for _ in range(num)]

    def add(group: int, pieces: list, images: list) -> None:
        ids, mask = [], []
        for number, piece in enumerate(pieces):
            ids, mask = ids + piece, mask + [number % 2] * len(piece)
        made = sample(ids, mask, draw.uniform(-1, 1), f"{group}")
        samples.append(dataclasses.replace(made, images=tuple(images)))

    for group in range(2):
        image, seen = picture(group, model=model)
        prompt = text(3) + seen + text(4)
        for _ in range(3):
            add(group, [prompt, text(draw.randint(2, 9))], [image])
    (first, seen), reply = picture(2, 32, 32, model), text(5)
    prompt = text(6) + seen + text(2)
    for number in (3, 3, 4):
        second, seen_later = picture(number, 8, 40, model)
        pieces = [prompt, reply, text(1) * 2 + seen_later + [9], text(4)]
        add(2, pieces, [first, second])
    (one, seen_one), (two, seen_two) = picture(5, model=model), picture(6, 24, 16, model)
    add(3, [seen_one + seen_two + [7] + seen_one, text(6)], [one, two])
    for group in range(4, 8):
        prompt = text(12)
        for _ in range(2):
            add(group, [prompt, [*text(draw.randint(2, 9)), 106]], [])
    return samples


def one_picture(model: str = "") -> list:
    """One sample has an image, so that a rank has none."""
    samples = pictures(model)
    return [samples[0], *(each for each in samples if not each.images)]


def picture_pairs() -> list:
    """pairs(), every other prompt of which begins with an image."""
    samples = []
    for number, each in enumerate(pairs()):
        image, seen = picture(number // 2)
        if number // 2 % 2:
            ids, mask = [*seen, *each.token_ids], [*[0] * len(seen), *each.loss_mask]
            made = sample(ids, mask, max(each.advantages, key=abs), each.group_id)
            each = dataclasses.replace(made, images=(image,))
        samples.append(each)
    return samples


SAMPLES: dict[str, Callable[[], list]] = {
    "alone": lambda: ragged_samples(12),
    "ragged": lambda: ragged_samples(12, shared_prompt=12),
    "forest": lambda: forest(3),
    "deep": lambda: forest(6),
    "pairs": pairs,
    "labelled": labelled,
    "pictures": pictures,
    "one picture": one_picture,
    "picture pairs": picture_pairs,
    **{f"pictures, {model}": functools.partial(pictures, model) for model in FRAMES},
    **{f"one picture, {model}": functools.partial(one_picture, model) for model in TWO_RANKS},
    "mixed": lambda: imitated((60, 3)),
    "replayed": lambda: with_experts(imitated((60, 3))),
}


def make_samples(kind: str, level: float, is_truncated: bool) -> list:
    """Their engine sampled by other logprobs than the learner's. They name the ids that tokens were
    drawn from, an environment, and the prompt of a teacher, for learners that need those."""
    samples = []
    for number, s in enumerate(SAMPLES[kind]()):
        s.rollout_logprobs = (rollout_logprobs(s.token_ids, level).numpy() * s.loss_mask).astype(
            "float32"
        )
        lines, draw = [], random.Random(number)
        for token in s.token_ids[s.loss_mask].tolist() if is_truncated else ():
            ids = {token, *draw.sample(range(104), draw.randint(0, KEPT - 1))}
            lines.append(" ".join(map(str, sorted(ids))))
        read = np.array([9, 10, 11 + number]) if number % 3 else None
        more: dict = {"teacher_ids": read, "kept_ids": lines or None, "env": "xyz"[number % 3]}
        if read is not None and kind == "pictures":
            image, seen = picture(90 + number)
            more |= {"teacher_ids": np.array([9, *seen, 10]), "images": (*s.images, image)}
        samples.append(dataclasses.replace(s, **more))
    return samples


@dataclasses.dataclass
class Case:
    flags: str
    samples: tuple[str, ...] = ("ragged", "forest")
    model: str = "qwen3"
    level: float = -4.6  # Mean of old and rollout logprobs.
    layouts: tuple[str, ...] = ("", "microbatches")
    meshes: tuple[str, ...] = ()


MESHES = {
    "dp": Mesh(dp_shard=2),
    "cp": Mesh(cp=2),
    "tp": Mesh(tp=2),
    "replicas": Mesh(dp_replicate=2),
}
LAYOUTS = {
    "": "",
    "microbatches": "--learner.microbatch_tokens 110",
    "recompute": "--learner.activations recompute --learner.microbatch_tokens 110",
    "offload": "--learner.activations offload",
    "pairs": "--max_prompt_tokens 21 --max_tokens 21 --learner.microbatch_tokens 84",
    "joined pairs": "--max_prompt_tokens 21 --max_tokens 21 --learner.microbatch_tokens 84 "
    "--learner.logprob_microbatch_tokens 300",
    "joined": "--learner.microbatch_tokens 110 --learner.logprob_microbatch_tokens 300",
}
EVERY = tuple(MESHES)
KL = "--algo.reference OTHER --algo.kl_coef"
TRUNCATED = "--sampling.top_k 5 --sampling.temperature 0.7"
TAUGHT = "--algorithm opd --algo.normalize none --algo.teacher OTHER"
SELF = "--algorithm opd --algo.teacher self --algo.teacher_update latest"
OF_ENVS = "--env_path x.py,y.py,z.py --envs.y.teacher JUDGE --envs.z.teacher none"
CRITIC = "--critic.model CRITIC --critic.lr 1"
PPO = f"--algorithm ppo {CRITIC}"
PAIRS = {"samples": ("pairs",), "layouts": ("pairs",)}
TAUGHT_BY_SEER = TAUGHT.replace("OTHER", "SEER")
AUX = "--actors.policy.router_aux_loss_coef 0.5"
REPLAY = "--actors.policy.router_replay true"
SEEN = ("recompute", "microbatches")
PARTS = ("microbatches",)
MOE = {"samples": ("mixed",), "layouts": tuple(LAYOUTS)[:4]}
CASES = {
    "sft": Case("--algorithm sft", ("alone", "ragged", "forest"), layouts=tuple(LAYOUTS)[:4]),
    "grpo": Case("", ("alone", "ragged", "forest"), layouts=tuple(LAYOUTS)[:4], meshes=EVERY),
    "dapo": Case("--algorithm dapo"),
    "dr_grpo": Case("--algorithm dr_grpo", meshes=("dp",)),
    "gspo": Case(
        "--algorithm gspo --algo.clip_low 0.02 --algo.clip_high 0.03", meshes=("dp", "cp")
    ),
    "cispo": Case("--algorithm cispo"),
    "rloo": Case("--algorithm rloo"),
    "reinforce_pp": Case("--algorithm reinforce_pp", meshes=("dp", "cp")),
    "ppo": Case(PPO, meshes=("dp", "cp", "tp")),
    "sequence": Case("--algo.aggregation sequence", meshes=("dp",)),
    "dual clip": Case("--algo.aggregation constant --algo.dual_clip 1.2"),
    "k1": Case(f"{KL} 0.3 --algo.kl k1"),
    "k2, entropy, temperature": Case(
        f"{KL} 0.3 --algo.kl k2 --algo.entropy_coef 0.1 --sampling.temperature 0.7",
        meshes=("cp", "tp"),
    ),
    "gspo k3": Case(f"--algorithm gspo {KL} 0.3 --algo.clip_low 0.02 --algo.clip_high 0.03"),
    "gspo, kl in advantage": Case(f"--algorithm gspo {KL} 0.3 --algo.kl_in advantage"),
    "rloo, kl": Case(f"--algorithm rloo {KL} 0.1"),
    "reinforce_pp, kl": Case(f"--algorithm reinforce_pp {KL} 0.1", layouts=("", "joined")),
    "ppo, kl": Case(f"{PPO} {KL} 0.1 --critic.gamma 0.98", layouts=("", "joined")),
    "ppo, kl in advantage": Case(f"{PPO} {KL} 0.1 --algo.kl_in advantage --algo.normalize none"),
    "ppo, two kls": Case(
        f"{PPO} {KL} 0.1 --algo.kl k2 --algo.kl_in advantage --algo.kl_reward k1,0.2 "
        "--algo.aggregation sequence"
    ),
    "cispo, gae": Case(f"--algorithm cispo --algo.advantage gae {CRITIC}"),
    "kl in advantage": Case(f"{KL} 0.1 --algo.kl_in advantage", meshes=("dp",)),
    "kl in both": Case("--algo.reference OTHER --algo.kl_reward k1,0.3 --algo.kl_loss k3,0.2"),
    "kl in both, k2": Case(f"--algo.kl_reward k2,0.3 {KL} 0.2 --algo.kl k2"),
    "kl in reward, k3": Case(f"--algo.kl_loss k2,0.2 {KL} 0.3 --algo.kl_in reward"),
    "tis": Case("--algo.importance_correction tis --algo.correction_range 0.5,1.1"),
    "mask": Case("--algorithm cispo --algo.importance_correction mask"),
    "sequence mask": Case(
        "--algo.importance_correction sequence_mask --algo.correction_range 0.9,1.1"
    ),
    "top-k": Case(f"{TRUNCATED} --algo.entropy_coef 0.1 {KL} 0.2", level=-1.4, meshes=("cp", "tp")),
    "teacher": Case(f"{TAUGHT} --sampling.temperature 0.6", meshes=("dp", "cp")),
    "teacher, half, rewards": Case("--algo.teacher OTHER --algo.teacher_coef 0.5"),
    "reverse KL": Case(f"{TAUGHT} --algo.teacher_loss reverse_kl --algo.teacher_coef 0.5"),
    "forward KL, sequence": Case(
        f"{TAUGHT} --algo.teacher_loss forward_kl --algo.aggregation sequence"
    ),
    "jsd": Case(
        f"{TAUGHT} --algo.teacher_loss jsd --algo.teacher_beta 0.3", meshes=("dp", "cp", "tp")
    ),
    "forward KL, top-k": Case(f"{TAUGHT} --algo.teacher_loss forward_kl {TRUNCATED}", level=-1.4),
    "self": Case(f"{SELF} --algo.normalize none", meshes=("dp", "cp", "tp")),
    "self, rewards": Case("--algo.teacher self --algo.teacher_update latest"),
    "self, reverse KL": Case(f"{SELF} --algo.teacher_loss reverse_kl --sampling.temperature 0.6"),
    "self, top-k": Case(f"{SELF} {TRUNCATED}", level=-1.4),
    "envs": Case(f"{TAUGHT} {OF_ENVS}", meshes=("dp",)),
    "envs, reverse KL": Case(f"{TAUGHT} {OF_ENVS} --algo.teacher_loss reverse_kl", meshes=("dp",)),
    "envs, top-k": Case(f"{TAUGHT} {OF_ENVS} {TRUNCATED}", level=-1.4),
    "ppo, top-k": Case(f"{PPO} {TRUNCATED}", level=-1.4),
    "gspo, top-k": Case(f"--algorithm gspo {TRUNCATED}", level=-1.4),
    "dpo": Case("--algorithm dpo --algo.reference OTHER", meshes=EVERY, **PAIRS),
    "rm": Case("--algorithm rm", model="critic", meshes=("dp", "cp"), **PAIRS),
    "simpo": Case("--algorithm simpo --preference.beta 1.5", meshes=("dp",), **PAIRS),
    "orpo": Case("--algorithm orpo --preference.beta 0.5", meshes=("cp",), **PAIRS),
    "kto": Case(
        "--algorithm kto --algo.reference OTHER --preference.beta 0.3 "
        "--preference.desirable_weight 0.7 --preference.undesirable_weight 1.3",
        ("labelled",),
        layouts=("joined pairs", "pairs"),
        meshes=("dp", "cp"),
    ),
    "qwen2": Case("", ("deep",), "qwen2", layouts=PARTS, meshes=("cp", "tp")),
    "llama": Case("--algorithm sft", ("deep",), "llama", layouts=PARTS, meshes=("tp",)),
    "mistral": Case("", ("deep",), "mistral", layouts=PARTS),
    "gpt_oss": Case(f"--algorithm sft {AUX}", model="gpt_oss", **MOE),
    "gpt_oss, windows": Case(
        "--algorithm sft", ("deep",), "gpt_oss", layouts=PARTS, meshes=("cp",)
    ),
    "deepseek_v3": Case("--algorithm sft", ("forest",), "deepseek_v3", layouts=PARTS),
    "gemma2": Case("--algorithm sft", ("deep",), "gemma2", layouts=PARTS),
    "lfm2": Case(f"{TAUGHT} --algo.teacher_loss forward_kl", ("forest",), "lfm2", layouts=("",)),
    "experts": Case(
        f"--algorithm sft {AUX}",
        ("mixed", "forest"),
        "qwen3_moe",
        layouts=MOE["layouts"],
        meshes=EVERY,
    ),
    "qwen2_5_vl": Case("", ("pictures",), "qwen2_5_vl", layouts=SEEN, meshes=("dp", "replicas")),
    "one image": Case("", ("one picture",), "qwen2_5_vl", layouts=("",), meshes=("dp",)),
    **{
        name: Case("--algorithm sft", ("pictures",), name, layouts=("",))
        for name in ("qwen2_vl", "qwen3_vl_moe")
    },
    "images, kl": Case(
        "--algo.reference SEER --algo.kl_coef 0.3", ("pictures",), "qwen2_5_vl", layouts=("joined",)
    ),
    "images, dpo": Case(
        "--algorithm dpo --algo.reference SEER", ("picture pairs",), "qwen3_vl", layouts=("",)
    ),
    "images, ppo": Case(
        f"{PPO.replace('CRITIC', 'SCORER')} --algo.reference SEER --algo.kl_coef 0.1",
        ("pictures",),
        "qwen2_5_vl",
        layouts=("joined",),
        meshes=("dp",),
    ),
    **{
        f"ppo, {model}": Case(
            PPO.replace("CRITIC", "SCORER"), (f"pictures, {model}",), model, layouts=("",)
        )
        for model in TWO_RANKS
    },
    "images, teacher": Case(
        f"{TAUGHT_BY_SEER} --algo.teacher_loss forward_kl --sampling.temperature 0.6",
        ("pictures",),
        "qwen2_5_vl",
        layouts=("",),
        meshes=("dp",),
    ),
    "images, envs": Case(
        f"{TAUGHT_BY_SEER} --algo.teacher_update latest --env_path x.py,y.py,z.py "
        "--envs.y.teacher self --envs.z.teacher self",
        ("pictures",),
        "qwen2_5_vl",
        layouts=("",),
        meshes=("dp",),
    ),
    **{
        f"images, rm, {name}": Case(
            "--algorithm rm", ("picture pairs",), f"scorer {name}", layouts=("",), meshes=("dp",)
        )
        for name in ("qwen3_vl", "qwen3_5")
    },
    "language, ppo": Case(
        f"{PPO.replace('CRITIC', 'SCORER')} --learner.train projector,language",
        ("pictures",),
        "qwen2_5_vl",
        layouts=("recompute",),
    ),
    "projector, rm": Case(
        "--algorithm rm --learner.train projector",
        ("picture pairs",),
        "scorer qwen3_vl",
        layouts=("",),
    ),
    "qwen3_vl": Case(
        "--algorithm sft",
        ("pictures",),
        "qwen3_vl",
        layouts=("recompute", "joined"),
        meshes=("dp",),
    ),
    "language": Case(
        "--algorithm sft --learner.train language",
        ("pictures",),
        "qwen2_5_vl",
        layouts=("recompute",),
        meshes=("dp",),
    ),
    "tower, kl": Case(
        "--algo.reference SEER --algo.kl_coef 0.3 --learner.train vision",
        ("pictures",),
        "qwen2_5_vl",
        layouts=("recompute",),
    ),
    "projector, dpo": Case(
        "--algorithm dpo --algo.reference SEER --learner.train projector,language",
        ("picture pairs",),
        "qwen3_vl",
        layouts=("",),
    ),
    "projector": Case(
        "--learner.train projector", ("one picture",), "qwen2_5_vl", layouts=("",), meshes=("dp",)
    ),
    **{
        model: Case("", ("pictures",), model, layouts=("",))
        for model in ("glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe")
    },
    **{
        model: Case("", (f"pictures, {model}",), model, layouts=("",))
        for model in FRAMES
        if model not in TWO_RANKS
    },
    **{
        f"{model}, one image": Case(
            "", (f"one picture, {model}",), model, layouts=("",), meshes=("dp",)
        )
        for model in TWO_RANKS
    },
    "replay": Case(
        REPLAY, ("replayed",), "mixtral", layouts=MOE["layouts"][:3], meshes=("dp", "cp", "tp")
    ),
}
# A case with the samples of most is one of its loss: forests in microbatches have all that others
# have. Of other cases all layouts, with the first samples.
ROWS = [
    pytest.param(name, kind, layout, id=f"{name}, {kind}, {layout}")
    for name, case in CASES.items()
    for kind in (case.samples[1:] if case.samples == Case.samples else case.samples)
    for layout in (case.layouts if kind == case.samples[0] else case.layouts[1:2])
]
ON_MESHES = [(name, mesh) for name, case in CASES.items() for mesh in case.meshes]


def flags_of(case: Case, models: Callable[[str], str]) -> str:
    flags = case.flags
    for name in ("other", "judge", "critic", "seer", "scorer"):
        if name.upper() in flags:
            path = models(f"scorer {case.model}" if name == "scorer" else name)
            flags = flags.replace(name.upper(), path)
    return flags


def update(
    model: str, samples: list, level: float, *flags: Any, ranks: Ranks | None = None
) -> tuple[Any, dict[str, float], dict[str, torch.Tensor]]:
    """(learner, metrics over all ranks, what one step of SGD with rate 1 takes away from each
    weight)."""
    learner = make_learner(model, SGD, *flags, ranks=ranks)
    # All other families are packed. choose_forward() would fall back to padded rows if that failed.
    if learner.policy.hf.config.model_type in ("lfm2", "qwen3_5", "qwen3_5_moe"):
        choose_forward(learner.policy, learner.ranks)
    before = named_weights(learner)
    minibatches, _ = learner.shard(samples)
    learner.annotate(minibatches)
    for batch in minibatches[0].batches if learner.algorithm.is_rl else ():
        labels = batch.labels[:, 0] if batch.labels.ndim == 2 else batch.labels
        batch.old_logprobs = old_logprobs(labels, level).float()
    row = reduce_metrics(learner.step(minibatches, 0), learner.ranks)
    after = named_weights(learner)
    grads = {name: (weight - after[name]).float() for name, weight in before.items()}
    return (learner, minibatches), row, grads


def named_weights(learner) -> dict[str, torch.Tensor]:
    weights = {}
    for each in learner.trained():
        weights |= {f"{each.name} {name}": w.clone() for name, w in each.named_weights()}
    return weights


@pytest.fixture(scope="module")
def expected(models) -> Callable[[str, str], tuple]:
    """expected(case, samples) -> (loss, gradients) by the oracle."""

    @functools.cache
    def get(name: str, kind: str) -> tuple:
        case = CASES[name]
        learner = make_learner(models(case.model), flags_of(case, models))
        samples = make_samples(kind, case.level, "top_k" in case.flags)
        loss, grads = Oracle(learner.config, learner.algorithm, case.level)(samples)
        if (parts := learner.config.learner.train) is not None:
            grads = {n: g for n, g in grads.items() if named_part(n) in ["", *parts.split(",")]}
        return loss, grads

    return get


def named_part(weight: str) -> str:
    """The part of a Qwen-VL model that has this weight."""
    if "score." in weight:  # A head is always trained.
        return ""
    if "visual." not in weight:
        return "language"
    return "projector" if "merger" in weight else "vision"


@pytest.mark.parametrize("name, kind, layout", ROWS)
def test_the_gradient_is_that_of_whole_logits(name, kind, layout, models, expected):
    case = CASES[name]
    samples = make_samples(kind, case.level, "top_k" in case.flags)
    flags = flags_of(case, models), LAYOUTS[layout]
    (_, [minibatch]), row, grads = update(models(case.model), samples, case.level, *flags)
    if "microbatch_tokens" in LAYOUTS[layout]:
        assert len(minibatch.batches) > 1
    loss, wanted = expected(name, kind)
    assert row["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
    assert_same(grads, wanted, TOLERANCES.get(case.model, 5e-6))


def compare(ranks: Ranks, folder: str, paths: str) -> dict:
    """Every rank: losses; writes gradients of each case on each mesh."""
    known, losses = dict(pair.split("=") for pair in paths.split("|")), {}
    for mesh_name, mesh in MESHES.items():
        divided = on_mesh(ranks, mesh)
        for name in [name for name, case in CASES.items() if mesh_name in case.meshes]:
            case = CASES[name]
            samples = make_samples(case.samples[0], case.level, "top_k" in case.flags)
            mine = [s for s in samples if int(s.group_id) % 2 == ranks.rank]
            flags = flags_of(case, known.__getitem__), LAYOUTS[case.layouts[-1]]
            _, row, grads = update(known[case.model], mine, case.level, *flags, ranks=divided)
            losses[f"{name}, {mesh_name}"] = row["loss"]
            torch.save(grads, f"{folder}/{name}, {mesh_name}.{ranks.rank}")
    return losses


@pytest.fixture(scope="module")
def on_two_ranks(models, tmp_path_factory) -> Callable[[str, str], list]:
    """on_two_ranks(case, mesh) -> (loss, gradients) of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    names = {*MODELS, "seer", "scorer qwen2_5_vl", *(case.model for case in CASES.values())}
    paths = "|".join(f"{name}={models(name)}" for name in sorted(names))

    losses = of_ranks(2, __file__, "compare", folder, paths, timeout_s=300)

    def get(name: str, mesh: str) -> list:
        key = f"{name}, {mesh}"
        return [
            (of_rank[key], torch.load(folder / f"{key}.{rank}"))
            for rank, of_rank in enumerate(losses)
        ]

    return get


@pytest.mark.parametrize("name, mesh", ON_MESHES)
def test_two_ranks_take_the_gradient_of_whole_logits(name, mesh, on_two_ranks, expected):
    loss, wanted = expected(name, CASES[name].samples[0])
    for of_rank, grads in on_two_ranks(name, mesh):
        assert of_rank == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert_same(grads, wanted, TOLERANCES.get(CASES[name].model, 5e-6))


def trl_gradients(
    model: str, samples: list, reference: str | None, folder: Path, **options: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradient of TRL's GRPOTrainer on one batch made by hand."""
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(
        output_dir=str(folder),
        max_completion_length=60,
        num_generations=2,
        use_bias_correction_kl=False,  # Ours is not weighted by the ratio.
        per_device_train_batch_size=len(samples),
        gradient_accumulation_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **options,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    columns = [(s.token_ids, s.loss_mask, [1] * len(s.token_ids)) for s in samples]
    ids, mask, is_token = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row).long() for row in rows], True)
        for rows in zip(*columns, strict=True)
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": is_token[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": is_token[:, 1:],
        "tool_mask": mask[:, 1:],
        "num_items_in_batch": mask.sum(),
        "advantages": torch.tensor([max(s.advantages, key=abs) for s in samples]),
        "old_per_token_logps": old_logprobs(ids[:, 1:]).float(),
    }
    if reference:
        # Padding stands last and is masked.
        logits = AutoModelForCausalLM.from_pretrained(reference)(ids).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        inputs["ref_per_token_logps"] = logprobs.detach()
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    grads = {f"policy {n}": p.grad for n, p in trainer.model.named_parameters()}
    return loss.item(), grads


HIGH = "--algo.clip_high 0.28"
SEQUENCE = f"--algo.aggregation sequence {HIGH}"
BOUNDS = {"epsilon": 0.2, "epsilon_high": 0.28}
GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}


@pytest.mark.parametrize(
    "flags, options",
    [
        (SEQUENCE, {"loss_type": "grpo", **BOUNDS}),
        (
            f"{SEQUENCE} --algo.dual_clip 1.4 --algo.kl_coef 0.3",
            {"loss_type": "grpo", "delta": 1.4, "beta": 0.3, **BOUNDS},
        ),
        (f"{HIGH} --algo.kl_coef 0.3", {"loss_type": "bnpo", "beta": 0.3, **BOUNDS}),
        ("--algorithm dapo", {"loss_type": "dapo", **BOUNDS}),
        (f"--algorithm dr_grpo {HIGH}", {"loss_type": "dr_grpo", **BOUNDS}),
        ("--algorithm cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
        (CASES["gspo"].flags, {"loss_type": "grpo", **GSPO}),
    ],
)
def test_the_loss_is_trls_where_it_computes_the_same(flags, options, models, tmp_path):
    samples, model, reference = ragged_samples(8), models("qwen3"), None
    if "kl_coef" in flags:
        reference = models("other")
        flags += f" --algo.reference {reference}"
    loss, wanted = trl_gradients(model, samples, reference, tmp_path, **options)
    _, row, grads = update(model, samples, -4.6, flags)
    assert row["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
    assert_same(grads, wanted, 5e-6)


if __name__ == "__main__":
    answer(globals())
