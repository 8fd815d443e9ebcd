"""Refusals and their one-line errors, before a model loads and before anything
is written."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
from kit import longrope, words
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_core.algorithms import PRESETS
from rl_core.config import OWN_SECTIONS, Config, known_flags, parse_config, to_yaml
from rl_core.environments.agents.harbor_tasks import task_rows
from rl_core.environments.env_file import load_env
from rl_core.errors import keep_ends
from rl_core.learning.options import OPTIMIZERS
from rl_core.run.plan.algorithm_choice import choose_algorithm
from rl_core.run.plan.engine import choose_engine
from rl_core.run.plan.option_rules import check_options
from rl_core.tools.help import help_page, print_help
from rl_core.train import main

RL = "--model {model} --env_path {dir}/letters.py --max_tokens 60 --max_prompt_tokens 40"
FIT = (
    "--model {model} --max_tokens 40 --max_prompt_tokens 24 --data.train {dir}/rows.jsonl "
    "--algorithm sft"
)
PAIRS = FIT.replace("rows.jsonl --algorithm sft", "pairs.jsonl")
TWO = (
    "--actors.bob.model {model} --actors.alice.model {model} --env_path {dir}/talk.py "
    "--max_prompt_tokens 40"
)
LORA = "--model {model} --env_path {dir}/letters.py --actors.policy.lora.rank 4"

# Base -> further arguments -> fragments of the message, with " ... " between them.
REFUSED = {
    RL: {
        "--model {out}/nothing": "nothing",
        "--model models/qwen3": "'models/qwen3' is not a folder and cannot be loaded from the hub: ",
        "--actors.policy.model {out}/bare": "--model ... is short for --actors.policy.model, which",
        "--model {out}/bare": "chat template ... .chat_template FILE",
        "--model {out}/mute": "mute has no chat template: copy the tokenizer's files",
        "--model {out}/t5": "t5' is an encoder-decoder (t5) ... decoder-only",
        "--model {out}/roberta": "roberta' is an encoder (roberta) ... decoder-only",
        "--model {out}/short": "short ... the id 103 ... 103 rows",
        "--model {out}/cut": "model.safetensors is damaged: it has 5000 bytes, and its header asks for",
        "--model {out}/cut_header": "model.safetensors is damaged: it has 100 bytes, and its header",
        "--out {out}/done --resume --algorithm ppo": "--algorithm ppo: ... was trained by grpo ... "
        "give --model ... or resume with --algorithm grpo",
        "--out {out}/done --resume --num_steps 2": "--num_steps=2 is less than the 3 steps",
        "--out {dir}": "exists ... --resume",
        "--out {dir}/letters.py --resume": "letters.py is a file; name a folder",
        "--max_prompt_tokens 3": "tokens ... --max_prompt_tokens=3 ... --data.skip_long",
        "--algo.advantage custom": "advantage_fn",
        "--max_turns 3 --max_tokens "
        "2000": "--max_prompt_tokens=40 and --max_turns=3 turns of --max_tokens=2000 are 6040 ... has 4096 ... --max_turns=3 is --max_turns",
        "--model {out}/long": "are 100 tokens, and ... long has 32 positions "
        "(original_max_position_embeddings of longrope); lower them",
        "--algo.teacher {out}/long --algorithm opd": "long has 32 positions (original_",
        "--algo.reference {out}/long --algo.kl_coef 1": "long has 32 positions (original_",
        "--algorithm ppo --critic.model {out}/other": "has a vocabulary of 77 tokens",
        "--algorithm ppo --env_path "
        "{dir}/own_advantage.py": "set --algo.advantage gae to keep the critic",
        "--rollout_ranks 1": "must leave at least one rank of 1 to learn",
    },
    FIT: {
        "--data.train {dir}/row.jsonl": "row.jsonl ... did you mean 'rows.jsonl'",
        "--model {out}/long": "are 64 tokens, and ... long has 32 positions (original_",
    },
    PAIRS: {
        "--algorithm dpo --model {out}/long": "long has 32 positions (original_",
        "--algorithm rm --model {out}/long": "long has 32 positions (original_",
        "--algorithm rm --max_prompt_tokens 1 --max_tokens "
        "4": "longer than 5 (max_prompt_tokens + max_tokens)",
        "--algorithm dpo --data.train "
        "{dir}/choosen.jsonl": "row 1 of {dir}/choosen.jsonl: it needs a column 'chosen'; "
        "did you mean 'choosen'? Read it by --data.columns chosen=choosen",
        "--algorithm dpo --data.train "
        "{dir}/equal.jsonl": "has no pair with a preference: all have equal replies",
        "--algorithm dpo --env_path {dir}/letters.py": "letters.py: --algorithm dpo plays no episodes ... "
        "leave --env_path out",
        "--algorithm kto": "row 1 of {dir}/pairs.jsonl: it needs a column 'label' ... or train "
        "pairs by --algorithm dpo",
        "--algorithm kto --data.train {dir}/unlabelled.jsonl": "row 1 of {dir}/unlabelled.jsonl: it "
        "needs a column 'label', true if the reply is good",
        "--algorithm kto --data.train {dir}/null.jsonl": "column 'label', true if ... bad; it is null in "
        "this row; give a value, or read another by --data.columns label=NAME, or train pairs",
        "--algorithm kto --data.train {dir}/yes.jsonl": "row 1 of {dir}/yes.jsonl: column 'kto_tag' "
        "holds 'yes': it must be true or 1 (a good reply), or false or 0; texts are not read",
    },
    TWO: {
        "--env_path {dir}/alicia.py": "alicia ... alice",
        "--env_path {dir}/letters.py --actors.bob.train "
        "false": 'add turns = "alice" if hooks ask the others, as a judge, or '
        'turns = "alice -> bob"',
        "--actors.judge.api http://127.0.0.1:9/v1 --actors.judge.model m "
        "--actors.judge.api_key_env NO_SUCH": "NO_SUCH",
    },
    LORA: {
        "--actors.policy.lora.targets q_proj,lm_head": "lm_head ... all-linear ... q_proj",
    },
}
ROW = '{"messages": [{"role": "user", "content": "31524"}], "answer": "12345"}\n'
SCORES = "def reward_fn(messages, answer): return 1.0\n"
# Name -> (environment, rows, fragments of the message).
BAD_FILES = {
    "empty data": (SCORES, "", "rows.jsonl ... empty"),
    "truncated line": (SCORES, ROW + ROW[:-9], "row 2 of ... rows.jsonl"),
    "a column that no row has": (
        SCORES.replace("answer", "anwser"),
        ROW,
        "env.py ... 'anwser'; row 1 ... has messages, answer; did you mean 'answer'? Read one by "
        "--data.columns anwser=answer",
    ),
    "a misspelt prompt": (
        SCORES,
        '{"promt": "1"}',
        "row 1 of ... needs one of the columns ... has promt; did you mean 'promt'? Read it by --data.columns prompt=promt",
    ),
    "a prompt of null": (
        SCORES,
        '{"prompt": null, "answer": "1"}',
        "row 1 of ... column 'prompt': must be a list of ... is None",
    ),
    "a row without the column": (SCORES, ROW + ROW.replace("answer", "other"), "answer ... row 2"),
    "no hook": (SCORES.replace("_", ""), ROW, "rewardfn ... reward_fn"),
    "a reward as verl has": (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n",
        ROW,
        "compute_score() is verl's; add def reward_fn(completion, data_source, reward_model)",
    ),
    "a reward as TRL has": (
        "def reward_fn(prompts, completions, **kwargs): return [1.0] * len(completions)\n",
        ROW,
        "asks for 'completions' ... TRL passes lists, rl_core one reply: a reward is called for one reply: def "
        "reward_fn(completion, prompt, answer) -> float",
    ),
    "a reward with verl's arguments": (
        "def reward_fn(data_source, solution_str, ground_truth): return 1.0\n",
        ROW,
        "asks for 'solution_str' ... verl's solution_str is `completion`",
    ),
    "does not run": ("x = 1 / 0\n", ROW, "env.py ... division by zero"),
    "rewards of NaN": (
        "def reward_fn(messages): return float('nan')\n",
        ROW,
        "failed ... nan ... reward_fn",
    ),
    "rewards of text": (
        "def reward_fn(messages): return 'good'\n",
        ROW,
        "failed ... 'good' ... reward_fn",
    ),
}


@pytest.fixture(scope="module")
def folders(places):
    """Environments, rows and models that cannot be used."""
    folder = Path(places["dir"])
    letters, talk = (folder / "letters.py").read_text(), (folder / "talk.py").read_text()
    (folder / "own_advantage.py").write_text(
        letters + "def advantage_fn(rewards): return rewards\n"
    )
    (folder / "alicia.py").write_text(talk.replace("bob -> alice -> bob", "bob -> alicia"))
    (folder / "equal.jsonl").write_text(
        json.dumps({"prompt": "1", "chosen": "a", "rejected": "a"}) + "\n"
    )
    reply = {"prompt": "1", "completion": "a"}
    (folder / "unlabelled.jsonl").write_text(json.dumps(reply) + "\n")
    (folder / "null.jsonl").write_text(json.dumps(reply | {"label": None}) + "\n")
    (folder / "yes.jsonl").write_text(json.dumps(reply | {"kto_tag": "yes"}) + "\n")
    (folder / "choosen.jsonl").write_text(
        json.dumps({"prompt": "1", "choosen": "a", "rejected": "b"}) + "\n"
    )
    return places


def refusal(flags: list[str], capsys) -> str:
    """The one line that says why the command ended."""
    assert main(flags) != 0
    shown = capsys.readouterr().err.splitlines()
    errors = [line for line in shown if line.startswith("error: ")]
    assert len(errors) == 1 and not any("Traceback" in line for line in shown), shown
    return errors[0]


@pytest.mark.parametrize(
    "base, more", [(base, more) for base, table in REFUSED.items() for more in table]
)
def test_flags_that_cannot_be_are_refused_in_one_line(
    base, more, folders, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("NO_SUCH", raising=False)
    if "bare" in more:
        tokenizer = AutoTokenizer.from_pretrained(folders["model"])
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / "bare")
        AutoModelForCausalLM.from_pretrained(folders["model"]).save_pretrained(tmp_path / "bare")
    if "mute" in more:
        AutoModelForCausalLM.from_pretrained(folders["model"]).save_pretrained(tmp_path / "mute")
    if "other" in more:
        AutoConfig.from_pretrained(folders["model"], vocab_size=77).save_pretrained(
            tmp_path / "other"
        )
    for family in ("t5", "roberta"):
        AutoConfig.for_model(family).save_pretrained(tmp_path / family)
    if "short" in more:
        AutoTokenizer.from_pretrained(folders["model"]).save_pretrained(tmp_path / "short")
        AutoConfig.from_pretrained(folders["model"], vocab_size=103).save_pretrained(
            tmp_path / "short"
        )
    if "long" in more:
        AutoTokenizer.from_pretrained(folders["model"]).save_pretrained(tmp_path / "long")
        config = AutoConfig.from_pretrained(folders["model"])
        config.rope_parameters = longrope(config, 32)
        config.save_pretrained(tmp_path / "long")
    if "cut" in more:
        for name, size in {"cut": 5000, "cut_header": 100}.items():
            shutil.copytree(folders["model"], tmp_path / name)
            os.truncate(tmp_path / name / "model.safetensors", size)
    if "done" in more:
        (tmp_path / "done/checkpoints/step_000003").mkdir(parents=True)
        (tmp_path / "done/checkpoints/step_000003/manifest.json").write_text("{}")
        (tmp_path / "done/config.yaml").write_text("algorithm: grpo\n")
    run = tmp_path / "run"
    error = refusal(words("--out", run, f"{base} {more}".format(**folders, out=tmp_path)), capsys)
    assert all(piece in error for piece in REFUSED[base][more].format(**folders).split(" ... ")), (
        error
    )
    assert not run.exists()


def bad_files(case: str, model: str, folder) -> list[str]:
    env, rows, _ = BAD_FILES[case]
    (folder / "env.py").write_text(env)
    (folder / "rows.jsonl").write_text(rows)
    flags = words(
        "--max_tokens 4 --tasks_per_step 2 --env_path",
        folder / "env.py",
        "--data.train",
        folder / "rows.jsonl",
    )
    return words("--model", model, flags, "--out", folder / "run")


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_line(case, tiny_model, tmp_path, capsys):
    error = refusal(bad_files(case, tiny_model, tmp_path), capsys)
    assert all(piece in error for piece in BAD_FILES[case][2].split(" ... ")), error
    assert not list(tmp_path.rglob("*.safetensors"))


def test_load_tasks_must_take_the_split(tmp_path):
    (tmp_path / "env.py").write_text(SCORES + "def load_tasks(): return []\n")
    env = load_env(str(tmp_path / "env.py"))
    with pytest.raises(ValueError, match=r"load_tasks\('train'\) failed: .*takes 0 positional arg"):
        env.load_tasks("train")


def test_a_folder_without_tasks_of_harbor_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither this folder nor a folder in it has a task.toml"):
        task_rows(tmp_path)


@pytest.mark.parametrize("case", ["truncated line", "rewards of NaN"])
def test_two_ranks_refuse_bad_input_once_and_do_not_hang(case, tiny_model, tmp_path, torchrun):
    done = torchrun(
        2, "-m", "rl_core.train", *bad_files(case, tiny_model, tmp_path), timeout_s=60, check=False
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(errors) == 1, done.stderr
    assert all(piece in errors[0] for piece in BAD_FILES[case][2].split(" ... "))


# From the flags alone

MODEL = ["--model", "m", "--env_path", "x/talk.py", "--out", "x"]
MPS = [*MODEL, "--device", "mps"]
PAIR = ["--actors.bob.model", "m", "--actors.alice.model", "m", *MODEL[2:]]
# An actor whose model others may share.
BOB = ["--actors.bob.model", "m", "--actors.bob.lora.rank", "4", *MODEL[2:]]
BASES = {"MODEL": MODEL, "MPS": MPS, "PAIR": PAIR, "BOB": BOB, "NONE": []}
BASES["NOTHING_PLAYED"] = words("--model m --out x")
# A base, flags => a piece of the error.
TABLE = """
# names, types, ranges
MODEL --modle x => unknown flag --modle; did you mean 'model'
MODEL --modle x --betaa 1 =>
    'model'?; unknown flag --betaa; did you mean beta? rl_core calls it --algo.kl_coef
