"""A loss, an optimizer, an engine and plugins of a script: train(config, loss=..., engine=...)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from rl_core.algorithms import PRESETS, Algorithm, sequence_sums
from rl_core.config import Config, OptimConfig
from rl_core.learning.learner_context import Named
from rl_core.plugin import Plugin, RunState
from rl_core.run.plan.custom_components import CustomComponents
from rl_core.sampling.engine import Engine
from rl_core.types import PackedBatch, RunError

# Arguments of a custom loss. All but the last two are [M], of the trained tokens.
LOSS_ARGUMENTS = (
    "logprobs",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "advantages",
    "entropy",
    "sequences",
    "batch",
    "config",
)
HOOKS = [name for name in vars(Plugin) if not name.startswith("_")]


def custom_components(
    config: Config,
    loss: Callable[..., Tensor] | None,
    optimizer: Callable[..., Optimizer] | None,
    engine: type[Engine] | None,
    plugins: Sequence[object],
) -> CustomComponents:
    """`loss`: names of LOSS_ARGUMENTS -> [M] losses of the trained tokens, in nats times advantage.
    `optimizer`: (named parameters, config.optim) -> an Optimizer, or a class of torch.optim, which
    gets the learning rate alone. `plugins`: classes of Plugin, objects with some of its hooks, or
    functions of the trainer that return one. Raises ValueError for what would be ignored or could
    not be called."""
    if loss is not None:
        check_loss(loss, config)
    if optimizer is not None and not is_optimizer_class(optimizer):
        rule = "(named_parameters, config.optim), or a class of torch.optim"
        check_call(optimizer, f"optimizer must be a function of {rule}", None, None)
    if engine is not None:
        check_engine(engine, config)
    return CustomComponents(
        is_script=True,
        token_loss=loss and partial(custom_loss, loss, config),
        make_optimizer=optimizer and partial(custom_optimizer, optimizer),
        engine=engine,
        plugins=tuple(partial(make_plugin, plugin) for plugin in plugins),
    )


def check_loss(loss: Callable, config: Config) -> None:
    if PRESETS[config.algorithm].is_pairs:
        raise ValueError(
            f"loss is of trained tokens, and --algorithm {config.algorithm} learns from whole "
            "replies; leave it out, or take another algorithm"
        )
    names = loss_arguments(loss) if callable(loss) else []
    rule = f"loss must be a function of {', '.join(LOSS_ARGUMENTS)}"
    check_call(loss, rule, **dict.fromkeys(names))
    if "ref_logprobs" in names and not (config.algo.kl_coef or config.algo.log_kl):
        raise ValueError(
            "loss names 'ref_logprobs', and there is no reference model; give algo={'log_kl': True}"
        )


def loss_arguments(loss: Callable) -> list[str]:
    return [name for name in inspect.signature(loss).parameters if name in LOSS_ARGUMENTS]


def check_call(function: Callable, rule: str, *args: None, **named: None) -> None:
    """Raises ValueError unless a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **named)
    except (TypeError, ValueError) as error:  # ValueError: some builtins have no signature.
        raise ValueError(f"{rule}: {error}") from None


def check_engine(engine: type[Engine], config: Config) -> None:
    if not isinstance(engine, type) or not issubclass(engine, Engine):
        raise ValueError(f"engine={engine!r} must be a subclass of rl_core.sampling.engine.Engine")
    for is_broken, why in OF_ENGINE:
        if is_broken(engine, config):
            raise ValueError(f"engine={engine.__name__}: {why}")


# Rules for a custom engine: (is it broken by (engine, configuration)?, message).
OF_ENGINE = (
    (lambda engine, c: not c.is_rl, "--algorithm sft, rm and dpo sample nothing; leave it out"),
    (
        lambda engine, c: c.engine != "auto",
        "the configuration names an engine, too; leave one of them out",
    ),
    (
        lambda engine, c: any(actor.servers for actor in c.actors.values()),
        "engine_urls name engines that run already; leave one of them out",
    ),
    (
        lambda engine, c: c.rollout_ranks or any(actor.ranks for actor in c.actors.values()),
        "it is of this process, and cannot be on other ranks; leave out rollout_ranks and "
        "actors.NAME.ranks",
    ),
    (
        lambda engine, c: engine.generate is Engine.generate,
        "it must override generate(), which samples a completion",
    ),
    (
        lambda engine, c: engine.update is Engine.update,
        "it must override update(), which takes new weights; without it replies are of old ones",
    ),
    (
        lambda engine, c: c.max_staleness and engine.pause is Engine.pause,
        "max_staleness pauses engines while a learner has the device; override pause() and "
        "resume(), or leave max_staleness out",
    ),
)


