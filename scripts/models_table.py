"""Writes docs/models.md: the model families that train, and their numerical differences in nats.

    python scripts/models_table.py --out docs/models.md
    python scripts/models_table.py gemma2 gpt_oss          # prints these rows

Each family is a tiny random model of the family's configuration class. One SFT step, two GRPO steps
and two GRPO steps with adapters are runs of rl_core.train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
import zstandard
from safetensors.torch import load_file
from script_tools import make_parser, read_metrics, write_rows
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from rl_core.data.image_families import FAMILIES as SEEING
from rl_core.data.pretrained import from_config, load_pretrained
from rl_core.models.loading import model_class
from rl_core.tools.tiny_model import character_tokenizer
from rl_core.train import main as train

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 104,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 1, "initializer_range": 0.1}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_experts": 4,
}
EXPERTS |= {
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WINDOW = {"sliding_window": 5}
VISION |= {"image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
PROJECTOR = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
CHUNKS = {"attention_chunk_size": 5, "intermediate_size_mlp": 96}
LAYERS = ["linear_attention", "full_attention"]
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
PARTIAL_ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
# Model type -> differences from SIZES. Dropout, caps and scales have values that show if they are
# ignored. known_to() drops the fields that a family's configuration does not have.
FAMILIES = {
    **{
        name: {}
        for name in (
            "llama",
            "qwen2",
            "qwen3",
            "gemma",
            "smollm3",
            "olmo2",
            "glm",
            "glm4",
            "ernie4_5",
        )
    },
    **{name: {} for name in ("hunyuan_v1_dense", "apertus", "nemotron", "bloom")},
    **dict.fromkeys(("mistral", "ministral", "ministral3", "gemma3_text", "olmo3"), WINDOW),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"), EXPERTS),
    "phi": {"attention_dropout": 0.2},
    "phi3": {"resid_pdrop": 0.2},
    "gemma2": WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "starcoder2": {"residual_dropout": 0.2},
    "stablelm": PARTIAL_ROPE,
    "seed_oss": {"residual_dropout": 0.3, "attention_dropout": 0.2},
    "exaone4": WINDOW | {"sliding_window_pattern": 2},
    "cohere": {"logit_scale": 0.4},
    "cohere2": WINDOW | {"logit_scale": 0.4},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "gpt2": {"resid_pdrop": 0.3},
    "gpt_neox": {"hidden_dropout": 0.2},
    "gptj": {"rotary_dim": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.3, "layerdrop": 0.2},
    "falcon": {"new_decoder_architecture": True, "alibi": False},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": MAMBA | {"lm_head_multiplier": 0.5},
    "mamba": {"state_size": 8},
    "qwen3_next": EXPERTS | LINEAR | {"layer_types": LAYERS},
    "gpt_oss": EXPERTS | WINDOW,
    "mixtral": EXPERTS | {"router_jitter_noise": 0.3},
    "granitemoe": EXPERTS | {"logits_scaling": 3.0},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "deepseek_v3": EXPERTS | LATENT | {"num_key_value_heads": 4},
    "llama4_text": EXPERTS | CHUNKS,
    "gemma3": {"text_config": SIZES, "vision_config": VISION},
    "qwen2_5_vl": {"text_config": SIZES | MROPE, "vision_config": VISION},
    "qwen3_vl": {
        "text_config": SIZES | MROPE,
        "vision_config": VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "text_config": SIZES | LINEAR | MROPE | {"layer_types": LAYERS},
        "vision_config": VISION,
    },
    "mistral3": {
        "text_config": SIZES | WINDOW | {"model_type": "mistral"},
        "vision_config": VISION,
    },
    "llama4": {"text_config": SIZES | EXPERTS | CHUNKS, "vision_config": VISION | PROJECTOR},
}
MARK = "<!-- What follows is written by scripts/models_table.py. -->"
END = "<!-- The end of what scripts/models_table.py writes. -->"
COLUMNS = ("forward", "SFT", "GRPO", "LoRA", "export", "reload", "engine")
TALK = [("say", "12 34"), ("again", "5"), ("more", "678 9 0"), ("end", "1")]
ROWS = [
    {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
    for a, b in TALK
]
ENV = 'def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]\n'
ENV += "def reward_fn(completion): return sum(map(ord, completion)) / 1000\n"
LIMITS = "--max_prompt_tokens 24 --max_tokens 12 --tasks_per_step 4 --optim.lr 1e-2"


def family_config(name: str) -> PretrainedConfig:
    usual, sizes = AutoConfig.for_model(name), FAMILIES[name]
    if "text_config" not in sizes:
        return AutoConfig.for_model(name, **known_to(usual, SIZES | sizes))
    configs = {kind: known_to(getattr(usual, kind), values) for kind, values in sizes.items()}
    return AutoConfig.for_model(name, **configs)


def known_to(config: PretrainedConfig, sizes: dict) -> dict:
    """The sizes that are fields of this configuration. transformers would keep unknown fields too,
    and code that reads them would fail with real models."""
    names = {field.name for field in dataclasses.fields(config)} | {
        "model_type",
        *config.attribute_map,
    }
    return {name: value for name, value in sizes.items() if name in names}


def make_family(folder: Path, name: str):
    """Saves a model of random weights and returns its tokenizer. Biases and norms are random too,
    which shows if one is ignored."""
    torch.manual_seed(0)
    config = family_config(name)
    model = from_config(model_class(config), config)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.05 * torch.randn_like(value)
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return load_pretrained(AutoTokenizer, folder)


def load_plain(folder: Path):
    """The model by transformers alone. Raises ValueError if the files do not fit the model."""
    model = model_class(load_pretrained(AutoConfig, folder))
    model, info = load_pretrained(model, folder, output_loading_info=True)
    if strange := {*info["missing_keys"], *info["unexpected_keys"]}:
        raise ValueError(f"transformers misses or does not know {min(strange)}")
    return model.eval()


def plain_logprobs(model, prompt: list[int], completion: list[int]):
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]
    return logits.float().log_softmax(-1)[range(len(completion)), completion]


def plain_loss(folder: Path, tokenizer) -> tuple[float, float]:
    """Mean loss over the trained tokens of ROWS, and the norm of its gradient."""
    model, logprobs = load_plain(folder), []
    for row in ROWS:
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)[
            "input_ids"
        ]
        ids = tokenizer.apply_chat_template(row["messages"])["input_ids"]
        logprobs.append(plain_logprobs(model, prompt, ids[len(prompt) :]))
    loss = -torch.cat(logprobs).mean()
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm(
        p.grad for p in model.parameters() if p.grad is not None
    ).item()


def run(folder: Path, out: str, *flags) -> list[dict]:
    """The metrics of each step. Raises ValueError with the last line of a failed run."""
    output = io.StringIO()
    words = ["--model", folder / "model", "--out", folder / out, *LIMITS.split(), *flags]
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        code = train([str(word) for word in words])
    if code:
        line = output.getvalue().splitlines()[-1]
        raise ValueError(line.removeprefix("error: ").replace(f"{folder}/", ""))
    (folder / out / "output.txt").write_text(output.getvalue())
    return read_metrics(folder / out)


class Trial:
    """The checks of one family: `row` has a result per column, `reasons` the failures."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.row, self.reasons = folder, dict.fromkeys(COLUMNS, "-"), []
        self.tokenizer = make_family(folder / "model", name)
        write_rows(folder / "rows.jsonl", ROWS)
        (folder / "env.py").write_text(ENV)

    def attempt(self, column: str, difference) -> None:
        try:
            result = difference()
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = kind + " ".join(str(error).split())
            self.reasons.extend([reason] * (reason not in self.reasons))
            self.row[column] = "**no**"
            return
        if isinstance(result, str):
            self.row[column] = result
            return
        self.row[column] = f"{result:.0e}" if result >= 1e-7 else "0"
        if result > 1e-4:
            self.reasons.append(f"{column} differs by {result:.2g}")

    def sampled(self, out: str, *flags) -> str:
        grpo = ["--env_path", self.folder / "env.py", "--group_size", 2, "--num_steps", 2]
        *_, last = run(self.folder, out, *grpo, *flags)
        kl = last["learn/policy/mismatch_kl_nats_max"]
        if kl > 1e-6:
            raise ValueError(f"{out}: engine and learner differ by a KL of {kl:.2g}")
        return "yes"

    def engine_difference(self) -> float:
        """Largest difference of the first step's logprobs from those of transformers."""
        model, differences = load_plain(self.folder / "model"), []
        with zstandard.open(self.folder / "grpo/rollouts/step_000001.jsonl.zst", "rt") as lines:
            records = [json.loads(line) for line in lines]
        for turn in [turn for record in records for turn in record["turns"]]:
            ids = turn["completion"]["token_ids"]
            logprobs = torch.tensor(turn["completion"]["logprobs"])
            plain = plain_logprobs(model, turn["new_ids"], ids)
            differences.append((plain - logprobs).abs().max().item())
        return max(differences)

    def trained(self) -> float:
        rows = self.folder / "rows.jsonl"
        sft = ["--algorithm", "sft", "--data.train", rows, "--data.eval", rows]
        before, step, _ = run(self.folder, "sft", *sft, "--num_steps", 1, "--eval_every", 1)
        is_padded = "padded" in (self.folder / "sft/output.txt").read_text()
        self.row["forward"] = "padded" if is_padded else "packed"
        loss, norm = plain_loss(self.folder / "model", self.tokenizer)
        return max(abs(before["eval/loss"] - loss), abs(step["learn/policy/grad_norm"] / norm - 1))

    def exported(self) -> str:
        shapes = []
        for name in ("model", "sft/hf/policy"):
            weights = load_file(self.folder / name / "model.safetensors")
            shapes.append({(name, value.shape) for name, value in weights.items()})
        before, after = shapes
        if before != after:
            raise ValueError(f"the export differs from the checkpoint in {min(before ^ after)[0]}")
        return "yes"

    def reloaded(self) -> float:
        after = read_metrics(self.folder / "sft")[-1]["eval/loss"]
        return abs(after - plain_loss(self.folder / "sft/hf/policy", self.tokenizer)[0])