MODEL --actors.bob.lora.rnk 4 =>
    unknown flag --actors.bob.lora.rnk; did you mean 'actors.bob.lora.rank'
MODEL --betaa 1 => unknown flag --betaa; did you mean beta? rl_core calls it --algo.kl_coef
MODEL --n_gpus_per_nod 1 => unknown flag --n_gpus_per_nod; n_gpus_per_node: torchrun's
MODEL --actors.polcy.lora.rank 4 =>
    --actors.polcy.model is missing: a folder or hub name, or the endpoint's model; of the actors, did you mean 'policy'?
MODEL --critic.gae_lamda 1 => did you mean 'critic.gae_lambda'
MODEL 4 => argument '4' has no flag before it; write --name value
MODEL actor_rollout_ref.rollout.n=8 =>
    n=8' has no flag before it; write --name value; rl_core calls it --group_size
MODEL group_size=8 =>
    'group_size=8' has no flag before it; write --name value; did you mean 'group_size'
MODEL --learning_rte 1e-6 =>
    unknown flag --learning_rte; did you mean learning_rate? rl_core calls it --optim.lr
MODEL --zzzqqq 1 => unknown flag --zzzqqq; no flag has a similar name; --help WORD lists flags
MODEL --use_cpu true =>
    unknown flag --use_cpu; a run takes every GPU that torch sees, else the CPU: set CUDA_
