"""Versions of SGLang between which rl_core distinguishes."""

from __future__ import annotations

from rl_core.engines.server_process import numbers, package_version

OLDEST = (0, 5, 17)
# Older versions copy the head's weights to fp32 at each decode step.
KEEPS_HEAD = (0, 5, 18)
# For the ids that they name, older versions take top_p of the whole distribution. If a request of
# the batch has min_p, FlashInfer draws with top_p of the top_k ids, which keeps fewer.
NAMES_SAMPLED_IDS = (0, 5, 20)
# Older versions have no sessions of weight updates.
HAS_SESSIONS = (0, 5, 21)
# Older versions unload no adapter after a queued request for it was aborted: they wait for that
# request for ever.
FORGETS_ABORTED = (0, 5, 22)


def installed_version() -> tuple[int, ...]:
    version = package_version("sglang")
    assert version is not None, "sglang is not installed"
    return numbers(version)


def is_older_than(version: tuple[int, ...]) -> bool:
    """True if an SGLang older than `version` is installed."""
    installed = package_version("sglang")
    return installed is not None and numbers(installed) < version
