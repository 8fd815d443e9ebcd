"""torchrun --nproc_per_node N -m rl_core.train: the command, which reads the flags and makes the
run. `from rl_core import train` gives this module, which is called as a function.

Slow modules are imported inside functions, so that --help and an error in a flag answer at once.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.config import parse_config
from rl_core.run.plan.path_checks import check_paths
from rl_core.sampling.watchdog import exit_process, run_hooks

if TYPE_CHECKING:
    from rl_core.distributed import Ranks


# Garbage-collection threshold. At Python's default of 700 the collector takes 25-40 % of an
# episode's CPU time outside the model.
NEW_OBJECTS = 50_000


def main(argv: list[str] | None = None) -> int:
    """The exit status: 128 + N after signal N. A user's mistake is printed as one line, with a
    traceback if RL_CORE_DEBUG=1."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from rl_core.run.process.torchrun_exit import end_with_launcher

        end_with_launcher()
    with ExitStack() as at_end:
        return run_command(argv, at_end)


def run_command(argv: list[str] | None, at_end: ExitStack) -> int:
    ranks: Ranks | None = None
    out: Path | None = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        if not {"--help", "-h"}.isdisjoint(argv):
            from rl_core.tools.help import print_help

            print_help(argv)
            return 0
        config = parse_config(argv)
        check_paths(config)
        if sys.modules.get("torch") is None and os.environ.get("RANK", "0") == "0":
            say_loading()
        # Off while modules and rows load, because collections would take a second.
        gc.disable()
        from rl_core.distributed import barrier, close_ranks, explain_timeouts
        from rl_core.learners import is_sharded
        from rl_core.run.plan.engine import num_ranks
        from rl_core.run.plan.plan import make_plan
        from rl_core.run.process.joining import init_ranks
        from rl_core.run.process.run_to_end import run_to_end
        from rl_core.run.run_folder import keeping_failure, locked
        from rl_core.sandbox.run_flags import end_boxes
        from rl_core.trainer import Trainer

        at_end.callback(end_boxes)
        plan = make_plan(config)
        assert config.out
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS)
        gc.enable()
        groups = [group.ranks for group in plan.rank_groups]
        ranks = init_ranks(config.timeout_s, plan.mesh, is_sharded(config), groups, config.device)
        with explain_timeouts("start, log or save", ranks):
            barrier(ranks)  # Every rank has checked that the folder is free.
            if num_ranks() > 1:
                from rl_core.run.plan.rank_agreement import check_ranks_agree

                check_ranks_agree(plan, ranks)
            with (
                locked(config.folder) if ranks.is_writer else nullcontext(),
                keeping_failure(config.folder, ranks.is_writer),
            ):
                out = config.folder
                if ranks.is_engine:
                    from rl_core.engines.engine_ranks import make_engine_rank

                    trainer = make_engine_rank(plan, ranks)
                else:
                    trainer = Trainer(plan, ranks)
                work = run_to_end(trainer)
                run_hooks(work, config.rollout.hook_timeout_s)
            close_ranks(ranks)
        if isinstance(trainer, Trainer) and ranks.is_writer:
            trainer.after_run()
        return 128 + trainer.signal if trainer.signal else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from rl_core.run.process.torchrun_exit import report_failure

        report_failure(error, ranks, out)
        return 1


def say_loading(what: str = "the models") -> None:
    """Prints a line on stderr before torch and transformers are imported, which takes seconds."""
    print(f"loading torch, {what} and the rows ...", file=sys.stderr, flush=True)


class CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls train() of rl_core/tools/api/train.py."""
        from rl_core.tools.api.train import train

        return train(*args, **kwargs)


if __name__ == "__main__":
    exit_process(main())
sys.modules[__name__].__class__ = CallableModule