MODEL --optim.lr => --optim.lr has no value
MODEL --optim.lr fast => --optim.lr=fast must be a valid number
MODEL --learner.logprob_microbatch_tokens many =>
    --learner.logprob_microbatch_tokens=many must be a valid integer, unable to parse string as an integer, or must be 'auto'
MODEL --learner.logprob_microbatch_tokens -5 =>
    --learner.logprob_microbatch_tokens=-5 must be greater than or equal to 0, or must be 'auto'
MODEL --algorithm poo => --algorithm=poo must be 'grpo', 'dr_grpo',
MODEL --algorithm grppo => or 'rm'; did you mean 'grpo'?
MODEL --optim.betas 0.9 =>
    --optim.betas=[0.9] must be two values; give AdamW's two decays, such as 0.9,0.95
MODEL --algo.kl_reward 0.1 =>
    --algo.kl_reward=0.1 must be 'k1', 'k2' or 'k3'; give an estimator and its coefficient, such as k1,0.05
MODEL --algo.teacher 127.0.0.1:8000/v1 =>
    is neither a model nor a URL; an address begins with http://: give --algo.teacher http://127.0.0.1:8000/v1
MODEL --optim.betas 0.9,1.5 => --optim.betas=1.5 must be less than or equal to 1
MODEL --resume maybe => --resume=maybe must be true or false; it continues the run in --out
MODEL --num_steps 1.5 => --num_steps=1.5 must be a valid integer
MODEL --optim adamw => unknown flag --optim; rl_core calls it --optim.name
MODEL --num_epochs 0 => --num_epochs=0 must be greater than 0
MODEL --data.columns answer => --data.columns.answer=None must be a valid string
MODEL --chat_template_kwargs {x => --chat_template_kwargs={x must be a valid dictionary
MODEL --num_steps=-1 => --num_steps=-1 must be greater than or equal to 0
MODEL --sampling.temperature 0 => --sampling.temperature=0 must be greater than 0
MODEL --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 1 =>
    --rollout.stale_policy_refresh=1 must be greater than or equal to 2
MODEL --actors.policy.lora.rank=-1 =>
    --actors.policy.lora.rank=-1 must be greater than or equal to 0
MODEL --eval.sampling topp=1 =>
    --eval.sampling.topp=topp must be 'temperature', 'top_p', 'top_k' or 'min_p'
# Missing flags.
NONE --model m --env_path x.py => --out is missing
NONE --out x --env_path x.py => --model is missing: a folder or hub name
NONE --out x --resume => --out x: there is no run to resume; to start one, name a model
NONE --out x --model m --online.port 8101 => or --online for a run without one
NONE --out x --model m => --env_path is missing
# a flag of another algorithm
MODEL --algorithm sft --online => --online cannot be combined with --algorithm sft; leave one out
MODEL --algorithm sft --max_staleness 1 => --max_staleness=1 has no meaning for --algorithm sft
MODEL --algorithm sft --algo.kl_coef 0.1 => --algo.kl_coef=0.1 has no meaning for --algorithm sft
MODEL --algorithm sft --actors.policy.algo.kl_coef 0.1 => } has no meaning for --algorithm sft
MODEL --algorithm sft --actors.policy.critic.lr 0.1 => } has no meaning for --algorithm sft
MODEL --algorithm sft --preference.beta 0.2 =>
    --preference.beta=0.2 has no meaning for --algorithm sft
