"""Data classes that the code passes on, with shapes. L tokens of one sequence, T tokens of a packed
batch, N sequences in a batch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# A JSON value; narrow it with isinstance().
JSON: TypeAlias = "str | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
# An unchecked value of json.loads().
AnyJSON: TypeAlias = Any
JSONObject: TypeAlias = dict[str, AnyJSON]  # A JSON object: a request, a reply, a schema.
Row: TypeAlias = dict[str, AnyJSON]  # A row of a data set: column name to value.
# A chat message: {"role": "user", "content": "..."} and the keys that a chat template reads.
Message: TypeAlias = dict[str, AnyJSON]


class RunError(Exception):
    """Ends the run. The message has the reason and the fix. Raised on all ranks together."""


def counter_seed(*parts: int | str) -> int:
    """A seed in [0, 2^32) from counters such as (run seed, step, task id, index): crc32 of them
    joined by '/'."""
    return zlib.crc32("/".join(map(str, parts)).encode())


@dataclass(kw_only=True, slots=True, frozen=True)
class InputImage:
    """An image of a conversation. In token ids each of its tokens is -key, so that equal ids mean
    equal images; models get their own id of an image's token instead."""

    key: int  # In [1, 2^62): a hash of the content.
    url: str = field(repr=False)  # data:image/png;base64,... that the messages share.
    width: int
    height: int


@dataclass(kw_only=True, slots=True)
class Task:
    id: str  # Unique in its data set and equal in every epoch, such as "train/17".
    env: str  # Name of the environment.
    row: Row  # Every column of the data set.
    messages: list[Message]  # The conversation before anybody speaks.
    place: str = ""  # The row, for errors: `row 7 of rows.jsonl`.
    info: JSONObject = field(default_factory=dict)  # What the environment keeps about the task.


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    stop: tuple[str, ...] = ()  # Strings that end the completion, and stay in it.
    stop_token_ids: tuple[int, ...] = ()  # Tokens that end the completion, and stay in it.
    keeps_ids: bool = False  # Fills in Completion.kept_ids where top_k truncates.
    json_schema: str = ""  # Schema of the completion; "": text.


@dataclass(kw_only=True, slots=True)
class Completion:
    """The tokens of one turn.

    Example: Completion(token_ids=[17, 4, 2], logprobs=[-0.1, -1.2, 0.0], text="42",
    finish_reason="stop", policy_version=3, newer_versions=[(2, 4)]) was sampled by versions 3, 3
    and 4 of the weights."""

    token_ids: list[int] = field(default_factory=list)  # [L] as sampled.
    # [L] nats, of the distribution that each token was drawn from.
    logprobs: list[float] = field(default_factory=list)
    text: str = ""  # Decoded without special tokens.
    finish_reason: str = ""  # "stop" or "length"; "" while tokens are sampled.
    policy_version: int = -1  # Version of the weights that sampled the first token.
    # (index, version): from this token on.
    newer_versions: list[tuple[int, int]] = field(default_factory=list)
    # [L] or none: the vocabulary ids that each token was drawn from, as "17 4 250": text takes a
    # fifth of the memory of lists of integers.
    kept_ids: list[str] = field(default_factory=list)
    # np.ndarray [prompt + L - 1, routers, top_k] int16 of all tokens but the last, or None. Any,
    # because pydantic reads trajectories and knows no arrays.
    experts: Any = field(default=None, repr=False)

    @property
    def policy_versions(self) -> list[int]:
        """[L] of each token."""
        found = [self.policy_version] * len(self.token_ids)
        for index, version in self.newer_versions:
            found[index:] = [version] * (len(found) - index)
        return found


