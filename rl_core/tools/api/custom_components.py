"""A loss, an optimizer, an engine and plugins of a script: train(config, loss=..., engine=...)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from rl_core.algorithms import Algorithm, sequence_sums
from rl_core.config import Config, OptimConfig
from rl_core.errors import nearest
from rl_core.learning.learner import Named
from rl_core.plugin import CustomComponents, Plugin, RunState
from rl_core.sampling.engine import Engine
from rl_core.types import PackedBatch, RunError

if TYPE_CHECKING:
    from torch.nn import Parameter


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


def custom_components(
    config: Config,
    loss: Callable[..., Tensor] | None,
    optimizer: Callable[..., Optimizer] | None,
    engine: type[Engine] | None,
    plugins: Sequence[Callable[[RunState], Plugin]],
) -> CustomComponents:
    """`loss`: names of LOSS_ARGUMENTS -> [M] losses of the trained tokens, in nats times advantage.
    `optimizer`: (named parameters, config.optim) -> an Optimizer, or a class of torch.optim, which
    gets the learning rate alone. `plugins`: each is called with the trainer. Raises ValueError for
    what does not fit the interface."""
    if loss is not None:
        check_loss(loss, config)
    if optimizer is not None and not is_optimizer_class(optimizer):
        check_optimizer(optimizer)
    if engine is not None:
        check_engine(engine, config)
    return CustomComponents(
        is_script=True,
        token_loss=loss and partial(custom_loss, loss, config),
        make_optimizer=optimizer and partial(custom_optimizer, optimizer),
        engine=engine,
        plugins=tuple(plugins),
    )


def custom_optimizer(
    optimizer: Callable[..., Optimizer], named: Named, optim: OptimConfig
) -> Optimizer:
    named = list(named)
    if is_optimizer_class(optimizer):
        return optimizer(named, lr=optim.lr)
    made = optimizer(named, optim)
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"optimizer={name_of(optimizer)} gave {made!r}; it must return a torch.optim.Optimizer"
        )
    check_parameters(made, named, name_of(optimizer))
    return made


def check_loss(loss: object, config: Config) -> None:
    if config.algorithm in ("dpo", "rm"):
        raise ValueError(
            f"loss is of trained tokens, and --algorithm {config.algorithm} learns from pairs; "
            "leave it out, or take another algorithm"
        )
    if not callable(loss):
        raise ValueError(f"loss={loss!r} must be a function of {', '.join(LOSS_ARGUMENTS)}")
    for parameter in inspect.signature(loss).parameters.values():
        is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        is_given = is_open or parameter.default is not parameter.empty
        if parameter.name not in LOSS_ARGUMENTS and not is_given:
            raise ValueError(
                f"loss {name_of(loss)}() names {parameter.name!r}, which is none of its "
                f"arguments; {nearest(parameter.name, LOSS_ARGUMENTS)}"
            )
        if parameter.name == "ref_logprobs" and not (config.algo.kl_coef or config.algo.log_kl):
            raise ValueError(
                f"loss {name_of(loss)}() names 'ref_logprobs', and there is no reference model; "
                "give algo={'log_kl': True}"
            )


def check_optimizer(make: object) -> None:
    rule = "it must be a class of torch.optim, or a function of (named_parameters, config.optim)"
    if isinstance(make, Optimizer):
        raise ValueError(f"optimizer is an object of {type(make).__name__}: {rule}")
    if not callable(make):
        raise ValueError(f"optimizer={make!r}: {rule}")
    try:
        inspect.signature(make).bind(None, None)
    except (TypeError, ValueError) as error:  # ValueError: some builtins have no signature
        raise ValueError(f"optimizer={name_of(make)}: {error}; {rule}") from None


def check_parameters(made: Optimizer, named: Sequence[tuple[str, Parameter]], name: str) -> None:
    """Raises ValueError for a parameter without a name, by which a checkpoint holds its state, and
    for one that is not the model's."""
    known = dict(named)
    for group in made.param_groups:
        if "param_names" not in group:
            raise ValueError(
                f"optimizer={name} has parameters without names, by which a checkpoint holds their "
                "state; give it pairs as they come: torch.optim.AdamW(named_parameters, "
                "lr=optim.lr)"
            )
        for weight_name, parameter in zip(group["param_names"], group["params"], strict=True):
            if known.get(weight_name) is not parameter:
                raise ValueError(
                    f"optimizer={name} has a parameter {weight_name!r}, which is none of the "
                    "model's under this name; take the pairs of named_parameters as they come"
                )