MODEL --algorithm dpo --algo.aggregation token => no meaning for --algorithm dpo
MODEL --algorithm dpo --critic.lr 1e-4 => no meaning for --algorithm dpo
MODEL --sft.weights 1,1 => no meaning for --algorithm grpo
MODEL --data.min_reward 1 => no meaning for --algorithm grpo
# batches and memory
MODEL --learner.updates_per_epoch 3 => --learner.updates_per_epoch=3 must divide --tasks_per_step=16
MODEL --learner.microbatch_tokens 50 => must hold a whole episode (or pair) of 768 tokens
MODEL --algorithm rm --learner.microbatch_tokens 1000 => of 1536 tokens
MODEL --learner.kernels compile --tp 2 => cannot be combined with --tp
MODEL --ep 2 --tp 2 => --ep=2 cannot be combined with --tp=2; leave one out
MODEL --ep 2 --learner.kernels liger => cannot be combined with --learner.kernels=liger
MODEL --actors.policy.lora.rank 2 --actors.policy.lora.targets experts --optim.name muon =>
    lora.targets=experts cannot be combined with --optim.name=muon, which
MODEL --actors.policy.lora.rank 2 --actors.policy.lora.targets all-linear,experts --actors.policy.optim.name muon =>
    lora.targets=all-linear,experts cannot be combined with --optim.name=muon, which
