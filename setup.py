"""Requirements of rl_core. None of them needs a GPU, so that a laptop installs in a minute."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def version() -> str:
    # Read, not imported: the package's dependencies are not installed yet.
    return re.search(
        r'^__version__ = "(.+)"$', (ROOT / "rl_core/__init__.py").read_text(), re.MULTILINE
    )[1]


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


EXTRAS = {
    "api": ["openai>=2.8", "anthropic>=0.60", "httpx>=0.23"],
    "json": ["jsonschema>=4.20"],
    "text": ["sacrebleu>=2.4"],
    "grammar": ["llguidance>=1.8"],
    "bnb": ["bitsandbytes>=0.50", "accelerate>=1.0"],
    "liger": ["liger-kernel>=0.8.5"],
    "flash": ["flash-attn>=2.8"],
    # Of single environments in envs/: search, games, MCP servers, gymnasium.
    "envs": ["bm25s>=0.3", "chess>=1.11", "mcp>=2.3,<3", "gymnasium>=1.3"],
    # Pure Python; the second needs the system's libseccomp.
    "sandbox": ["py-landlock>=0.1.1", "pyseccomp>=0.1.2"],
}
# Boxes elsewhere: docs/remote_boxes.md.
EXTRAS["kubernetes"] = ["kubernetes-asyncio>=32"]
EXTRAS["e2b"] = ["e2b>=2.63", "connectrpc>=0.12"]
EXTRAS["daytona"] = ["daytona>=0.226"]
EXTRAS["modal"] = ["modal>=1.6"]
EXTRAS["service"] = [
    "grpcio>=1.76",
    "protobuf>=6.31",
    "grpcio-health-checking>=1.76",
    "grpcio-reflection>=1.76",
]
EXTRAS["service"] += ["prometheus-client>=0.20"]
# MLflow without its server; SQLAlchemy and Alembic for its database in a file.
EXTRAS["trackers"] = ["wandb>=0.31", "tensorboard>=2.21", "trackio>=0.43", "pandas>=2.2"]
EXTRAS["trackers"] += ["mlflow-skinny>=3.17", "sqlalchemy>=2.0", "alembic>=1.13"]
# Each SGLang and each vLLM asks for one torch and one transformers exactly: docs/engines.md.
EXTRAS["sglang"] = ["sglang>=0.5.17"]
EXTRAS["vllm"] = ["vllm>=0.32.0"]
# The last formats signatures.
EXTRAS["docs"] = ["sphinx>=8", "myst-parser>=4", "furo>=2024.8.6", "sphinx-copybutton>=0.5"]
# pyright brings Node, which tests/ground/test_types.py runs.
EXTRAS["types"] = ["pyright[nodejs]>=1.1.400"]
EXTRAS["test"] = [
    *EXTRAS["api"],
    *EXTRAS["json"],
    *EXTRAS["text"],
    *EXTRAS["grammar"],
    *EXTRAS["bnb"],
    *EXTRAS["trackers"],
    *EXTRAS["envs"],
    *EXTRAS["sandbox"],
    *EXTRAS["kubernetes"],
    *EXTRAS["service"],
    *EXTRAS["docs"],
    "grpcio-tools>=1.76",
    "pytest>=8",
    "pytest-xdist>=3.8",
    "playwright>=1.50",  # drives Debian's Chromium instead of a separate one
    "ruff>=0.17",
    # Tests of the endpoint name every field of these clients' types.
    "openai>=3.57",
    "anthropic>=2.14",
    "trl==1.16.0",
    "tinker==0.38.0",  # The protocol that the server speaks is this version's.
]
# torch for CUDA brings its own; elsewhere its interpreter and compiler test the kernels without a
# GPU.
EXTRAS["test"] += [
    f"{name}; platform_system == 'Linux'" for name in ("triton>=3.6", *EXTRAS["liger"])
]


class BuildWithEnvironments(build_py):
    """Copies envs/ into the package, so that a wheel has the environments by name."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "rl_core", "envs")
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "envs", target, ignore=unwanted, dirs_exist_ok=True)


setup(
    name="rl_core",
    version=version(),
    description="Reinforcement learning for language models with torchrun and nothing else",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    cmdclass={"build_py": BuildWithEnvironments},
    packages=find_packages(include=["rl_core", "rl_core.*"]),
    package_data={
        "rl_core": ["py.typed"],
        "rl_core.config": ["*.yaml"],
        "rl_core.data": ["*.yaml"],
        "rl_core.run.display": ["*.yaml"],
        "rl_core.environments.service": ["*.proto"],
        "rl_core.tools": ["*.yaml"],
        "rl_core.tools.viewer": ["assets/*", "assets/vendor/*"],
    },
    install_requires=[
        "aiohttp>=3.14",
        "annotated-types>=0.6",
        "torch>=2.11",
        "transformers>=5.12,<6",
        "datasets>=4.0",
        "huggingface_hub>=1.0",
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "numpy>=1.26",
        "pandas>=2.2",
        "peft>=0.20",
        "pillow>=10.3",
        "psutil>=5.9",  # network interfaces of a node
        "pyarrow>=15",
        "pydantic>=2.7,<3",
        "pyyaml>=6.0",
        "rich>=13",
        "safetensors>=0.4",
        "tokenizers>=0.21",
        "xxhash>=3.4",  # checksums of checkpoints
        "zstandard>=0.22",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rl-core = rl_core.tools.cli:command"]},
)