def check_engine(engine: object, config: Config) -> None:
    if not isinstance(engine, type) or not issubclass(engine, Engine):
        raise ValueError(
            f"engine={name_of(engine)} must be a class of rl_core.sampling.engine.Engine, itself "
            "and not an object: train(config, engine=MyEngine)"
        )
    for is_broken, why in OF_ENGINE:
        if is_broken(engine, config):
            raise ValueError(f"engine={engine.__name__}: {why}")
    known = [name for name in dir(Engine) if not name.startswith("_")]
    refuse_misspelt(engine, known, {}, "method of Engine")
    check_arguments(engine, Engine, [name for name in known if callable(getattr(Engine, name))])
    check_call(engine, "EngineSpec")


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
# Names of these hooks in callbacks of other trainers.
ALIKE = {
    "on_step": "after_step",
    "on_step_begin": "before_step",
    "on_step_end": "after_step",
    "on_train_begin": "start",
    "on_train_end": "finish",
    "on_evaluate": "after_evaluation",
    "on_log": "after_step",
}
HOOKS = [name for name in vars(Plugin) if not name.startswith("_")]
# Results that a hook must return, by type.
RESULTS = {"refill": list, "files": list, "reduced_flags": dict, "state": dict}


def own_plugins(plugins: object) -> list[Callable[[RunState], Plugin]]:
    if not isinstance(plugins, (list, tuple)):
        raise ValueError(f"plugins={name_of(plugins)} must be a list of plugins: plugins=[...]")
    return [own_plugin(plugin) for plugin in plugins]


def own_plugin(plugin: object) -> Callable[[RunState], Plugin]:
    """A constructor of a plugin whose errors name it. `plugin`: a class of Plugin, an object with
    some of its hooks, or a function of the trainer that returns one of these. Raises ValueError."""
    if isinstance(plugin, Plugin):
        name = type(plugin).__name__
        raise ValueError(
            f"plugins has an object of {name}, which is made with the trainer; give the class: "
            f"plugins=[{name}]"
        )
    if isinstance(plugin, type):
        check_hooks(plugin)
        check_call(plugin, "trainer")
    elif own_hooks(plugin) or not callable(plugin):
        check_hooks(plugin)
        return lambda trainer: with_name(plugin, trainer)
    return lambda trainer: with_name(plugin(trainer), trainer)


def own_hooks(plugin: object) -> list[str]:
    """Names of the hooks that an object or a class overrides."""
    hooks = []
    for name in HOOKS:
        hook = getattr(plugin, name, None)
        if callable(hook) and getattr(hook, "__func__", hook) is not getattr(Plugin, name):
            hooks.append(name)
    return hooks


def check_hooks(plugin: object) -> None:
    refuse_misspelt(plugin, HOOKS, ALIKE, "hook of plugins")
    names = own_hooks(plugin)
    if not names:
        raise ValueError(
            f"plugins has {name_of(plugin)}, which has none of the hooks: {', '.join(HOOKS)}"
        )
    check_arguments(plugin, Plugin, names)


def refuse_misspelt(plugin: object, known: list[str], alike: dict[str, str], kind: str) -> None:
    """Raises ValueError for a public method that nobody calls, and whose name is near a known
    one."""
    candidates = [*known, *alike]
    for name in dir(plugin):
        method = inspect.getattr_static(plugin, name)
        if name in known or name.startswith("_") or not callable(method):
            continue
        close = get_close_matches(name, candidates, n=1, cutoff=0.8)
        if not close and alike and name.startswith(("on_", "before_", "after_")):
            close = get_close_matches(name, candidates, n=1, cutoff=0.0)
        if close:
            meant = alike.get(close[0], close[0])
            raise ValueError(
                f"{name_of(plugin)}.{name}() is no {kind}; did you mean {meant!r}? Helper "
                "methods begin with _"
            )