MODEL --ep 0 => --ep=0 must be greater than or equal to 1
MODEL --engine sglan => --engine=sglan is unknown; did you mean 'sglang'?
MODEL --optim.name sdg => --optim.name=sdg is unknown; did you mean 'sgd'?
MODEL --engine_tp 2 --engine embedded => --engine_tp=2 needs --engine sglang
MODEL --engine vllm --engine_args=--seed=3 => --seed of vLLM's server; give --seed
MODEL --engine vllm --engine_args=--hf_overrides.head_dtype=float16 =>
    --hf-overrides of vLLM's server; leave it out
MODEL --engine vllm --weight_sync broadcast => take device or files
MODEL --engine vllm --deterministic true => needs --engine embedded
# preferences and SFT
MODEL --algorithm dpo --preference.beta 0 => --preference.beta=0 must be greater than 0
MODEL --algorithm dpo --preference.label_smoothing 0.6 => must be less than or equal to 0.5
MODEL --algorithm dpo --preference.label_smoothing 0.1 --preference.loss ipo =>
    needs --preference.loss sigmoid
MODEL --algorithm simpo --preference.loss ipo => no meaning for --algorithm simpo
MODEL --algorithm orpo --preference.simpo_gamma 0.5 => no meaning for --algorithm orpo
MODEL --algorithm simpo --algo.reference m => no meaning for --algorithm simpo
MODEL --algorithm dpo --preference.desirable_weight 2 => no meaning for --algorithm dpo
MODEL --algorithm kto --tasks_per_step 1 => --tasks_per_step=1: --algorithm kto puts the
# older weights
MODEL --deterministic true --engine sglang => --deterministic=true needs --engine embedded
MODEL --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 4 --actors.policy.engine_urls http://127.0.0.1:1 =>
    engine_urls
BOB --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 4 --actors.alice.lora_base bob =>
    lora_base and engine_urls
# actors
PAIR --actors.bob.train false --actors.alice.train false => none of the actors learns
PAIR --actors.bob.api http://x/v1 --actors.bob.train true => an endpoint cannot learn
PAIR --actors.carol.train false => --actors.carol.model is missing
PAIR --actors.alice.train false --actors.alice.optim.lr 1 => to an actor that learns
PAIR --actors.bob.max_tokens 999 => --actors.bob.max_tokens=999 must be at most --max_tokens=256
PAIR --algorithm sft => --algorithm sft trains one actor
BOB --algorithm rm => --algorithm rm trains the whole model
MODEL --actors.policy.lora.quantize nf4 => give --actors.policy.lora.rank 16
BOB --actors.bob.lora.quantize nf4 --learner.offload always => leave one out
BOB --actors.bob.lora.quantize nf4 --actors.bob.learner.offload always => leave one out
BOB --actors.bob.lora.quantize nf4 --learner.kernels compile => leave one out
# shared models
BOB --actors.alice.lora_base bop => lora_base=bop is not another actor; did you mean 'bob'
BOB --actors.bob.lora_base bob => lora_base=bob is not another actor
BOB --actors.alice.lora_base bob --actors.carol.lora_base alice =>
    a shared model is frozen and has adapters
BOB --actors.alice.lora_base bob --actors.bob.lora.rank 0 => give --actors.bob.lora.rank 16
BOB --actors.alice.lora_base bob --actors.alice.model n =>
    leave out model, lora.quantize, api and engine_urls
BOB --actors.alice.lora_base bob --actors.alice.api http://x/v1 =>
    leave out model, lora.quantize, api and engine_urls
BOB --actors.alice.lora_base bob --actors.bob.engine_urls http://127.0.0.1:1 =>
    leave out model, lora
BOB --actors.alice.lora_base bob --actors.alice.lora.quantize nf4 --actors.alice.lora.rank 4 =>
    leave out model, lora
BOB --actors.alice.lora_base bob --actors.alice.lora.alpha 4 => alice.lora.rank is missing
BOB --actors.j.lora_base bob --actors.j.train false --actors.j.lora.rank 4 =>
    to an actor that learns
BOB --actors.bob.lora.quantize nf4 --actors.alice.lora_base bob --rollout_ranks 1 =>
    leave out --rollout_ranks
