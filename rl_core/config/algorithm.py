"""Flags of the algorithm, and the rules between them: contradictions, and flags without an
effect."""

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_type_hints

from annotated_types import Ge, Le

from rl_core.algorithms import ADVANTAGES, PRESETS, Algorithm
from rl_core.config.flag_parsing import Section
from rl_core.flags import AtLeast1, Count, Fraction, NotNegative, Positive, flag

RL = tuple(name for name, algorithm in PRESETS.items() if algorithm.is_rl)
SELF = "self"  # The policy as its own teacher.

# For pyright AlgoConfig has the fields of Algorithm; pyright does not know that they may be None.
if TYPE_CHECKING:
    Parts = Algorithm
else:
    Parts = object
T = TypeVar("T")


def with_parts(cls: type[T]) -> type[T]:
    """Adds the fields of Algorithm to a class, with None as default."""
    kinds = get_type_hints(Algorithm, include_extras=True)
    cls.__annotations__ = {name: kind | None for name, kind in kinds.items()}
    for f in fields(Algorithm):
        setattr(cls, f.name, field(default=None, metadata=f.metadata))
    return cls


@dataclass(kw_only=True)
@with_parts
class AlgoConfig(Section, Parts, prefix="algo."):
    """The fields of Algorithm. None keeps the part of the preset --algorithm."""


@dataclass(kw_only=True)
class CriticConfig(Section, prefix="critic."):
    model: str | None = flag(
        None, "value model to start from, a reward model too; default: the actor's"
    )
    lr: NotNegative = flag(1e-5, "its peak learning rate; --optim has the rest")
    warmup_steps: Count = flag(0, "steps in which only the critic learns")
    updates: AtLeast1 = flag(1, "its updates for each update of the policy")
    value_clip: NotNegative = flag(0.2, "clip range of values; 0 is off")
    gamma: Fraction = flag(1.0, "discount of rewards per token")
    gae_lambda: Fraction = flag(0.95, "GAE's lambda: 0 trusts the critic, 1 the rewards")


@dataclass(kw_only=True)
class PreferenceConfig(Section, prefix="preference."):
    beta: Positive | None = flag(
        None,
        "strength of DPO's and KTO's KL (0.1); SimPO's scale (2); ORPO's lambda (0.1)",
        only=("dpo", "simpo", "orpo", "kto"),
    )
    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "ipo_norm", "hinge"] = flag(
        "sigmoid",
        "DPO: loss of a pair's margin; norm: length-normalized, mean of token logprobs",
        only=("dpo",),
    )
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = flag(
        0.0, "DPO, SimPO: fraction of swapped pairs", only=("dpo", "simpo")
    )
    simpo_gamma: NotNegative = flag(1.0, "SimPO: target margin of the rewards", only=("simpo",))
    desirable_weight: NotNegative = flag(1.0, "KTO: weight of good replies", only=("kto",))
    undesirable_weight: NotNegative = flag(1.0, "KTO: weight of bad replies", only=("kto",))


@dataclass(kw_only=True)
class SftConfig(Section, prefix="sft."):
    weights: tuple[NotNegative, NotNegative] = flag(
        (1.0, 0.0), "loss weights: assistant, others (world model)"
    )


