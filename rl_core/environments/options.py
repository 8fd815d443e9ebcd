"""Options of environments: endpoints for programs that are policies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import Any

from rl_core.config import AgentsConfig


def endpoint_opener(
    config: AgentsConfig | None,
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Opens an endpoint for an actor. The HTTP server is imported with the first endpoint."""

    @cache
    def endpoints() -> Any:
        from rl_core.environments.agents.rollout import Endpoints

        return Endpoints(config=config)

    return lambda actor: endpoints()(actor)