BOB --actors.bob.lora.quantize nf4 --actors.alice.lora_base bob --engine sglang =>
    take --engine embedded
MODEL --actors.policy.router_replay true --engine sglang => needs --engine embedded
MODEL --agents.response_format enforce --engine sglang =>
    SGLangEngine of actor policy takes no JSON schemas
# servers that run already
MODEL --actors.policy.engine_urls localhost => must be different addresses
MODEL --actors.policy.engine_urls http://localhost:3,http://localhost:3 =>
    must be different addresses
PAIR --actors.bob.train false --actors.bob.engine_urls http://localhost:3 => --actors.bob.api URL/v1
# an Apple GPU
MPS --engine vllm => samples with the embedded engine alone; leave out --engine=vllm
MPS --actors.policy.engine_urls http://a:1 => and engine_urls, or --device
MPS --learner.dtype bfloat16 => leave out --learner.dtype=bfloat16, or --device
MPS --learner.offload phase => Leave out --learner.offload and
MPS --learner.activations offload => an Apple GPU has the CPU's memory
MPS --learner.kernels compile => is incompatible with --learner.kernels=compile
MPS --optim.name adamw8bit => no kernels of bitsandbytes
# environments
MODEL --envs.talks.weight 2 => no such file; did you mean 'talk'
MODEL --envs.talk.weight 0 => none is trained in
MODEL --envs.talk.max_tokens 999 => --envs.talk.max_tokens=999 must be at most --max_tokens=256
MODEL --env_path a/talk.py,b/talk.py => two files have one name
MODEL --env_path a.py,b.py --data.train rows.jsonl => give --envs.NAME.train
# parts of the algorithm
MODEL --group_size 1 => --algo.advantage none
MODEL --algo.clip_low 1.5 => must be less than or equal to 1
MODEL --algo.dual_clip 0.9 => must be above 1
MODEL --algo.objective cispo --algo.dual_clip 3 => take objective clip
MODEL --algo.kl k1 => need --algo.kl_coef above 0
MODEL --algo.correction_range 0.5,3 => needs --algo.importance_correction
MODEL --algo.importance_correction mask --algo.correction_range 3,2 => the lower first
MODEL --algo.overlong_buffer 5 => needs --algo.truncation_penalty soft
MODEL --algo.dynamic_sampling_rounds 1 --group_size 1 --algo.advantage none => --group_size=1
MODEL --algo.target_kl 0.1 => raise --learner.updates_per_epoch
MODEL --critic.lr 1e-4 => take --algorithm ppo
MODEL --algorithm ppo --algo.objective gspo => leave out objective gspo
MODEL --algorithm ppo --algo.dynamic_sampling_rounds 2 => dynamic_sampling_rounds
MODEL --algorithm ppo --algo.normalize env => normalize env
MODEL --algorithm ppo --algo.turn_discount 0.9 => and turn_discount
MODEL --algorithm ppo --algo.gigpo_coef 1 => --algo.advantage gae compares none
MODEL --algorithm reinforce_pp --algo.gigpo_discount 0.9 => --algo.gigpo_discount=0.9
MODEL --algo.gigpo_coef 0 --algo.gigpo_discount 0.9 => take --algo.gigpo_coef 1
MODEL --algorithm ppo --critic.gamma 1.5 => --critic.gamma=1.5 must be less than or equal to 1
# references and teachers
MODEL --algo.kl_reward k9,0.1 => algo.kl_reward
MODEL --algo.kl_reward k1 => algo.kl_reward
MODEL --algo.kl_reward k1,-1 => algo.kl_reward
MODEL --algo.kl_reward k1,0.1 --algo.kl_coef 0.1 --algo.kl_in reward => two KLs in the reward
MODEL --algo.kl_loss k3,0.1 --algo.kl_coef 0.1 => two KLs in the loss
MODEL --algo.reference_every 3 => update a reference: give --algo.kl_coef
MODEL --algo.reference_decay 0.9 => update a reference: give --algo.kl_coef
MODEL --algo.kl_coef 1 --algo.reference_every 3 --algo.reference m =>
    starts as the actor's model; leave out --algo.reference
MODEL --algo.kl_coef 1 --algo.reference_decay 1 => would never update the reference
NOTHING_PLAYED --algorithm dpo --algo.reference_decay 1 => would never update the reference
MODEL --algo.reference t => --algo.reference needs --algo.kl_coef
MODEL --algorithm opd => learns from a teacher alone: give --algo.teacher
MODEL --algo.teacher_coef 2 => --algo.teacher_coef needs --algo.teacher
MODEL --algorithm ppo --algo.teacher t => a critic does not know the teacher's part
MODEL --algo.teacher_loss jsd => --algo.teacher_loss=jsd needs --algo.teacher
MODEL --algo.teacher t --algo.teacher_beta 0.1 => needs --algo.teacher_loss jsd
MODEL --algo.teacher t --algo.teacher_loss jsd --algo.teacher_beta 0 =>
    --algo.teacher_beta=0.0 must be between 0 and 1
