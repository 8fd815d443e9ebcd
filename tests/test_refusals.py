"""What is refused, and what the one line says. All of it before a model loads and before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit import words
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_core.train import main

RL = "--model {model} --env_path {dir}/letters.py --max_tokens 60 --max_prompt_tokens 40"
FIT = "--model {model} --max_tokens 40 --max_prompt_tokens 24 --data.train {dir}/rows.jsonl --algorithm sft"
PAIRS = FIT.replace("rows.jsonl --algorithm sft", "pairs.jsonl")
TWO = "--actors.bob.model {model} --actors.alice.model {model} --env_path {dir}/talk.py --max_prompt_tokens 40"
LORA = "--model {model} --env_path {dir}/letters.py --actors.policy.lora.rank 4"
SHARE = "--actors.bob.model {model} --actors.bob.lora.rank 4 --env_path {dir}/talk.py"

# Base -> further arguments -> fragments of the message, with " ... " between them.
REFUSED = {
    RL: {
        "--grop_size 4": "--grop_size ... did you mean 'group_size'",
        "--optim.lr fast": "--optim.lr=fast",
        "--model {out}/nothing": "nothing",
        "--model {out}/bare": "chat template ... .chat_template FILE",
        "--out {dir}": "exists ... --resume",
        "--max_prompt_tokens 3": "tokens ... --max_prompt_tokens=3 ... --data.skip_long",
        "--learner.minibatches 3": "--learner.minibatches=3 ... divide ... try",
        "--group_size 1": "--group_size=1 ... --algo.advantage none",
        "--algo.advantage custom": "advantage_fn",
        "--algo.objective cispo --algo.ratio sequence": "objective clip",
        "--algo.dual_clip 0.9": "above 1",
        "--algo.objective cispo --algo.dual_clip 3": "objective clip",
        "--algo.clip_low 1.5": "0..1",
        "--algo.clip_high=-1": "at least 0",
        "--algo.kl k1": "--algo.kl_coef",
        "--algo.kl_coef=-0.1": "at least 0",
        "--algo.correction_high 3": "--algo.correction",
        "--algo.correction mask --algo.correction_low 3": "between",
        "--algo.correction tis --algo.correction_low 0.1": "upper bound",
        "--algo.overlong_buffer 5": "--algo.overlong soft",
        "--algo.overlong soft --algo.overlong_buffer 70": "0..--max_tokens=60",
        "--algo.refill_rounds=-1": "at least 0",
        "--algo.refill_rounds 1 --group_size 1 --algo.advantage none": "--group_size",
        "--algo.target_kl=-1 --learner.epochs 2": "at least 0",
        "--algo.target_kl 0.1": "--learner.minibatches",
        "--critic.lr 1e-4": "--algorithm ppo",
        "--algorithm poo": "--algorithm=poo must be one of",
        "--algorithm ppo --algo.advantage group_norm --critic.gamma 0.9": "the advantage group_norm, which asks no critic",
        "--algorithm ppo --algo.ratio sequence": "take ratio token",
        "--algorithm gspo --algo.advantage gae": "take ratio token",
        "--algorithm ppo --algo.refill_rounds 3": "--algo.refill_rounds 0",
        "--algorithm dapo --algo.advantage gae": "--algo.refill_rounds 0",
        "--algorithm ppo --algo.normalize env": "batch or none",
        "--algorithm ppo --critic.warmup_steps 100": "less than --num_steps=100",
        "--algorithm ppo --critic.warmup_steps=-1": "--critic.warmup_steps=-1",
        "--algorithm ppo --critic.gamma 1.1": "--critic.gamma=1.1 must lie in 0..1",
        "--algorithm ppo --critic.gae_lambda=-0.1": "must lie in 0..1",
        "--algorithm ppo --critic.value_clip=-1": "--critic.value_clip=-1",
        "--algorithm ppo --critic.gae_lamda 1": "did you mean 'critic.gae_lambda'",
        "--algorithm ppo --critic.model {out}/other": "has a vocabulary of 77 tokens",
        "--algorithm ppo --env_path {dir}/own_advantage.py": "set --algo.advantage gae to ask it all the same",
        "--sft.observation_weight 1": "run --algorithm sft first",
        "--data.min_reward 1": "no meaning for --algorithm grpo",
        "--engine_ranks 1": "must leave at least one of 1 rank to learn",
        "--engine_ranks -1": "--engine_ranks=-1 must be at least 0",
        "--max_staleness -1": "--max_staleness=-1 must be at least 0",
        "--rollout.lagged_frac 1.5": "--rollout.lagged_frac=1.5 must lie in 0..1",
        "--rollout.lagged_frac 0.5 --rollout.lagged_every 1": "--rollout.lagged_every=1 must be at least 2",
        "--rollout.lagged_every 8": "no meaning without --rollout.lagged_frac",
        "--rollout.lagged_frac 0.5 --max_staleness 1": "would break the bound of --max_staleness=1",
        "--rollout.lagged_frac 0.5 --engine_ranks 1": "leave out one of them",
        "--cp 8 --max_prompt_tokens 4 --max_tokens 8": "--cp=8 ... try --cp 6",
        "--learner.offload always --optim.name adamw8bit": "take --optim.name adamw",
        "--learner.activation_offload --learner.activation_checkpointing": "take one of them",
        "--learner.compile --tp 2": "--tp computes otherwise",
        "--engine_tp 2": "--engine_tp=2: the embedded engine is on each rank by itself",
    },
    FIT: {
        "--data.train {dir}/row.jsonl": "row.jsonl ... did you mean 'rows.jsonl'",
        "--algo.kl_coef 0.1": "--algo.kl_coef has no meaning for --algorithm sft",
        "--algo.normalize batch": "--algo.normalize has no meaning for --algorithm sft",
        "--max_staleness 1": "no meaning for --algorithm sft",
        "--rollout.lagged_frac 0.5": "no meaning for --algorithm sft",
        "--sft.action_weight 0": "one of them above 0",
        "--sft.observation_weight -1": "must be at least 0",
        "--sft.action_wieght 1": "did you mean 'sft.action_weight'",
        "--preference.beta 0.2": "--preference.* has no meaning for --algorithm sft",
        "--learner.offload phase": "waits for engines",
    },
    PAIRS: {
        "--algorithm dpo --sft.action_weight 2": "no meaning for --algorithm dpo",
        "--algorithm dpo --critic.lr 1e-4": "leave it out",
        "--algorithm dpo --preference.beta 0": "--preference.beta=0",
        "--algorithm dpo --preference.label_smoothing 0.5": "label_smoothing=0.5 must lie in 0..0.5",
        "--algorithm dpo --preference.label_smoothing 0.1 --preference.loss ipo": "loss sigmoid",
        "--algorithm dpo --algo.aggregation token": "--algo.aggregation has no meaning for --algorithm dpo",
        "--algorithm rm --learner.microbatch_tokens 50": "one whole pair of up to 128 tokens",
        "--algorithm rm --actors.policy.lora.rank 4": "rm trains the whole model",
        "--algorithm rm --max_prompt_tokens 1 --max_tokens 4": "longer than 5 (max_prompt_tokens + max_tokens)",
        "--algorithm dpo --data.train {dir}/equal.jsonl": "train/0: 'chosen' and 'rejected' are equal",
    },
    TWO: {
        "--actors.bob.train false --actors.alice.train false": "none of the actors bob, alice learns",
        "--actors.bob.api http://x/v1 --actors.bob.train true": "cannot learn; drop one",
        "--actors.carol.train false": "--actors.carol.model is missing",
        "--actors.alice.train false --actors.alice.lr 1": "of an actor that learns",
        "--actors.bob.max_tokens 999": "--actors.bob.max_tokens=999 must lie in 1..--max_tokens=256",
        "--algorithm sft": "--algorithm sft trains one actor, there are bob, alice",
        "--envs.talks.weight 2": "no such file; did you mean 'talk'",
        "--envs.talk.weight 0": "none is trained in",
        "--envs.talk.weigth 1": "unknown flag --envs.talk.weigth; did you mean 'envs.talk.weight'",
        "--env_path {dir}/alicia.py": "alicia ... alice",
        "--actors.judge.api http://127.0.0.1:9/v1 --actors.judge.model m --actors.judge.api_key_env NO_SUCH": "NO_SUCH",
    },
    LORA: {
        "--actors.policy.lora.rank 65": "rank=65 ... k_proj; take at most 16",
        "--actors.policy.lora.rank -1": "rank=-1",
        "--actors.policy.lora.rank 0 --actors.policy.lora.quantize nf4": "quantize=nf4 ... rank=16",
        "--actors.policy.lora.targets q_proj,lm_head": "lm_head ... all-linear ... q_proj",
        "--actors.policy.lora.rnak 4": "unknown flag ... did you mean 'actors.policy.lora.rank",
        "--rollout.lagged_frac 0.5 --actors.other.share policy": "leave out --actors.other.share",
        "--learner.offload always --actors.policy.lora.quantize nf4": "quantize=nf4",
        "--learner.compile --actors.policy.lora.quantize nf4": "cannot compile",
    },
    SHARE: {
        "--actors.alice.share bop": "share=bop is no other actor; did you mean 'bob'",
        "--actors.bob.share bob": "share=bob is no other actor",
        "--actors.alice.share bob --actors.carol.share alice": "take --actors.carol.share=bob",
        "--actors.alice.share bob --actors.bob.lora.rank 0": "such as --actors.bob.lora.rank=16",
        "--actors.alice.share bob --actors.alice.model n": "and --actors.alice.model=n",
        "--actors.alice.share bob --actors.alice.api http://x/v1": "here or elsewhere",
        "--actors.alice.share bob --actors.alice.lora.quantize nf4": "has quantize=none",
        "--actors.alice.share bob --actors.alice.lora.alpha 4": "alice.lora.rank is missing",
        "--actors.j.share bob --actors.j.train false --actors.j.lora.rank 4": "adapters are trained",
        "--actors.bob.lora.quantize nf4 --actors.alice.share bob --engine_ranks 1": "leave out one of them",
        "--actors.bob.lora.quantize nf4 --actors.alice.share bob --engine sglang": "quantize=nf4",
        "--actors.alice.shar bob": "did you mean 'actors.alice.share'",
    },
}
ROW = '{"messages": [{"role": "user", "content": "31524"}], "answer": "12345"}\n'
SCORES = "def reward_fn(messages, answer): return 1.0\n"
# Name -> (environment, rows, fragments of the message).
BAD_FILES = {
    "empty data": (SCORES, "", "rows.jsonl ... empty"),
    "truncated line": (SCORES, ROW + ROW[:-9], "rows.jsonl:2"),
    "a column that no row has": (SCORES.replace("answer", "anwser"), ROW, "anwser ... answer ... env.py"),
    "a row without the column": (SCORES, ROW + ROW.replace("answer", "other"), "answer ... row 2"),
    "no hook": (SCORES.replace("_", ""), ROW, "rewardfn ... reward_fn"),
    "does not run": ("x = 1 / 0\n", ROW, "env.py ... division by zero"),
    "rewards of NaN": ("def reward_fn(messages): return float('nan')\n", ROW, "failed ... nan ... reward_fn"),
    "rewards of text": ("def reward_fn(messages): return 'good'\n", ROW, "failed ... 'good' ... reward_fn"),
}


@pytest.fixture(scope="module")
def folders(places):
    """Environments, rows and models that cannot be used."""
    folder = Path(places["dir"])
    letters, talk = (folder / "letters.py").read_text(), (folder / "talk.py").read_text()
    (folder / "own_advantage.py").write_text(letters + "def advantage_fn(rewards): return rewards\n")
    (folder / "alicia.py").write_text(talk.replace("bob -> alice -> bob", "bob -> alicia"))
    (folder / "equal.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "a", "rejected": "a"}) + "\n")
    return places


def refusal(flags: list[str], capsys) -> str:
    """The one line that says why the command ended."""
    assert main(flags) != 0
    shown = capsys.readouterr().err.splitlines()
    errors = [line for line in shown if line.startswith("error: ")]
    assert len(errors) == 1 and not any("Traceback" in line for line in shown), shown
    return errors[0]


@pytest.mark.parametrize("base, more", [(base, more) for base, table in REFUSED.items() for more in table])
def test_flags_that_cannot_be_are_refused_in_one_line(base, more, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH", raising=False)
    if "bare" in more:
        tokenizer = AutoTokenizer.from_pretrained(folders["model"])
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / "bare")
        AutoModelForCausalLM.from_pretrained(folders["model"]).save_pretrained(tmp_path / "bare")
    if "other" in more:
        AutoConfig.from_pretrained(folders["model"], vocab_size=77).save_pretrained(tmp_path / "other")
    run = tmp_path / "run"
    error = refusal(words("--out", run, f"{base} {more}".format(**folders, out=tmp_path)), capsys)
    assert all(part in error for part in REFUSED[base][more].split(" ... ")), error
    assert not run.exists()


def bad_files(case: str, model: str, folder) -> list[str]:
    env, rows, _ = BAD_FILES[case]
    (folder / "env.py").write_text(env)
    (folder / "rows.jsonl").write_text(rows)
    flags = words(
        "--max_tokens 4 --tasks_per_step 2 --env_path", folder / "env.py", "--data.train", folder / "rows.jsonl"
    )
    return words("--model", model, flags, "--out", folder / "run")


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_line(case, tiny_model, tmp_path, capsys):
    error = refusal(bad_files(case, tiny_model, tmp_path), capsys)
    assert all(part in error for part in BAD_FILES[case][2].split(" ... ")), error
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("case", ["truncated line", "rewards of NaN"])
def test_two_ranks_refuse_bad_input_once_and_do_not_hang(case, tiny_model, tmp_path, torchrun):
    done = torchrun(2, "-m", "rl_core.train", *bad_files(case, tiny_model, tmp_path), timeout_s=60, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(errors) == 1, done.stderr
    assert all(part in errors[0] for part in BAD_FILES[case][2].split(" ... "))


@pytest.mark.parametrize(
    "library, flags",
    [
        ("peft", LORA),
        ("bitsandbytes", f"{LORA} --actors.policy.lora.quantize nf4"),
        ("bitsandbytes", f"{RL} --optim.name adamw8bit"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(library, flags, places, tmp_path, capsys, monkeypatch):
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == library else find(name, *a))
    error = refusal(words(flags.format(**places), "--out", tmp_path / "run"), capsys)
    assert "pip install .[" in error, error
