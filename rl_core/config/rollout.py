"""Flags of rollouts: sampling of tokens, episodes, agent programs, evaluation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from rl_core.config.algorithm import RL
from rl_core.config.flag_parsing import Section
from rl_core.flags import AtLeast1, Count, Fraction, Positive, flag

DRAWN = Literal["temperature", "top_p", "top_k", "min_p"]
MAX_TOP_K = 1024  # Largest number of ids that are stored with each token of a training sample.


@dataclass(kw_only=True)
class SamplingConfig(Section, prefix="sampling."):
    temperature: Positive = flag(1.0, "of training samples, and of the learner's logprobs")
    top_k: Annotated[int, Ge(0), Le(MAX_TOP_K)] = flag(
        0, "top-k sampling in training; also limits the ids of the ratio; 0: off", RL
    )
    top_p: Annotated[float, Gt(0), Le(1)] = flag(
        1.0, "of training samples, among top_k: the nucleus of this probability; 1: off", RL
    )
    min_p: Fraction = flag(
        0.0, "of training samples, among top_k: at least this share of the top's; 0: off", RL
    )
    stop: list[str] = flag(list, "strings that end a turn; they stay in the text")


@dataclass(kw_only=True)
class RolloutConfig(Section, prefix="rollout."):
    max_concurrent: AtLeast1 = flag(
        256, "concurrent episodes, requests to an api and engine slots of one rank"
    )
    hook_timeout_s: Positive = flag(60.0, "timeout of one call of a hook (reward, interact)")
    episode_timeout_s: Positive = flag(600.0, "timeout of one episode")
    engines_awake: Literal["auto", "all", "one"] = flag(
        "auto", "colocate: all, or one while others sleep"
    )
    max_failed_fraction: Fraction = flag(
        0.1,
        "the run stops when more of its last 200 rows (at least 50) fail, or a whole step",
    )
    save: bool = flag(True, "write every trajectory to rollouts/")
    stale_policy_frac: Fraction = flag(
        0.0, "cross-policy sampling: fraction of turns from a stale policy; 0: off"
    )
    stale_policy_refresh: Annotated[int, Ge(2)] = flag(
        4, "cross-policy sampling: refresh interval of the stale policy in steps"
    )


@dataclass(kw_only=True)
class AgentsConfig(Section, prefix="agents."):
    host: str = flag(
        "127.0.0.1", "where requests of agent programs arrive; 0.0.0.0: from other machines too"
    )
    public_host: str | None = flag(
        None, "hostname that agent programs connect to; default: --agents.host or this machine's"
    )
    response_format: Literal["ignore", "refuse", "enforce"] = flag(
        "ignore", "JSON schema that a request wants of its reply; ignore: counted, not enforced"
    )
    build_network: bool = flag(True, "Harbor: RUN lines of Dockerfiles have a network")
    verify_network: bool = flag(True, "Harbor: test.sh has a network; agents: HARBOR_NETWORK=1")


@dataclass(kw_only=True)
class SandboxConfig(Section, prefix="sandbox."):
    box_driver: str = flag("", "default of boxes: docker, podman, kubernetes, e2b, daytona, modal")
    max_boxes: AtLeast1 = flag(256, "remote boxes that a run has at once")
    idle_s: Positive = flag(900.0, "remote boxes end after this time without their run")
    lifetime_s: Positive = flag(14_400.0, "remote boxes end after this time")
    kubernetes_namespace: str = flag("", "namespace of pods; default: the kubeconfig's")


@dataclass(kw_only=True)
class EvalConfig(Section, prefix="eval."):
    num_tasks: Count = flag(0, "held-out tasks that are evaluated; 0: all")
    samples: Count = flag(4, "k of avg@k and pass@k; 0: greedy alone")
    sampling: dict[DRAWN, float] = flag(
        dict, "of the k samples, such as temperature=0.6,top_p=0.95,top_k=20"
    )
    pass_reward: float = flag(1.0, "an episode passes with at least this reward")