MODEL --algo.teacher http://h:1 --algo.teacher_loss jsd =>
    needs the teacher server's most likely tokens: give --algo.teacher_top_k
MODEL --algo.teacher t --algo.teacher_top_k 5 => is for a teacher behind a URL
MODEL --algo.teacher http://h:1 --sampling.temperature 0.7 =>
    a teacher behind a URL gives logprobs at temperature 1
MODEL --algorithm opd --algo.teacher t --algo.teacher_coef 2 => --algo.teacher_coef changes nothing
MODEL --envs.talk.teacher t => --envs.talk.teacher=t needs --algo.teacher
MODEL --algo.teacher t --algo.teacher_update ema => needs --algo.teacher self
MODEL --algo.teacher self --algo.teacher_decay 0.9 => with --algo.teacher_update ema
MODEL --algo.teacher self --algo.teacher_update ema --algo.teacher_decay 1 => must be below 1
MODEL --algo.teacher self --algo.teacher_loss jsd --cp 2 =>
    --cp=2 splits the sequences, and the teacher self
MODEL --engine embedded --learner.logprob_microbatch_tokens 9000 =>
    at least twice --learner.microbatch_tokens=8192
MODEL --engine embedded --learner.logprob_microbatch_tokens 20000 --cp 2 => --cp=2
MODEL --engine embedded --learner.logprob_microbatch_tokens auto --algo.teacher self => leave it out
MODEL --engine embedded --learner.logprob_microbatch_tokens automatic => logprob_microbatch_tokens
# settings of one actor
MODEL --actors.policy.optim.lrr 1 => did you mean 'actors.policy.optim.lr'?
MODEL --actors.policy.group_size 4 => --group_size is the same for all actors
MODEL --actors.policy.rollout.save false => --rollout.save is the same for all actors
MODEL --actors.policy.optim.lr high => --actors.policy.optim.lr=high must be a valid number
MODEL --actors.policy.algo.clip_low 2 => --actors.policy.algo.clip_low=2 must be less than
MODEL --actors.policy.algorithm sft => --actors.policy.algorithm=sft
MODEL --actors.policy.learner.updates_per_epoch 3 =>
    actor policy: --learner.updates_per_epoch=3 must
MODEL --actors.policy.learner.kernels liger => all actors have the same
MODEL --actors.policy.update_every 200 => the actor would not learn in --num_steps=100
MODEL --actors.policy.update_every 2 --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 2 =>
    .update_every=2 and --rollout.stale_policy_frac cannot be combined
MODEL --actors.judge.model m --actors.judge.train false --actors.judge.algo.kl_coef 1 =>
    --actors.judge: lora.rank, algorithm, algo
MODEL --actors.policy.lora.rank 2 --actors.b.lora_base policy --actors.b.learner.offload phase =>
    are the model's; give them to policy
MODEL --engine embedded --actors.policy.optim.name adamm => adamm is unknown; did you mean 'adamw'
"""
ROWS = [
    row.split(" => ")
    for row in TABLE.strip().replace(" =>\n    ", " => ").splitlines()
    if not row.startswith("#")
]


@pytest.fixture
def every_extra(monkeypatch):
    """Libraries that are optional count as installed here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize("line, says", ROWS)
def test_flags_alone_are_refused_with_the_value_and_the_fix(line, says, every_extra):
    base, *flags = line.split()
    with pytest.raises(ValueError, match=r"--|learns|argument") as error:  # noqa: PT012 any may raise
        config = parse_config([*BASES[base], *flags])
        choose_engine(config, config.engine_tp, is_planned=True)
        choose_algorithm(config, {})
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_contradict_nothing(preset):
    needed = ["--algo.teacher", "m"] if preset == "opd" else []
    config = parse_config([*MODEL, "--algorithm", preset, *needed])
    choose_algorithm(config, {})


