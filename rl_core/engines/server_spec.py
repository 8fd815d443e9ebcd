"""Arguments of engines in separate processes: their servers, and who sends weights again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from torch import Tensor

from rl_core.config import Config
from rl_core.learning.learner import Learner
from rl_core.learning.optimizers import missing_state_bytes
from rl_core.sampling.engine import NamedWeights, ServerSpec

# Hosts of servers that see this machine's shared memory.
HERE = (None, "127.0.0.1", "localhost", "::1")


def server_spec(config: Config, url: str, learners: dict[str, Learner]) -> ServerSpec:
    """`learners`: those of this device."""
    return ServerSpec(
        tp=config.engine_tp,
        args=config.engine_args,
        url=url,
        folder=None if urlsplit(url).hostname in HERE else str(config.folder.resolve()),
        weight_sync=config.weight_sync,
        bucket_bytes=config.engine_bucket_mib << 20,
        reserved=lambda: sum(map(missing_state_bytes, learners.values())),
    )


def resend_of(learner: Learner) -> Callable[[], NamedWeights]:
    """A function that yields the learner's weights again. No other rank may have a shard of them,
    and the weights may not change while engines sample."""

    def resend() -> Iterator[tuple[str, Tensor]]:
        with learner.on_device():
            yield from learner.engine_weights() or ()

    return resend