# (condition that breaks the rule, message). c: the configuration; a: the preset with the flags
# applied; f: True if the environment defines advantage_fn.
OF_ALGORITHM = [
    (
        lambda c, a, f: f and a.has_critic and c.algo.advantage is None,
        "{c.env_path} defines advantage_fn, which --algorithm {c.algorithm} would not call: its "
        "advantages come from a critic; set --algo.advantage gae to keep the critic, or take "
        "--algorithm grpo",
    ),
    (
        lambda c, a, f: f and a.advantage == "zero" and c.algo.advantage is None,
        "{c.env_path} defines advantage_fn, which --algorithm {c.algorithm} would not call: it "
        "learns from a teacher alone; set --algo.advantage custom to add both, or zero to leave "
        "rewards out",
    ),
    (
        lambda c, a, f: a.advantage == "custom" and not f,
        "--algo.advantage=custom needs def advantage_fn(rewards) in {c.env_path}; define it",
    ),
    (
        lambda c, a, f: (
            c.group_size < 2 and (ADVANTAGES[a.advantage].needs_group or a.dynamic_sampling_rounds)
        ),
        "--group_size={c.group_size}: a baseline and dynamic_sampling_rounds compare episodes of "
        "a group; "
        "take at least 2, or --algo.advantage none or gae",
    ),
    (
        lambda c, a, f: (
            a.baseline == "running" and (a.advantage != "none" or a.dynamic_sampling_rounds)
        ),
        "--algo.baseline=running compares an episode with earlier ones: leave out "
        "dynamic_sampling_rounds, and --algo.advantage {a.advantage} or take none",
    ),
    (
        lambda c, a, f: c.critic != type(c.critic)() and not a.has_critic,
        "--critic.* has no meaning for the advantage {a.advantage}; leave it out, or take "
        "--algorithm ppo",
    ),
    (
        lambda c, a, f: (
            a.has_critic
            and (
                a.objective == "gspo"
                or a.dynamic_sampling_rounds
                or a.normalize in ("env", "task")
                or a.turn_discount is not None
            )
        ),
        "--algo.advantage=gae: a critic learns from every token; leave out objective gspo, "
        "dynamic_sampling_rounds, normalize env or task and turn_discount",
    ),
    (
        lambda c, a, f: c.algo.gigpo_coef and not compares_states(a),
        "--algo.gigpo_coef={c.algo.gigpo_coef}: turns from equal states are compared with the "
        "advantage of episodes, and --algo.advantage {a.advantage} compares none; leave it out, "
        "or take --algorithm grpo",
    ),
    (
        lambda c, a, f: c.algo.gigpo_discount is not None and not compares_states(a),
        "--algo.gigpo_discount={c.algo.gigpo_discount} discounts returns that are compared between "
        "turns from equal states; leave it out, or take --algo.gigpo_coef 1 and an advantage that "
        "compares, such as group_norm",
    ),
    (
        lambda c, a, f: a.objective == "cispo" and a.dual_clip,
        "--algo.objective=cispo ignores --algo.dual_clip; leave it out, or take objective clip",
    ),
    (
        lambda c, a, f: 0 < a.dual_clip <= 1,
        "--algo.dual_clip={a.dual_clip} must be above 1; 0 is off, 3 is usual",
    ),
    (
        lambda c, a, f: (c.algo.kl or c.algo.kl_in) and not a.kl_coef,
        "--algo.kl and kl_in need --algo.kl_coef above 0; give 0.01, say, or leave them out",
    ),
    (
        lambda c, a, f: a.correction_range[0] >= a.correction_range[1],
        "--algo.correction_range={a.correction_range} must be two bounds, the lower first; 0.5,2 "
        "is usual",
    ),
    (
        lambda c, a, f: c.algo.correction_range and a.importance_correction == "none",
        "--algo.correction_range needs --algo.importance_correction; give "
        "--algo.importance_correction tis, or leave it "
        "out",
    ),
    (
        lambda c, a, f: a.overlong_buffer and a.truncation_penalty != "soft",
        "--algo.overlong_buffer needs --algo.truncation_penalty soft; give it, or leave the "
        "buffer out",
    ),
    (
        lambda c, a, f: a.advantage == "zero" and not a.teacher,
        "--algorithm {c.algorithm} learns from a teacher alone: give --algo.teacher MODEL",
    ),
    (
        lambda c, a, f: re.match(r"[\w.-]+:\d+(/|$)", a.teacher or ""),
        "--algo.teacher={a.teacher} is neither a model nor a URL; an address begins with http://: "
        "give --algo.teacher http://{a.teacher}",
    ),
    (
        lambda c, a, f: c.algo.teacher_coef and not a.teacher,
        "--algo.teacher_coef needs --algo.teacher; give a model's folder or hub name, a server's "
        "URL, or self",
    ),
    (
        lambda c, a, f: c.algo.teacher_update and not c.self_taught,
        "--algo.teacher_update={a.teacher_update} needs --algo.teacher self; give it, or leave "
        "teacher_update out",
    ),
    (
        lambda c, a, f: (
            c.algo.teacher_decay is not None
            and (not c.self_taught or a.teacher_update != "ema" or a.teacher_decay == 1)
        ),
        "--algo.teacher_decay={a.teacher_decay} needs --algo.teacher self with "
        "--algo.teacher_update ema, and must be below 1",
    ),
    (
        lambda c, a, f: c.self_taught and a.teacher_loss != "sampled" and c.cp > 1,
        "--algo.teacher_loss={a.teacher_loss}: --cp={c.cp} splits the sequences, and the teacher "
        "self reads other prompts; take sampled, or leave --cp out",
    ),
    (
        lambda c, a, f: c.algo.teacher_loss and not a.teacher,
        "--algo.teacher_loss={a.teacher_loss} needs --algo.teacher; give a model's folder or hub "
        "name, a server's URL, or self",
    ),
    (
        lambda c, a, f: c.cp > 1 and any(env.teacher for env in c.envs.values()),
        "--cp={c.cp}: a teacher of some environments cannot read parts of sequences; take --cp 1",
    ),
    (
        lambda c, a, f: (
            c.has_teacher_server and a.teacher_loss != "sampled" and not a.teacher_top_k
        ),
        "--algo.teacher_loss={a.teacher_loss} needs the teacher server's most likely tokens: give "
        "--algo.teacher_top_k; 20 is usual",
    ),
    (
        lambda c, a, f: (
            a.teacher_top_k and (a.teacher_loss == "sampled" or not c.has_teacher_server)
        ),
        "--algo.teacher_top_k={a.teacher_top_k} is for a teacher behind a URL and "
        "--algo.teacher_loss reverse_kl, forward_kl or jsd",
    ),
    (
        lambda c, a, f: c.has_teacher_server and (c.sampling.temperature != 1 or c.sampling.top_k),
        "a teacher behind a URL gives logprobs at temperature 1 over all tokens: take "
        "--sampling.temperature 1 without top_k, top_p and min_p, or a teacher's folder",
    ),
    (
        lambda c, a, f: c.algo.teacher_beta is not None and a.teacher_loss != "jsd",
        "--algo.teacher_beta={a.teacher_beta} needs --algo.teacher_loss jsd",
    ),
    (
        lambda c, a, f: not 0 < a.teacher_beta < 1,
        "--algo.teacher_beta={a.teacher_beta} must be between 0 and 1; at the bounds the "
        "divergence is --algo.teacher_loss forward_kl or reverse_kl",
    ),
    (
        lambda c, a, f: (
            c.algo.teacher_coef
            and a.teacher_loss == "sampled"
            and a.advantage == "zero"
            and a.normalize == "batch"
            and not a.kl_terms
        ),
        "--algo.teacher_coef changes nothing where advantages are the teacher's alone and "
        "normalized; leave it out, or give --algo.normalize none",
    ),
    (
        lambda c, a, f: a.teacher and a.has_critic and a.teacher_loss == "sampled",
        "--algo.teacher={a.teacher}: a critic does not know the teacher's part of the advantage; "
        "take another advantage than gae, or --algo.teacher_loss reverse_kl",
    ),
    (
        lambda c, a, f: c.algo.kl_reward and a.kl_coef and a.kl_in == "reward",
        "--algo.kl_reward={a.kl_reward} and --algo.kl_coef={a.kl_coef} are two KLs in the reward; "
        "leave one out, or give --algo.kl_in loss",
    ),
    (
        lambda c, a, f: c.algo.kl_loss and a.kl_coef and a.kl_in == "loss",
        "--algo.kl_loss={a.kl_loss} and --algo.kl_coef={a.kl_coef} are two KLs in the loss; leave "
        "one out, or give --algo.kl_in reward",
    ),
    (
        lambda c, a, f: a.target_kl and c.learner.updates_per_epoch * c.learner.epochs == 1,
        "--algo.target_kl={a.target_kl} skips later updates of a step: raise "
        "--learner.updates_per_epoch or --learner.epochs",
    ),
]
# Rules of the reference model, which DPO has too.
OF_REFERENCE = [
    (
        lambda c, a: c.algo.reference and not a.needs_reference,
        "--algo.reference needs --algo.kl_coef above 0, another KL, or --algo.log_kl",
    ),
    (
        lambda c, a: (a.reference_every or a.reference_decay) and not a.needs_reference,
        "--algo.reference_every and reference_decay update a reference: give --algo.kl_coef above "
        "0, another KL, or --algo.log_kl",
    ),
    (
        lambda c, a: (a.reference_every or a.reference_decay) and a.reference,
        "--algo.reference={a.reference}: a reference that is updated starts as the actor's model; "
        "leave out --algo.reference, or reference_every and reference_decay",
    ),
    (
        lambda c, a: a.reference_decay == 1,
        "--algo.reference_decay=1 would never update the reference; take less, such as 0.99",
    ),
]


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def compares_states(algorithm: Algorithm) -> bool:
    """True if turns that began in equal states are compared: --algo.gigpo_coef with an advantage
    that compares episodes."""
    is_compared = ADVANTAGES[algorithm.advantage].needs_group or algorithm.advantage == "custom"
    return is_compared and algorithm.gigpo_coef > 0