@pytest.mark.parametrize(
    "flags, library, extra",
    [
        ("--optim.name adamw8bit", "bitsandbytes", "bnb"),
        ("--actors.policy.lora.rank 4 --actors.policy.lora.quantize nf4", "bitsandbytes", "bnb"),
        ("--learner.kernels liger", "liger_kernel", "liger"),
        ("--actors.judge.model m --actors.judge.api http://x/v1", "openai", "api"),
        ("--agents.response_format enforce", "llguidance", "grammar"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(flags, library, extra, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == library else object()
    )
    with pytest.raises(
        ValueError,
        match=rf"needs {library}, which is not installed: pip install 'rl_core\[{extra}\]'",
    ):
        check_options(parse_config([*MODEL, *flags.split()]))


def test_a_file_of_flags_is_refused_with_its_name(tmp_path):
    file = tmp_path / "c.yaml"
    for text, says in {
        "optim: {lrr: 1}": "unknown flag --optim.lrr; did you mean 'optim.lr'",
        "actors: {bob: {lora: {rnk: 4}}}": "did you mean 'actors.bob.lora.rank'",
        "optim: {lr: fast}": "--optim.lr=fast must be a valid number",
        "[1]": "here belong keys with values",
        "": "here belong keys with values",
        "a: b: c": "mapping values are not allowed here",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=f"--config {file}: ") as error:
            parse_config(["--config", str(file)])
        assert says in str(error.value)
    with pytest.raises(ValueError, match=r"no\.yaml: No such file or directory; name a YAML"):
        parse_config(["--config", str(tmp_path / "no.yaml")])


def test_flags_override_a_file_wherever_it_stands(tmp_path):
    lists = (
        "data: {train: [a.jsonl, b.csv], eval: {aime: c.jsonl, gsm8k: d.jsonl}, columns: {answer: "
        "solution}}\n"
    )
    (tmp_path / "c.yaml").write_text(
        f"{lists}optim: {{lr: 1e-3, betas: [0.8, 0.9]}}\nactors: {{bob: {{model: m}}}}\nout: x\n"
    )
    more = [
        "--env_path",
        "x.py",
        "--resume",
        "--sampling.stop",
        '["a,b"]',
        "--eval.sampling",
        "top_p=0.5,top_k=3",
    ]
    config = parse_config(
        [
            "--optim.lr",
            "2",
            *more,
            "--config",
            str(tmp_path / "c.yaml"),
            "--actors.bob.optim.lr=1e-4",
        ]
    )
    assert (config.optim.lr, config.optim.betas, config.resume) == (2.0, (0.8, 0.9), True)
    assert config.actors["bob"].optim == {"lr": 1e-4} and config.actors["bob"].model == "m"
    assert (config.data.train, config.data.eval) == ("a.jsonl,b.csv", "aime=c.jsonl,gsm8k=d.jsonl")
    assert (config.data.columns, config.num_steps) == ({"answer": "solution"}, 100)
    variables = ["--chat_template_kwargs", '{"enable_thinking": false, "budget": 3}']
    variables += ["--actors.bob.chat_template_kwargs", "enable_thinking=True,effort=high"]
    config = parse_config([*more, *variables, "--config", str(tmp_path / "c.yaml")])
    assert config.chat_template_kwargs == {"enable_thinking": False, "budget": 3}
    assert config.actors["bob"].chat_template_kwargs == {"enable_thinking": True, "effort": "high"}
    assert config.sampling.stop == ["a,b"] and config.eval.sampling == {"top_p": 0.5, "top_k": 3.0}
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert parse_config(["--config", str(tmp_path / "again.yaml")]) == config


def test_help_has_a_short_line_and_the_default_of_every_flag(capsys):
    shown = ""
    for section in ("", *(f.name for f in dataclasses.fields(Config))):
        with contextlib.suppress(ValueError):
            assert print_help(["--help", section])
        shown += capsys.readouterr().out
    for name, (_, f) in known_flags().items():
        ours = name.removeprefix("actors.NAME.")
        # The page of optim explains an actor's optim.lr, the page of actors only lists it.
        shown_as = ours if ours.partition(".")[0] in OWN_SECTIONS else name
        assert (
            f"--{shown_as} " in shown
            and 0 < len(f.metadata["help"]) < 90
            and "\n" not in f.metadata["help"]
        ), name
    assert "--actors.NAME.{algo.*, critic.*, learner.*, optim.*, sampling.*}" in shown
    assert "{constant, linear, cosine, wsd} [constant]" in " ".join(shown.split())


def test_a_long_reason_keeps_its_first_line_and_its_exception():
    text = "the first line " + "x" * 500 + " KeyError: 'unknown'"
    short = keep_ends(text, 90)
    assert len(short) == 90 and short.startswith("the first line x")
    assert short.endswith("x KeyError: 'unknown'") and "x ... x" in short
    assert keep_ends(text, len(text)) == text


@pytest.mark.parametrize(
    "word, flags",
    [
        ("lora", ["actors.NAME.lora.rank", "actors.NAME.lora.quantize", "actors.NAME.lora_base"]),
        ("lr", ["optim.lr", "critic.lr"]),
        ("learning_rate", ["optim.lr"]),
        ("use_peft", ["actors.NAME.lora.rank"]),
        ("chat-template-kwargs", ["chat_template_kwargs"]),
        ("", ["data.train", "optim.lr", "algo.kl_coef", "sampling.temperature", "model"]),
        ("", ["actors.policy.lora.rank"]),
    ],
)
def test_help_finds_flags_by_a_word_and_first_shows_those_of_most_runs(word, flags):
    page = help_page(word)
    assert all(f"\n  --{flag} " in page for flag in flags)
    assert ("--tasks_per_step" in page) == (word == "")


def test_a_row_of_a_table_is_a_choice_without_another_change(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "lion", OPTIMIZERS["sgd"])
    choose_engine(parse_config([*MODEL, "--optim.name", "lion"]), 1)
    assert "{adamw, sgd, adamw8bit, muon, lion} [adamw]" in " ".join(help_page("optim").split())