@dataclass(kw_only=True, slots=True)
class Turn:
    """One reply of an actor.

    Example: the prompt [1, 5, 6] is answered by [7, 2], the environment says [8, 9], and the actor
    replies [7, 3, 2]. The turns are Turn(new_ids=[1, 5, 6], is_fresh=True, completion=...) and
    Turn(new_ids=[8, 9], is_fresh=False, completion=...): one sample of 10 tokens."""

    new_ids: list[int]  # Tokens since the actor's last turn; the whole prompt if fresh.
    is_fresh: bool  # The first turn, or the first after the chat template rewrote history.
    completion: Completion
    name: str = ""  # Unique in the run: branches share turns, which are trained once.
    max_tokens: int = 0  # Limit of the completion's length; 0: not known.
    state_key: str = ""  # Turns that began in equal states share a baseline; "": none.
    # Images in new_ids, in their order. On disk the messages have them.
    images: tuple[InputImage, ...] = field(default=(), repr=False)

    def __deepcopy__(self, memo: dict) -> Turn:
        """For a hook, which may change it. Faster than a copy of each token."""
        done = self.completion
        done = replace(done, token_ids=list(done.token_ids), logprobs=list(done.logprobs))
        return replace(self, new_ids=list(self.new_ids), completion=done)


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """A scored conversation of one actor.

    Example: Trajectory(task_id="train/17", index=2, turns=[turn], reward=0.75,
    reward_parts={"correct": 1.0, "length": -0.25})."""

    task_id: str = ""
    env: str = ""
    group_id: str = ""  # Trajectories with equal env, group_id, actor and player: one baseline.
    index: int = 0  # Number of the sample in the group.
    actor: str = "policy"
    player: str = ""
    messages: list[Message] = field(default_factory=list)  # In the form that hooks read.
    turns: list[Turn] = field(default_factory=list)
    # Number of the episode's messages up to and with each turn; empty for a custom rollout().
    message_indices: list[int] = field(default_factory=list)
    reward: float | None = None  # None: not scored, because the episode failed.
    reward_parts: dict[str, float] = field(default_factory=dict)
    baseline: float = 0.0  # Subtracted from each return; see run/running_baseline.py.
    turn_rewards: list[float] = field(default_factory=list)  # [turns], of sum `reward`; or [].
    metrics: dict[str, float] = field(default_factory=dict)
    status: str = "ok"  # "ok", "truncated" (a turn or the episode hit a length limit) or "failed".
    error: str = ""  # Reason of the failure.
    log: str = ""  # Text for viewers, such as the verifier's output.
    env_code: str = ""  # Hash of the environment's file.
    columns: dict[str, str] = field(default_factory=dict)  # Shortened columns, for viewers.
    # Messages of teacher_prompt(), and their tokens for each stream of turns: the teacher reads
    # them instead of the student's prompt.
    teacher_messages: list[Message] = field(default_factory=list)
    teacher_ids: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def has_state_keys(self) -> bool:
        return any(turn.state_key for turn in self.turns)


# Arrays of a TrainingSample that hold a value for each token: name -> dtype.
PER_TOKEN = {
    "token_ids": "int64",
    "loss_mask": "bool",
    "rollout_logprobs": "float32",
    "policy_versions": "int64",
    "advantages": "float32",
}


@dataclass(kw_only=True, slots=True)
class TrainingSample:
    """One sequence to learn from. Lists become arrays.

    Example: prompt [1, 5], completion [7, 2] by version 3, advantage 0.5:
        token_ids        [1, 5, 7, 2]
        loss_mask        [False, False, True, True]
        rollout_logprobs [0, 0, -0.1, -1.2]
        policy_versions  [-1, -1, 3, 3]
        advantages       [0, 0, 0.5, 0.5]
    """

    token_ids: np.ndarray  # [L] int64
    loss_mask: np.ndarray  # [L] bool, True where the token is trained.
    rollout_logprobs: np.ndarray  # [L] fp32 nats, 0 where loss_mask is False.
    policy_versions: np.ndarray  # [L] int64, -1 where loss_mask is False.
    advantages: np.ndarray  # [L] fp32, 0 where loss_mask is False.
    group_id: str = ""  # Samples of one group stay in one minibatch.
    env: str = ""  # Environment in which the sample was sampled.
    experts: np.ndarray | None = None  # [L - 1, routers, top_k] int16; None: the learner chooses.
    # uint8, text: for each trained token a line of the ids that it was drawn from; None: from all.
    kept_ids: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None  # [P] int64, the teacher's prompt; None: the policy's.
    images: tuple[InputImage, ...] = ()  # Each once, whose keys are in token_ids.

    def __post_init__(self):
        import numpy as np  # Commands that only print help have no use for it.

        with np.errstate(over="ignore"):  # an infinite loss is reported by the learner
            for name, dtype in PER_TOKEN.items():
                setattr(self, name, np.asarray(getattr(self, name), dtype))
        if isinstance(self.kept_ids, list):
            text = "\n".join(self.kept_ids).encode()
            self.kept_ids = np.frombuffer(text, np.uint8) if text else None


