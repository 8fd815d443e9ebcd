"""rl-core tinker --model M: a server on which programs of the tinker client 0.38.0 train and
sample. rl-core tinker export FOLDER --to ADAPTER: saved weights as an adapter for peft.
docs/tinker.md"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.algorithms import PRESETS
from rl_core.config import ActorConfig, Config, LoraConfig, read_config
from rl_core.errors import split
from rl_core.run.plan.model_paths import check_local
from rl_core.tools.parser import Parser
from rl_core.train import say_loading

if TYPE_CHECKING:
    from rl_core.tinker.multi_lora import MultiLora
    from rl_core.tinker.tenants import Tenants

# Flags of a run that a server has no use for.
FIXED = ["--algorithm=sft", "--max_tokens=1", "--learner.updates_per_epoch=1"]


def main(argv: list[str]) -> int:
    if argv[:1] == ["export"]:
        return export(argv[1:])
    return run(*read_flags(argv))


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The server's flags, and those of a run."""
    parser = Parser(prog="rl-core tinker", description=__doc__)
    parser.add_argument("--model", required=True, help="base model: a folder or a hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8200, help="0 picks one")
    parser.add_argument("--out", default="runs/tinker", help="folder of keys and saved weights")
    parser.add_argument(
        "--tenants", default="me", help="names, each with a separate key: alice,bob"
    )
    parser.add_argument("--max_models", type=int, default=4, help="models that train at once")
    parser.add_argument("--max_rank", type=int, default=32, help="largest LoRA rank")
    parser.add_argument(
        "--max_snapshots", type=int, default=8, help="adapters that samplers use at once"
    )
    parser.add_argument(
        "--max_context_tokens", type=int, default=4096, help="of a sequence, prompt included"
    )
    parser.add_argument("--lora_alpha", type=float, default=32.0, help="scale: alpha / rank")
    args, flags = parser.parse_known_args(argv)
    check_local(args.model)
    for name in ("max_models", "max_rank", "max_snapshots", "lora_alpha"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} {getattr(args, name)} must be above 0")
    if args.max_context_tokens < 2 or not 0 <= args.port < 1 << 16:
        raise ValueError("--max_context_tokens must be 2 or more, --port from 0 to 65535")
    config = read_config([*flags, *FIXED, f"--max_prompt_tokens={args.max_context_tokens - 1}"])
    for flag, value in (("ep", config.ep), ("tp", config.tp)):
        if value != 1:
            raise ValueError(f"--{flag} {value}: the server splits no models; leave it out")
    say_loading()
    config = with_actors(config, args)
    check_sampler(config)
    return args, config


def run(args: argparse.Namespace, config: Config) -> int:
    from rl_core.distributed import close_ranks

    lora = make_lora(args, config)
    if lora.ranks.rank == 0:
        from rl_core.tinker.server import serve
        from rl_core.tinker.tenants import read_keys

        key_file = Path(args.out).resolve() / "keys"
        keys = read_keys(key_file, split(args.tenants))
        tenants = make_tenants(args, config, lora)
        asyncio.run(serve(tenants, keys, key_file, args.host, args.port))
    else:
        lora.follow()
    close_ranks(lora.ranks)
    return 0


def make_tenants(args: argparse.Namespace, config: Config, lora: MultiLora) -> Tenants:
    from transformers import AutoTokenizer

    from rl_core.data.pretrained import load_pretrained
    from rl_core.engines.factory import max_episodes
    from rl_core.engines.options import ENGINES
    from rl_core.engines.server_spec import server_spec
    from rl_core.tinker.sampler import SnapshotSampler
    from rl_core.tinker.tenants import Tenants

    out = Path(args.out)
    sampler = SnapshotSampler(
        lora,
        ENGINES[config.engine](),
        args.model,
        args.max_snapshots,
        max_episodes(config, 1),
        tokenizer=load_pretrained(AutoTokenizer, args.model),
        memory_frac=config.engine_memory_frac,
        seed=config.seed,
        log=out / "engine.log",
        server=server_spec(config, "", {}),
        start_timeout_s=config.timeout_s,
    )
    return Tenants(lora, sampler, args.model, out, len(set(split(args.tenants))))


def with_actors(config: Config, args: argparse.Namespace) -> Config:
    """A LoRA actor for each model of a client, all over one base, and one for snapshots. Servers
    have no adapters of the head."""
    from rl_core.engines.options import ENGINES
    from rl_core.learning.lora import HEAD
    from rl_core.tinker.multi_lora import SCRATCH

    engine = "embedded" if config.engine == "auto" else config.engine
    targets = "all-linear" if ENGINES[engine]().lora_layers else f"all-linear,{HEAD}"
    lora = LoraConfig(rank=args.max_rank, alpha=args.lora_alpha, targets=targets)
    actors = {SCRATCH: ActorConfig(model=args.model, lora=lora)}
    for number in range(args.max_models):
        actors[f"model{number}"] = ActorConfig(model=args.model, lora=lora, lora_base=SCRATCH)
    return replace(config, actors=actors, model=None, engine=engine)


def check_sampler(config: Config) -> None:
    """Raises ValueError if the engine cannot run here, or cannot apply the clients' adapters."""
    from rl_core.engines.checks import check_engines
    from rl_core.engines.options import ENGINES
    from rl_core.learning.lora import is_served
    from rl_core.run.plan.engine import num_ranks
    from rl_core.tinker.multi_lora import SCRATCH

    engine, actor = ENGINES[config.engine](), config.actors[SCRATCH]
    assert actor.model
    if engine.lora_layers and not is_served(actor.model, actor.lora, engine.lora_layers):
        raise ValueError(
            f"--engine {config.engine} has no adapters of some layers of {actor.model}; leave it "
            "out"
        )
    check_engines(config, {SCRATCH: engine}, num_ranks(), is_planned=False)


def make_lora(args: argparse.Namespace, config: Config) -> MultiLora:
    from rl_core.learners import is_sharded, make_learners
    from rl_core.models.loading import load_model_config, max_positions
    from rl_core.models.parallel.replicas import make_mesh, num_replicas
    from rl_core.run.plan.engine import num_ranks
    from rl_core.run.process.joining import init_ranks
    from rl_core.tinker.multi_lora import MultiLora

    positions, _ = max_positions(load_model_config(args.model))
    num = num_ranks()
    mesh = make_mesh(num, num_replicas(config, num, config.trained), config.cp, config.tp)
    ranks = init_ranks(config.timeout_s, mesh, is_sharded(config), device_name=config.device)
    algorithms = dict.fromkeys(config.actors, PRESETS["sft"])
    learners = make_learners(config, algorithms, ranks, served=list(config.actors))
    for learner in learners.values():
        learner.name = "policy"  # A state is loaded into any of them.
    max_tokens = min(args.max_context_tokens, positions or args.max_context_tokens)
    return MultiLora(learners, ranks, max_tokens, args.lora_alpha)


def export(argv: list[str]) -> int:
    """Copies the adapter of saved weights. Raises ValueError for a damaged folder."""
    parser = Parser(prog="rl-core tinker export", description=__doc__)
    parser.add_argument("path", help="tinker://... of saved weights, or its folder")
    parser.add_argument("--to", required=True, help="new folder for peft")
    parser.add_argument("--out", default="runs/tinker", help="folder of the server")
    parser.add_argument("--tenant", default="me", help="whose weights")
    args = parser.parse_args(argv)
    import torch

    from rl_core.data.rows import replaced
    from rl_core.distributed import Ranks
    from rl_core.tinker.multi_lora import ADAPTER, read_facts
    from rl_core.tinker.tenants import folder_of

    source, target = Path(args.path), Path(args.to)
    if args.path.startswith("tinker://"):
        source = folder_of(Path(args.out), args.tenant, args.path)
    read_facts(source, Ranks(rank=0, size=1, device=torch.device("cpu")))
    if target.exists():
        raise ValueError(f"--to {target} exists; give a new folder")
    with replaced(target) as scratch:
        shutil.copytree(source / ADAPTER, scratch, dirs_exist_ok=True)
    print(f"{target}: load it with peft.PeftModel.from_pretrained(base, {str(target)!r})")
    return 0
