"""Learning curves of a pretrained model on a CPU, without SFT before: held-out scores before and
after, for three seeds.

    python scripts/curves_real.py instructions          # one or several of CURVES; --seeds 0,1,2
    python scripts/curves_real.py instructions_random   # the control: rewards are drawn at random
    python scripts/curves_real.py distilled dpo rm      # from the run `instructions` of a seed
    python scripts/curves_real.py scored                # RL on the run `rm` of a seed
    python scripts/curves_real.py clues --second models/gemma3      # two models in one run

--model is a folder or a hub name, SmolLM2-135M-Instruct by default. A curve that was interrupted
continues from its last checkpoint. The runs are in runs/real/NAME_SEED, figures in figures.json.
Fails if a held-out score does not rise, or if that of the control does.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from script_tools import ROOT, make_parser, read_metrics, run, write_json, write_rows

from rl_core.data.tables import read_episodes

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMON = "--optim.warmup_steps 3 --keep_checkpoints 1"
GROUPS = "--tasks_per_step 8 --group_size 8 --save_every 10"
FLAT = 0.05  # Two standard errors of a held-out mean over 64 tasks, about.
RANDOM_REWARDS = """

true_reward = reward(weight=0)(reward_fn)


def reward_fn(trajectory):
    tokens = [i for turn in trajectory.turns for i in turn.completion.token_ids]
    return zlib.crc32(repr(tokens).encode()) % 5 / 4
"""

# The reward is the score of the run `rm`. The true reward is logged.
SCORES = """

from pathlib import Path

from rl_core.rewards.reward_model import RewardModel

true_reward = reward(weight=0)(reward_fn)
model = RewardModel(str(Path(__file__).parent.parent / "rm_{seed}/rl/hf/policy"))


def reward_fn(messages):
    return model.score([messages])[0]
"""

# The program of docs/agents.md, as it is there.
AGENT = """

from openai import AsyncOpenAI, DefaultAsyncHttpxClient


async def solve(client, question):
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model="gpt-5-mini", messages=messages)
    return reply.choices[0].message.content


async def agent(task, llm):
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=http) as client:
        return await solve(client, task.row["messages"][-1]["content"])


def reward_fn(result, answer):
    return numeric(result or "", answer)
"""
# The policy teaches itself: the teacher's prompt has the sum.
SELF = """


def teacher_prompt(task, answer):
    system, question = task.row["messages"]
    hint = f"{question['content']} The right answer is {answer}. Write only this number."
    return [system, {"role": "user", "content": hint}]
"""

# The chat template renders no tools, and the model writes no tags: the system message describes the
# calculator, and the first product in a reply is a call.
CALCULATOR = """

from rl_core.rewards import numeric


def interact(messages):
    call = re.search("([0-9]{1,9}) ?[*] ?([0-9]{1,9})", messages[-1]["content"])
    if not call:
        return None
    return [{"role": "user", "content": f"The calculator says {int(call[1]) * int(call[2])}."}]


def reward_fn(completion, answer):
    return numeric(completion, answer)
"""

# Bob describes a word that Alice has to find among four. Her model is not tuned to follow
# instructions, so that her chat template begins with an example.
CLUES = """
import random

KINDS = '''dog horse cat cow duck rabbit tiger whale
lemon bread cheese apple soup rice carrot cake
hammer saw knife scissors needle spoon ladder broom
rain snow wind storm sun moon fog ice
piano drum guitar violin flute trumpet bell harp
shirt shoe hat coat sock glove scarf belt
car train ship bicycle bus plane truck boat
river mountain forest desert island lake beach valley'''


def load_tasks(split):
    kinds = [line.split() for line in KINDS.splitlines()]
    kinds = [kind[:6] if split == "train" else kind[6:] for kind in kinds]
    rng, rows = random.Random(0), {}
    while len(rows) < (400 if split == "train" else 64):
        words = [rng.choice(kind) for kind in rng.sample(kinds, 4)]
        rows[" ".join(words)] = {"prompt": "Go.", "word": words[0], "words": sorted(words)}
    return list(rows.values())


async def rollout(task, actors):
    word, words = task.row["word"], task.row["words"]
    question = f'What is a {word}? Reply in one short sentence. Do not say "{word}".'
    hint = await actors["bob"].respond(question)
    clue = " ".join(hint.text.split())
    guess = await actors["alice"].respond(f"Clue: {clue}\\nWords: {', '.join(words)}")
    has_kept = float(word not in clue.lower())
    has_guessed = float(guess.text.strip() == word)
    bob = hint.trajectory(reward=has_kept * (0.2 + 0.8 * has_guessed))
    return [bob, guess.trajectory(reward=has_guessed)]
