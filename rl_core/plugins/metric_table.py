"""Every metric of metrics.jsonl: what it is, its unit, which values are healthy. For
docs/metrics.md (`python -m rl_core.plugins.metric_table` prints it), `rl-core info metrics` and the
viewer.

In a name ACTOR, ENV, SET, PART and METRIC stand for a user's names, K for a number; [...] may be
missing; {a,b} is either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`above`, `below`: a value beyond it is worth a look, whatever the task is."""

    name: str
    what: str
    unit: str
    healthy: str = ""
    above: float | None = None
    below: float | None = None

    @property
    def pattern(self) -> re.Pattern[str]:
        text = re.escape(self.name).replace(r"\[", "(?:").replace(r"\]", ")?")
        text = re.sub(r"\\\{(.+?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", text)
        text = re.sub(r"\b(ACTOR|ENV)\b", "[^/]+", text)
        text = re.sub(r"\bSET\b", "[^/]+(?:/[^/]+)?", text)  # a name, or ENV/NAME
        return re.compile(re.sub(r"(PART|METRIC)\b", ".+", text.replace("@K", r"@\d+")))

    @property
    def short_names(self) -> list[str]:
        """The name after its last slash, once for each of {a,b}; none where a user gives it."""
        start, choices, end = re.fullmatch(
            r"(?:[^{]*[]/])?([^{]*)(?:\{(.+)\})?(.*)", self.name
        ).groups()
        names = [start + choice + end for choice in (choices or "").split(",")]
        return [name for name in names if not re.search("PART|METRIC", name)]

    @property
    def is_of_user(self) -> bool:
        """The environment names it."""
        return self.name.endswith("METRIC")


EPISODES, LEARNING = "rollout/ACTOR/[ENV/]", "learn/ACTOR/"
HELD_OUT = "eval/SET/[ACTOR/]"
LOSS = "nats x advantage"

