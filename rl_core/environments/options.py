"""Options of environments: endpoints for programs that are policies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import TYPE_CHECKING

from rl_core.config import AgentsConfig
from rl_core.sampling.actor import Actor

if TYPE_CHECKING:
    from rl_core.environments.agents.endpoint import Endpoint
    from rl_core.environments.agents.rollout import Endpoints


def endpoint_opener(
    config: AgentsConfig | None,
) -> Callable[[Actor], AbstractAsyncContextManager[Endpoint]]:
    """Opens an endpoint for an actor. The HTTP server is imported with the first endpoint."""

    @cache
    def endpoints() -> Endpoints:
        from rl_core.environments.agents.rollout import Endpoints

        return Endpoints(config=config)

    return lambda actor: endpoints()(actor)