@dataclass(kw_only=True, slots=True)
class SequenceShard:
    """The shard of a packed batch that one of `cp` ranks computes. Each sequence is padded to 2 cp
    chunks of equal length, of which rank r holds numbers r and 2 cp - 1 - r: all ranks have the
    same number of tokens and, causal, the same work."""

    tokens: Tensor  # [T / cp] int64, indices of this rank's tokens in the batch.
    cu_seqlens: Tensor  # [N+1] int32 on the host, starts of the sequences in the shard.
    logit_indices: Tensor  # [m] int64, indices into this rank's tokens.
    trained: Tensor  # [m] int64, indices of the trained tokens that these predict.
    counts: list[int]  # [cp] m of every rank.
    gathered: Tensor  # [M] int64, index of each trained token in those of all ranks, in rank order.


@dataclass(kw_only=True, slots=True)
class PackedBatch:
    """One microbatch: N pieces of token sequences end to end, nothing padded. Pieces form trees: a
    piece is what several samples have in common, or the rest of one. The M trained tokens are
    listed on their own: packing.py shifts once, so that nobody else has to.

    Example: two samples [1, 5, 7, 2] and [1, 5, 8] with two prompt tokens and no shared piece:
        input_ids     [1, 5, 1, 5, 7]      the last token of a sample predicts nothing
        position_ids  [0, 1, 0, 1, 2]
        cu_seqlens    [0, 2, 5]
        parents       [-1, -1]
        paths         [2, 3, 4], [0, 1]
        labels        [7, 2, 8]
        logit_indices [3, 4, 1]
        sequences     [0, 0, 1]
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N+1] int32 on the host, starts of pieces; each comes after its parent.
    parents: list[int]  # [N] the piece before this one, -1 if it begins a sequence.
    paths: list[np.ndarray]  # For each sample, on the host: [L - 1] int64 indices of its tokens.
    # [M] int64, index into T of the token before, whose hidden state predicts this one. Samples
    # with a common prefix may share such a token.
    logit_indices: Tensor
    # [M] int64, the trained tokens; or [M, K], padded with -1: followed by the other ids that each
    # was drawn from.
    labels: Tensor
    sequences: Tensor  # [M] int64, index of each token's sample, ascending.
    rollout_logprobs: Tensor  # [M] fp32
    advantages: Tensor  # [M] fp32
    policy_versions: Tensor  # [M] int64
    old_logprobs: Tensor | None = None  # [M] fp32, by the learner before its first update.
    ref_logprobs: Tensor | None = None  # [M] fp32, by the reference model.
    # [M] fp32, by the critic before its first update; KTO: the KL z0, all equal.
    values: Tensor | None = None
    returns: Tensor | None = None  # [M] fp32, targets of the critic.
    mismatched: PackedBatch | None = None  # KTO: each prompt with another row's reply.
    shard: SequenceShard | None = None  # This rank's shard; None: the whole batch.
    experts: Tensor | None = None  # [T, routers, top_k] int16; -1: the learner chooses.
    # Key -> image of the negative input_ids. None: no rank has an image in this step.
    images: dict[int, InputImage] | None = None
    teacher: Any = None  # Teacher's logprobs; see learning/teachers/distill.py.