# Section -> (name, what, unit, healthy, above, below) of its metrics. The first row that fits a
# name describes it.
SECTIONS: dict[str, list[tuple]] = {
    "Episodes of a step": [
        (
            EPISODES + "reward_mean",
            "mean reward of the episodes that did not fail",
            "reward",
            "rises over tens of steps; before the first it is neither the lowest nor the highest "
            "that "
            "is possible",
        ),
        (
            EPISODES + "reward/PART",
            "mean of one part of the reward, times its weight; the parts add up to the reward",
            "reward",
            "moves; a part that is only a help (format, length) stays smaller than the one that is "
            "meant",
        ),
        (
            EPISODES + "zero_signal_frac",
            "fraction of groups whose rewards are all equal up to rounding: nothing is learned "
            "from them where the baseline is the group's (all but ppo and reinforce_pp)",
            "fraction",
            "below 0.7; at 1 tasks are too easy, too hard, or the reward is constant",
            0.7,
        ),
        (
            EPISODES + "length_mean",
            "sampled tokens of an episode, mean; where it returned several conversations, their "
            "mean "
            "counts",
            "tokens",
            "far below the limit; growth without a higher reward is padding",
        ),
        (EPISODES + "length_p50", "median of sampled tokens per episode", "tokens"),
        (
            EPISODES + "length_p95",
            "95th percentile of sampled tokens per episode",
            "tokens",
            "below the limit",
        ),
        (EPISODES + "length_max", "most sampled tokens of a conversation", "tokens"),
        (EPISODES + "turns_mean", "turns that the actor spoke in an episode, mean", "turns"),
        (
            EPISODES + "truncated_frac",
            "fraction of episodes that hit a length limit: --max_tokens in a turn, or the context",
            "fraction",
            "below 0.2, and falling",
            0.2,
        ),
        (
            EPISODES + "failed",
            "episodes that failed (a hook raised, took too long, gave no finite number), in no "
            "mean; of an "
            "API actor: requests that failed",
            "episodes",
            "0",
            0.0,
        ),
        (EPISODES + "tokens", "sampled tokens of all episodes that did not fail", "tokens"),
        (
            EPISODES + "tool_parse_failed",
            "replies of an episode whose tool call could not be read, mean",
            "replies",
            "falls to 0",
        ),
        (
            "rollout/ACTOR/lagged_frac",
            "with --rollout.lagged: fraction of sampled tokens by older weights",
            "fraction",
            "about the fraction that --rollout.lagged asks for",
        ),
        (
            "rollout/ACTOR/lag_versions",
            "with --rollout.lagged: mean age of these tokens' weights",
            "versions",
        ),
        (
            "rollout/ACTOR/engine_restarts",
            "SGLang servers that died and were started again",
            "servers",
            "0",
            0.0,
        ),
        ("rollout/ACTOR/requests", "of an API actor: requests that were sent", "requests"),
        (
            "rollout/ACTOR/retries",
            "of an API actor: requests that were sent again after an error",
            "requests",
            "far below the number of requests",
        ),
        (
            "rollout/ACTOR/prompt_tokens",
            "of an API actor: tokens of prompts, as the endpoint counts them",
            "tokens",
        ),
        (
            "rollout/ACTOR/completion_tokens",
            "of an API actor: tokens of replies, as the endpoint counts them",
            "tokens",
        ),
        (
            "rollout/staleness",
            "with --max_staleness: versions by which the weights that began a group are older than "
            "those "
            "that learn from it, mean",
            "versions",
            "below --max_staleness",
        ),
        (
            "rollout/staleness_max",
            "the same of the oldest group",
            "versions",
            "at most --max_staleness",
        ),
        (
            "rollout/refill_rounds",
            "times that groups without signal were replaced (DAPO's dynamic sampling)",
            "rounds",
            "0 to 3; many rounds make a step expensive",
        ),
        (
            "rollout/groups_missing",
            "groups with a signal that the step lacks after the last round",
            "groups",
            "0",
            0.0,
        ),
        (
            "rollout/engine_switches",
            "where engines share a device: times that it went from one to another",
            "switches",
            "few: each writes and reads weights",
        ),
        ("rollout/engine_switch_s", "seconds of these switches", "s", "far below time/generate_s"),
        (
            EPISODES + "METRIC",
            "mean of a metric that the environment gives: of trajectory(metrics=...), or of a "
            "reward with "
            "weight 0",
            "the environment's",
        ),
    ],
    "Learning": [
        (
            LEARNING + "loss",
            "what was minimised, mean over the step's updates",
            f"{LOSS}; sft, dpo and rm: nats",
            "of policy gradients it says little: about 0 at the first update, whatever is learned; "
            "of "
            "sft, dpo and rm it falls",
        ),
        (
            LEARNING + "grad_norm",
            "norm of the gradient before it is clipped (--optim.max_grad_norm)",
            "loss per weight",
            "steady; jumps of ten times and more come before a collapse",
        ),
        (LEARNING + "lr", "learning rate", "", "as --optim.schedule says"),
        (
            LEARNING + "updates",
            "optimizer steps",
            "updates",
            "--learner.minibatches times --learner.epochs",
        ),
        (
            LEARNING + "skipped_updates",
            "minibatches without any signal, and those of --critic.warmup_steps: no update",
            "updates",
            "0",
            0.0,
        ),
        (
            LEARNING + "kl_stopped_updates",
            "updates left out because step_kl_nats rose above --algo.target_kl",
            "updates",
            "0 on most steps",
        ),
        (
            LEARNING + "nonfinite_updates",
            "updates left out because loss or gradient was NaN or infinite",
            "updates",
            "0",
            0.0,
        ),
        (
            LEARNING + "entropy_nats",
            "entropy of the policy at a trained token, at the sampling temperature, mean",
            "nats",
            "falls slowly; a fall to a tenth of its start within some steps is a collapse: groups "
            "lose their signal",
        ),
        (
            LEARNING + "clip_frac",
            "fraction of trained tokens whose ratio was clipped",
            "fraction",
            "0 with one update per step; else below 0.2 (gspo: below 0.5)",
            0.5,
        ),
        (
            LEARNING + "step_kl_nats",
            "with several updates per step: k3 estimate of KL(old || new) per trained token, the "
            "policy at the start of the step against this update's",
            "nats",
            "below 0.05",
            0.1,
        ),
        (
            LEARNING + "ref_kl_nats",
            "with a reference model: k3 estimate of KL(policy || reference) per trained token",
            "nats",
            "grows slowly; what matters is the reward that it buys",
        ),
        (
            LEARNING + "mismatch_kl_nats",
            "how far the engine samples from what the learner computes: mean of exp(-d) - 1 + d, d "
            "= the learner's logprob less the engine's, over trained tokens",
            "nats",
            "below 1e-6 in float32, below 0.01 in bfloat16; more with --max_staleness or "
            "--rollout.lagged",
            0.01,
        ),
        (
            LEARNING + "mismatch_kl_nats_max",
            "the same of the worst token",
            "nats",
            "below 1; a few tokens above it are usual in bfloat16",
        ),
        (
            LEARNING + "mismatch_tail_frac",
            "fraction of trained tokens with |d| above 0.5 nats",
            "fraction",
            "below 0.01: try --algo.correction otherwise",
            0.01,
        ),
        (
            LEARNING + "canary_max_diff",
            "largest difference between logprobs of engine and learner on fixed prompts; absent "
            "where the engine reads the learner's "
            "weights",
            "nats",
            "below --canary_tolerance, or the run stops",
        ),
        (
            LEARNING + "expert_load_maxvio",
            "mixtures of experts: tokens of the fullest expert over the mean, less 1, averaged "
            "over layers",
            "",
            "as at the start; growth means that few experts get all tokens",
        ),
        (
            LEARNING + "router_aux_loss",
            "mixtures of experts: the auxiliary loss without its coefficient",
            "",
            "near the model's number of experts per token, where the load is even",
        ),
        (
            LEARNING + "accuracy",
            "dpo, rm: fraction of pairs whose chosen side has the higher reward; a tie is half",
            "fraction",
            "rises from 0.5; 1 within some steps means that the pairs differ by something trivial",
        ),
        (
            LEARNING + "margin_mean",
            "dpo, rm: mean reward of the chosen side less that of the rejected one",
            "reward",
            "rises",
        ),
        (
            LEARNING + "chosen_reward_mean",
            "dpo: beta x log-ratio of the chosen replies; rm: their score",
            "reward",
            "dpo: a long fall below 0 means that chosen replies become less likely too",
        ),
        (LEARNING + "rejected_reward_mean", "the same of rejected ones", "reward", "falls"),
        (
            LEARNING + "critic_value_mean",
            "ppo: mean value that the critic gives to a trained token",
            "reward",
            "near the mean reward",
        ),
        (
            LEARNING + "critic_explained_variance",
            "ppo: 1 - Var(G - V) / Var(G), G the discounted rewards from the token on, "
            "V the critic's "
            "value",
            "",
            "rises from 0 or below towards 1; below 0 after warm-up V is worse than a constant",
        ),
        (
            LEARNING + "critic_loss",
            "ppo: the critic's loss, half a squared error",
            "reward^2",
            "falls",
        ),
        (
            LEARNING + "critic_clip_frac",
            "ppo: fraction of tokens where --critic.value_clip decides",
            "fraction",
            "below 0.2",
        ),
        (
            LEARNING + "critic_{grad_norm,lr,updates,nonfinite_updates}",
            "ppo: the same of the critic's own updates",
            "as above",
        ),
        (
            LEARNING + "mfu",
            "on GPUs whose peak is known, in bfloat16: model FLOPs of learning, attention "
            "included, over the "
            "peak; recomputed activations do not count, nor experts that a token does not go "
            "to",
            "fraction",
            "0.3 to 0.5 for dense models of some billion parameters",
        ),
    ],
    "Held-out tasks": [
        (
            HELD_OUT + "greedy_score",
            "mean reward at temperature 0",
            "reward",
            "rises with the training reward",
        ),
        (
            HELD_OUT + "greedy_pass",
            "fraction of tasks whose greedy reward reaches --eval.pass_reward",
            "fraction",
        ),
        (HELD_OUT + "avg@K", "mean reward of K samples (--eval.samples)", "reward"),
        (
            HELD_OUT + "pass@K",
            "fraction of tasks where any of K samples reaches --eval.pass_reward",
            "fraction",
            "a fall while avg@K rises: the policy becomes narrow",
        ),
        (HELD_OUT + "{greedy,sampled}_reward/PART", "mean of one part of the reward", "reward"),
        (
            "eval/[SET/]loss",
            "sft, dpo, rm: mean loss of held-out rows, per trained token or pair",
            "nats",
            "falls; a rise while the training loss falls is overfitting",
        ),
        (
            "eval/[SET/]{accuracy,margin_mean,chosen_reward_mean,rejected_reward_mean}",
            "dpo, rm: as in learn/, of held-out pairs",
            "as above",
        ),
        (
            HELD_OUT + "{greedy,sampled}_METRIC",
            "mean of a metric that the environment gives, and of tool_parse_failed",
            "the environment's",
        ),
    ],
    "Packing": [
        (
            "pack/fill_frac",
            "work of the microbatches over the work if each were as full as the fullest",
            "fraction",
            "above 0.9 with many samples; low values: raise --learner.microbatch_tokens, or fewer "
            "ranks",
            None,
            0.5,
        ),
        ("pack/microbatches", "forward and backward passes of all ranks", "microbatches"),
        ("pack/tokens", "tokens of the samples that are trained, prompts included", "tokens"),
        (
            "pack/computed_tokens",
            "tokens of the forward, which computes a prompt that a group shares once",
            "tokens",
            "at most pack/tokens and some padding",
        ),
    ],
    "Time and memory": [
        ("time/step_s", "seconds of a step without evaluation and saving, mean over ranks", "s"),
        ("time/generate_s", "seconds in which episodes were played, or waited for", "s"),
        ("time/learn_s", "seconds of learning, all actors", "s"),
        (
            "time/sync_s",
            "seconds in which engines got new weights, all actors",
            "s",
            "a few percent of time/step_s",
        ),
        ("time/eval_s", "seconds of an evaluation", "s"),
        (
            "time/generate_tokens_per_s",
            "sampled tokens of trained actors per second of time/generate_s, all ranks",
            "tokens/s",
        ),
        (
            "time/learn_tokens_per_s",
            "pack/tokens per second of time/learn_s, all ranks",
            "tokens/s",
        ),
        (
            "time/learners_idle_frac",
            "with --engine_ranks: time/generate_s over time/step_s, in which learners waited",
            "fraction",
            "below 0.2; else more --engine_ranks",
            0.5,
        ),
        (
            "time/engines_idle_frac",
            "with --engine_ranks: fraction of time in which engines had no request",
            "fraction",
            "below 0.2; else fewer --engine_ranks, or --max_staleness 1",
            0.5,
        ),
        (
            "memory/{generate,learn,sync,eval}_gib",
            "on GPUs: peak that torch allocated in the phase, of the rank with most; "
            "not that of SGLang's servers",
            "GiB",
            "below 90 % of the GPU",
        ),
    ],
}


