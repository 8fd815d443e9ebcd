"""torchrun --nproc_per_node N -m rl_core.train: the loop, and the command, which reads the flags
and builds the run.

Whatever loads slowly is imported inside functions: --help and an error in a flag answer at once.
"""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_core import registry
from rl_core.config import parse_config

if TYPE_CHECKING:
    from rl_core.build import Run
    from rl_core.distributed import Ranks


async def train(run: Run) -> None:
    """All steps from run.start on. Files and metrics count the steps that are done."""
    from rl_core import phases

    config = run.config
    await phases.start(run)
    run.keeper.listen()
    for step in range(run.start, config.num_steps):
        run.metrics, done = {}, step + 1
        with run.timed("step"), phases.profiled(run, done):
            with run.timed("generate"):
                samples = await phases.sample(run, step)
            for name, learner in run.learners.items():
                async with phases.on_device(run, learner):
                    with run.timed("learn"):
                        await phases.learn(run, name, samples[name], step)
                    with run.timed("sync"):
                        await phases.sync_engine(run, name, done)
            await phases.resume(run, done)
        phases.note_speed(run)
        metrics = run.write_metrics(done)
        run.terminal.step(done, metrics)
        is_evaluated = config.eval_every and is_due(done, config.eval_every, config.num_steps)
        run.to_evaluate = bool(is_evaluated and run.keeper.signal)  # by the run that goes on
        if is_evaluated and not run.keeper.signal:
            metrics |= await phases.evaluate(run, done)
        is_ended = run.on_step(done, metrics) is False or run.keeper.signal
        if done == config.num_steps:
            phases.refuse_ruined(run)
        if is_ended or run.keeper.is_due or is_due(done, config.save_every, config.num_steps):
            await phases.save(run, done)
        if is_ended:
            return
    await phases.finish(run)


async def run_rank(run: Run) -> None:
    from rl_core import phases

    gc.collect()
    # Rows and modules live as long as the run; looking through them again and again costs tenths of
    # a second.
    gc.freeze()
    neighbours = registry.neighbours()(run.ranks)
    try:
        if run.server is None:
            await train(run)
        else:
            run.keeper.listen()  # a signal is for the learners
            await run.server.serve()
    finally:
        neighbours.close()
        await phases.close(run)
        # In a notebook the models would stay; libraries would report leaks at the end of the
        # process.
        gc.unfreeze()


def is_due(done: int, every: int, num_steps: int) -> bool:
    return done == num_steps or (every > 0 and done % every == 0)


def main(argv: list[str] | None = None) -> int:
    """The exit status; 128 + its number after a signal. A user's mistake is one line;
    RL_CORE_DEBUG=1 shows where it was found."""
    registry.end_with_launcher()()
    with registry.refusing_exits()():
        status = run_command(argv)
    registry.leave_threads()(status)
    return status


def run_command(argv: list[str] | None) -> int:
    ranks: Ranks | None = None
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        # Until modules and rows are there: to look for garbage in them again and again would take a
        # second.
        gc.disable()
        from rl_core.build import Run, make_plan
        from rl_core.distributed import barrier, close_ranks, explain_timeouts, init_ranks
        from rl_core.models import is_sharded
        from rl_core.phases import refuse_standstill
        from rl_core.run_folder import locked

        plan = make_plan(config)
        gc.freeze()
        gc.enable()
        ranks = init_ranks(config.timeout_s, plan.mesh, is_sharded(config))
        with explain_timeouts("start, log or save", ranks, config.timeout_s):
            barrier(ranks)  # every rank has seen that the folder is free
            with locked(Path(config.out)) if ranks.is_writer else nullcontext():
                run = Run(plan, ranks)
                advice = (
                    "raise --rollout.hook_timeout_s; --resume goes on from the newest checkpoint"
                )
                registry.run_hooks()(run_rank(run), config.rollout.hook_timeout_s, advice)
            close_ranks(ranks)
        if ranks.is_writer:
            registry.tell_end()(run)
        if ranks.is_writer and not run.keeper.signal:  # no rank waits for what follows
            registry.write_at_end()(run)
            refuse_standstill(run)
            if config.push_to_hub:
                registry.push()(config)
        return 128 + run.keeper.signal if run.keeper.signal else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        registry.tell_failure()(error, ranks)
        return 1


class CallableModule(ModuleType):
    """`from rl_core import train` gives this module, which is called as the function of
    tools/python_api.py."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return registry.train()(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = CallableModule
