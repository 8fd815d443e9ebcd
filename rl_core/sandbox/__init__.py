"""A sandbox for code that models write, and boxes for agents' commands: docs/sandbox.md."""


def __getattr__(name: str):
    """Imported when asked for: the process that forks programs needs none of it."""
    if name in ("Sandbox", "Result", "Limits"):
        from rl_core.sandbox import sandbox

        return getattr(sandbox, name)
    raise AttributeError(f"module 'rl_core.sandbox' has no attribute {name!r}")