def make_plugin(plugin: object, trainer: RunState) -> Plugin:
    """The plugin of a class, an object with hooks, or a function of the trainer. RunError names the
    hook that raised."""
    if isinstance(plugin, type) or (callable(plugin) and not overridden_hooks(plugin)):
        plugin = plugin(trainer)
    name, hooks = type(plugin).__name__, overridden_hooks(plugin)
    for method in dir(plugin):
        is_close = method.startswith(("on_", "before_", "after_")) or get_close_matches(
            method, HOOKS, cutoff=0.8
        )
        if is_close and method not in HOOKS and callable(getattr(plugin, method)):
            raise ValueError(
                f"{name}.{method}() is not a hook of plugins, so nothing calls it; give it the name "
                f"of one ({', '.join(HOOKS)}), or begin it with _"
            )
    if not hooks:
        raise ValueError(f"plugins has {plugin!r}, which has no hook: {', '.join(HOOKS)}")
    methods = {hook: with_name(getattr(plugin, hook), f"{name}.{hook}") for hook in hooks}
    return type(name, (Plugin,), methods)(trainer)


def overridden_hooks(plugin: object) -> list[str]:
    hooks = []
    for name in HOOKS:
        hook = getattr(plugin, name, None)
        if callable(hook) and getattr(hook, "__func__", hook) is not getattr(Plugin, name):
            hooks.append(name)
    return hooks


def with_name(hook: Callable, name: str) -> Callable:
    """The hook as a method of Plugin, whose errors have its name."""

    def call(self, *args: object) -> object:
        with naming(name):
            return hook(*args)

    async def call_async(self, *args: object) -> object:
        with naming(name):
            value = hook(*args)
            return await value if inspect.isawaitable(value) else value

    is_async = inspect.iscoroutinefunction(getattr(Plugin, name.rpartition(".")[2]))
    return call_async if is_async else call


@contextmanager
def naming(hook: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RunError(f"{hook}() of plugins raised {type(error).__name__}: {error}") from error


def is_optimizer_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer)


def custom_optimizer(
    optimizer: Callable[..., Optimizer], named: Named, optim: OptimConfig
) -> Optimizer:
    named = list(named)
    if is_optimizer_class(optimizer):
        return optimizer(named, lr=optim.lr)
    made, known = optimizer(named, optim), dict(named)
    for group in made.param_groups:
        names = group.get("param_names", [""] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            if known.get(name) is not parameter:
                raise ValueError(
                    f"optimizer has a parameter {name!r}, which the model does not have; give it "
                    "the pairs as they come: torch.optim.AdamW(named_parameters, lr=optim.lr)"
                )
    return made


def custom_loss(
    loss: Callable[..., Tensor],
    config: Config,
    algorithm: Algorithm,
    batch: PackedBatch,
    logprobs: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, None]:
    """A TokenLoss: the losses of a script's function, which is called with the arguments
    that it names."""
    old = batch.old_logprobs
    known = {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach() if old is None else old,
        "entropy": entropy,
        "batch": batch,
        "config": config,
    }
    arguments = {}
    for name in loss_arguments(loss):
        arguments[name] = known[name] if name in known else getattr(batch, name)
    losses = loss(**arguments)
    if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
        result = getattr(losses, "shape", losses)
        raise ValueError(
            f"loss gave {result}; it must give a loss for each of the "
            f"{len(logprobs)} trained tokens, {tuple(logprobs.shape)}: neither mean nor sum"
        )
    if logprobs.requires_grad and not losses.requires_grad:
        raise ValueError(
            "loss gave losses without a gradient, from which nothing is "
            "learned; compute them of logprobs or entropy, without detach()"
        )
    if algorithm.aggregation == "sequence":
        losses = losses / sequence_sums(logprobs.new_ones(len(logprobs)), batch)
    return losses, None