def try_family(folder: Path, name: str) -> tuple[dict[str, str], list[str]]:
    """(column -> result, reasons of failures)"""
    trial = Trial(folder, name)
    trial.attempt("SFT", trial.trained)
    trial.attempt("GRPO", lambda: trial.sampled("grpo"))
    trial.attempt("LoRA", lambda: trial.sampled("lora", "--actors.policy.lora.rank", 2))
    if trial.row["SFT"] != "**no**":
        trial.attempt("export", trial.exported)
        trial.attempt("reload", trial.reloaded)
    if trial.row["GRPO"] != "**no**":
        trial.attempt("engine", trial.engine_difference)
    return trial.row, trial.reasons


def summary(results: dict[str, tuple[dict[str, str], list[str]]]) -> list[str]:
    """Lines of the page: families by kind of forward, largest differences, failures."""
    lines = []
    for kind in ("packed", "padded"):
        names = [name for name, (row, _) in results.items() if row["forward"] == kind]
        lines += [f"- **{kind}**: {', '.join(names)}"] * bool(names)
    columns = {column: [row[column] for row, _ in results.values()] for column in COLUMNS}
    numbers = {
        column: max((value for value in values if value[0].isdigit()), key=float, default="-")
        for column, values in columns.items()
        if column in ("SFT", "reload", "engine")
    }
    largest = ", ".join(f"{column} {value}" for column, value in numbers.items())
    lines += [f"- **largest differences**: {largest}", f"- **see images**: {', '.join(SEEING)}"]
    for name, (row, reasons) in results.items():
        failed = ", ".join(column for column in COLUMNS if row[column] in ("**no**", "-"))
        lines += [f"- **{name}**, {failed or 'differs'}: {'; '.join(reasons)}"] * bool(reasons)
    return lines


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "families", nargs="*", help="model types of transformers; by default all of FAMILIES"
    )
    parser.add_argument("--out", help="file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = {}
    for name in args.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            results[name] = try_family(Path(folder), name)
        print(name, *results[name][0].values(), *results[name][1], flush=True)
    lines = summary(results)
    if args.out:
        before, _, rest = Path(args.out).read_text().partition(MARK)
        after = rest.partition(END)[2]
        versions = (
            f"torch {torch.__version__}, transformers {transformers.__version__}, Python "
            f"{platform.python_version()}"
        )
        lines[:0] = [
            f"`python scripts/models_table.py --out {args.out}`, {datetime.now(UTC):%Y-%m-%d}, "
            f"fp32 on a CPU, {versions}.",
            "",
        ]
        text = "\n".join([MARK, "", *lines, "", END])
        Path(args.out).write_text(before + text + after)


if __name__ == "__main__":
    main()