def check_arguments(plugin: object, base: type, names: list[str]) -> None:
    """Raises ValueError for a method that cannot be called as that of the base class."""
    for name in names:
        usual, method = getattr(base, name), getattr(plugin, name)
        parameters = list(inspect.signature(usual).parameters.values())
        is_bound = not isinstance(plugin, type) or inspect.ismethod(method)
        if parameters and parameters[0].name == "self" and is_bound:
            parameters = parameters[1:]
        if base is Engine and not getattr(plugin, "sees", False):  # It is called without images.
            parameters = [p for p in parameters if p.name != "images"]
        named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        text = ", ".join(p.name for p in parameters)
        try:
            inspect.signature(method).bind(*[None] * (len(parameters) - len(named)), **named)
        except TypeError as error:
            raise ValueError(
                f"{name_of(plugin)}.{name}(): {error}; it is called with ({text})"
            ) from None
        is_async = inspect.iscoroutinefunction(method)
        if is_async and not inspect.iscoroutinefunction(usual):
            raise ValueError(f"{name_of(plugin)}.{name}() must be def, not async def")
        if base is Engine and not is_async and inspect.iscoroutinefunction(usual):
            raise ValueError(f"{name_of(plugin)}.{name}() must be async def")


def check_call(made: type, argument: str) -> None:
    try:
        inspect.signature(made).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{made.__name__}() is made with {argument} alone: {error}"
            + ("" if argument == "EngineSpec" else f"; or give an object: [{made.__name__}()]")
        ) from None


def with_name(plugin: object, trainer: RunState) -> Plugin:
    """A plugin with the hooks of a plugin or a plain object. RunError names which of them
    raised."""
    check_hooks(plugin)
    name = type(plugin).__name__
    methods = {hook: named(getattr(plugin, hook), f"{name}.{hook}") for hook in own_hooks(plugin)}
    return type(name, (Plugin,), methods)(trainer)


def named(hook: Callable, name: str) -> Callable:
    usual = name.rpartition(".")[2]

    def checked(value: object) -> object:
        if not isinstance(value, RESULTS.get(usual, object)):
            raise TypeError(f"it gave {value!r} instead of a {RESULTS[usual].__name__}")
        return value

    def call(self, *args: object) -> object:
        with naming(name):
            return checked(hook(*args))

    async def call_async(self, *args: object) -> object:
        with naming(name):
            value = hook(*args)
            return checked(await value if inspect.isawaitable(value) else value)

    return call_async if inspect.iscoroutinefunction(getattr(Plugin, usual)) else call


@contextmanager
def naming(hook: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RunError(f"{hook}() of plugins raised {type(error).__name__}: {error}") from error


def is_optimizer_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer)


def name_of(value: object) -> str:
    """The name of a function or a class, or of an object's class, else the value itself."""
    usual = type(value).__module__ == "builtins"
    return getattr(value, "__name__", repr(value) if usual else type(value).__name__)


def custom_loss(
    loss: Callable[..., Tensor],
    config: Config,
    algorithm: Algorithm,
    batch: PackedBatch,
    logprobs: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, None]:
    """A learner.TokenLoss: the losses of a script's function, which is called with the arguments
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
    for name in inspect.signature(loss).parameters:
        if name in LOSS_ARGUMENTS:
            arguments[name] = known[name] if name in known else getattr(batch, name)
    losses = loss(**arguments)
    if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
        result = getattr(losses, "shape", losses)
        raise ValueError(
            f"loss {name_of(loss)}() gave {result}; it must give a loss for each of the "
            f"{len(logprobs)} trained tokens, {tuple(logprobs.shape)}: neither mean nor sum"
        )
    if logprobs.requires_grad and not losses.requires_grad:
        raise ValueError(
            f"loss {name_of(loss)}() gave losses without a gradient, from which nothing is "
            "learned; compute them of logprobs or entropy, without detach()"
        )
    if algorithm.aggregation == "sequence":
        losses = losses / sequence_sums(logprobs.new_ones(len(logprobs)), batch)
    return losses, None