"""
EXAMPLE = """{{ bos_token }}Clue: It is a small insect that makes honey.
Words: bee, chair, doctor, window
Word: bee
{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }}
{% else %}{{ message['content'] }}
{% if not loop.last or add_generation_prompt %}Word:{% endif %}{% endif %}{% endfor %}"""


def products(_: Path) -> tuple[list, list]:
    """Rows of products of two digits and one, to train and held out."""
    content = "You have a calculator. Write the calculation first, such as 12*3, to get its result."
    rows = []
    for number in range(720):
        a, b = number // 8 + 10, number % 8 + 2
        messages = [
            {"role": "system", "content": content},
            {"role": "user", "content": f"What is {a}*{b}?"},
        ]
        rows.append({"messages": messages, "answer": a * b})
    random.Random(0).shuffle(rows)
    return rows[64:], rows[:64]


def sums(_: Path) -> tuple[list, list]:
    """Rows of sums of two numbers up to 20, to train and held out."""
    system = {"role": "system", "content": "Answer with a number."}
    rows = []
    for number in range(400):
        a, b = number // 20 + 1, number % 20 + 1
        question = {"role": "user", "content": f"What is {a} + {b}?"}
        rows.append({"messages": [system, question], "answer": a + b})
    random.Random(0).shuffle(rows)
    return rows[64:], rows[:64]


def ranked(source: Path, files: str) -> Iterator[dict]:
    """A best and a worst reply to each prompt by the reward, both of the same step's model."""
    rng, groups = random.Random(0), {}
    for path in sorted((source / "rollouts").glob(files)):
        for episode in read_episodes(path):
            groups.setdefault((path.name, episode["task_id"]), []).append(episode)
    for episodes in groups.values():
        rewards = [episode["reward"] for episode in episodes]
        if min(rewards) < max(rewards):
            best, worst = (
                rng.choice([each for each in episodes if each["reward"] == value])["messages"]
                for value in (max(rewards), min(rewards))
            )
            texts = {"chosen": best[-1]["content"], "rejected": worst[-1]["content"]}
            yield {"prompt": best[-2]["content"], **texts}


def pairs(source: Path) -> tuple[list, list]:
    """Pairs of a run's episodes and of its held-out samples, of which each prompt occurs once."""
    held_out = list(ranked(source, "eval_*_sampled.*"))
    random.Random(0).shuffle(held_out)
    unique = {row["prompt"]: row for row in held_out}
    return list(ranked(source, "step_*")), list(unique.values())


@dataclass(kw_only=True)
class Curve:
    """Settings of one run."""

    env: str = ""  # A file of envs/, or the name of `text`.
    text: str = ""  # An environment that is not in envs/.
    flags: str  # {source} is the seed's run `instructions`.
    actors: str = "--model {model}"
    actor: str = "policy"  # Its rewards are read.
    rows: Callable[[Path], tuple[list, list]] | None = None  # Default: the environment's.
    more: str = ""  # Text at the end of a copy of the environment's file.

    @property
    def is_control(self) -> bool:
        """Rewards are drawn at random. The score must stay."""
        return self.more == RANDOM_REWARDS

    @property
    def has_true_reward(self) -> bool:
        """The reward of the rules is logged, and another one is learned."""
        return self.more in (RANDOM_REWARDS, SCORES)


LENGTHS = "--max_prompt_tokens 128 --max_tokens 48 "
INSTRUCTIONS = f"{GROUPS} {LENGTHS} --num_steps 30 --eval_every 30 --optim.lr "
PAIRS = f"{LENGTHS} --tasks_per_step 8 --num_epochs 1 --eval_every 25 --algorithm "
SUMS = (
    f"{GROUPS} --max_prompt_tokens 64 --max_tokens 12 --num_steps 30 --eval_every 15 "
    "--optim.lr 2e-5"
)
CURVES = {
    "instructions": Curve(env="instructions", flags=INSTRUCTIONS + "2e-5"),
    "instructions_lora": Curve(
        env="instructions",
        flags=INSTRUCTIONS + "2e-4 --actors.policy.lora.rank 16",
    ),
    "instructions_random": Curve(
        env="instructions",
        flags=INSTRUCTIONS + "2e-5",
        more=RANDOM_REWARDS,
    ),
    "scored": Curve(
        env="instructions",
        flags=INSTRUCTIONS + "2e-5 --algo.kl_coef 0.05",
        more=SCORES,
    ),
    "sums": Curve(env="word_problems", rows=sums, flags=SUMS),
    "sums_agent": Curve(env="word_problems", rows=sums, flags=SUMS, more=AGENT),
    "sums_self": Curve(
        env="word_problems",
        rows=sums,
        flags=f"{SUMS} --group_size 2 --algorithm opd --algo.teacher self "
        "--algo.teacher_loss reverse_kl",
        more=SELF,
    ),
    "distilled": Curve(
        env="instructions",
        flags=f"{LENGTHS} --algorithm opd --algo.teacher {{source}}/hf/policy "
        "--algo.teacher_loss reverse_kl --tasks_per_step 8 --group_size 2 --num_steps 20 "
        "--eval_every 10 --optim.lr 2e-5",
    ),
    "calculator": Curve(
        env="calculator",
        rows=products,
        more=CALCULATOR,
        flags=f'{GROUPS} --max_prompt_tokens 112 --max_tokens 20 --sampling.stop ["="] '
        "--num_steps 15 --eval_every 15 --optim.lr 2e-5",
    ),
    "clues": Curve(
        env="clues",
        text=CLUES,
        actor="bob",
        actors="--actors.bob.model {model} --actors.alice.model {second} "
        "--actors.alice.chat_template {folder}/example.jinja --actors.alice.max_tokens 5 "
        '--actors.alice.sampling.stop ["\\n"]',
        flags="--tasks_per_step 6 --group_size 8 --max_prompt_tokens 112 --max_tokens 14 "
        "--num_steps 20 --eval_every 20 --optim.lr 2e-5 --actors.alice.optim.lr 5e-6",
    ),
    "dpo": Curve(rows=pairs, flags=PAIRS + "dpo --optim.lr 1e-5"),
    "rm": Curve(rows=pairs, flags=PAIRS + "rm --optim.lr 5e-5"),
}