def make_row(values: tuple) -> Row:
    names = ("name", "what", "unit", "healthy", "above", "below")
    return Row(**dict(zip(names, values, strict=False)))


@cache
def rows() -> tuple[Row, ...]:
    return tuple(make_row(values) for section in SECTIONS.values() for values in section)


@cache
def describe(name: str) -> Row | None:
    """The row of a metric by its name in metrics.jsonl. None for an unknown one; one that may be an
    environment's own has METRIC's row."""
    return next((row for row in rows() if row.pattern.fullmatch(name)), None)


def page() -> str:
    """docs/metrics.md."""
    lines = ["# Metrics", "", *INTRO.strip().splitlines()]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| metric | what | unit | healthy |", "|---|---|---|---|"]
        for row in map(make_row, section):
            cells = [f"`{row.name}`", row.what, row.unit, row.healthy]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


INTRO = """
Every metric that a run writes to `metrics.jsonl` ([runs.md](runs.md)). `rl-core info metrics NAME` prints one. ACTOR is an
actor's name (`policy`, if there is one), ENV an environment's (where a run has several), SET that of held-out data (with several
environments ENV/SET). What stands in [brackets] may be missing. Values are over all ranks. One outside "healthy" is worth a look,
and no proof of a fault.

`rl_core/plugins/metric_table.py` is the source of this page.
"""

if __name__ == "__main__":
    print(page(), end="")