def env_path(curve: Curve, folder: Path, seed: int) -> str:
    """The environment's file, or a copy with more at its end."""
    path = ROOT / f"envs/{curve.env}.py"
    if not curve.more and not curve.text:
        return str(path)
    copy = folder / f"{curve.env}.py"
    more = curve.more.replace("{seed}", str(seed))
    copy.write_text("import zlib\n" + (curve.text or path.read_text()) + more)
    return str(copy)


def measure(name: str, seed: int, args: Namespace) -> dict:
    """CPU seconds of this process's children, rewards by step, held-out scores by step. Of pairs,
    the share that is ranked rightly instead."""
    curve, folder = CURVES[name], ROOT / f"runs/real/{name}_{seed}"
    source = ROOT / f"runs/real/instructions_{seed}/rl"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "example.jinja").write_text(EXAMPLE)
    flags = f"{curve.actors} --out {folder}/rl --seed {seed} {COMMON} {curve.flags} "
    flags = flags.format(source=source, folder=folder, model=args.model, second=args.second)
    if curve.env:
        flags += f"--env_path {env_path(curve, folder, seed)} --eval.num_tasks {args.num_eval} "
    if curve.rows:
        for split, rows in zip(("train", "eval"), curve.rows(source), strict=True):
            write_rows(folder / f"{split}.jsonl", rows)
            flags += f"--data.{split} {folder}/{split}.jsonl "
    if (folder / "rl").exists():
        flags += "--resume"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(f"-m rl_core.train {flags}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    prefix = f"eval/{curve.env}/" + f"{curve.actor}/" * (curve.actor != "policy")
    keys = {"greedy": f"{prefix}greedy_score", "sampled": f"{prefix}avg@4"}
    if curve.has_true_reward:
        keys = {kind: f"{prefix}{kind}_true_reward" for kind in keys}
    keys["reward"] = f"rollout/{curve.actor}/reward_mean"
    if not curve.env:
        keys = {"reward": "learn/policy/accuracy", "sampled": "eval/accuracy"}
    rows = read_metrics(folder / "rl")
    series = {kind: [row[key] for row in rows if key in row] for kind, key in keys.items()}
    return {"cpu_s": round(sum(after[:2]) - sum(before[:2]))} | series


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="+", choices=CURVES, metavar="NAME", help=", ".join(CURVES))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--second", default="google/gemma-3-270m", help="second model of `clues`")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--num_eval", type=int, default=64, help="held-out tasks")
    args = parser.parse_args()
    path = ROOT / "runs/real/figures.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    has_failed = False
    for name in args.names:
        for seed in args.seeds.split(","):
            figures = measure(name, int(seed), args)
            results[f"{name}_{seed}"] = figures
            write_json(path, results)
            first, last = figures["sampled"][0], figures["sampled"][-1]
            is_control = CURVES[name].is_control
            is_wrong = abs(last - first) > FLAT if is_control else last < first + FLAT
            has_failed |= is_wrong
            problem = (", moved" if is_control else ", no rise") * is_wrong
            steps = figures["reward"]
            first_steps, last_steps = statistics.mean(steps[:5]), statistics.mean(steps[-5:])
            greedy = [f"{score:.2f}" for score in figures.get("greedy", [])]
            print(
                f"{name} seed {seed}: in training {first_steps:.2f} to {last_steps:.2f}; held out: "
                f"greedy {' to '.join(greedy) or '-'}, sampled {first:.2f} to {last:.2f}{problem}; "
                f"{figures['cpu_s']} CPU s",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
