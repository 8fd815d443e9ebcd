# Sourced by the other scripts, with the wanted extra in $extra, in the repository's root: sets $python to that of the
# active virtual environment, or of .venv, which it makes if need be, with this checkout installed.
venv="${VIRTUAL_ENV:-$PWD/.venv}"
if [ ! -x "$venv/bin/python" ]; then
    echo "making the virtual environment $venv"
    "${PYTHON:-python3}" -m venv "$venv"
fi
python="$venv/bin/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rl_core needs Python >= 3.11" >&2; exit 1; }

# Python compiles what is imported, and must be allowed to keep it: else every process compiles torch, transformers and rl_core
# again, and takes 13 s instead of 5 to import a trainer.
unset PYTHONDONTWRITEBYTECODE

# pip, or uv for a virtual environment that uv made without pip. Both print warnings and errors alone.
install() {
    if ! "$python" -m pip --version > /dev/null 2>&1 && command -v uv > /dev/null; then
        uv pip install --quiet --python "$python" "$@"
    else
        "$python" -m pip install --quiet --no-compile "$@"
    fi
}

# torch for a machine without a GPU. One pinned version gives the same floating-point results everywhere. On Linux the usual
# index has a build for CUDA alone; uv knows where the builds for CPUs are.
install_torch_for_cpu() {
    if [ "$(uname -s)" != Linux ]; then
        echo "no GPU: torch, a download of about 0.1 GB"
        install "torch==2.13.0"
        return
    fi
    echo "no GPU: torch's build for CPUs, a download of about 0.2 GB, by uv (0.02 GB)"
    "$python" -m uv --version > /dev/null 2>&1 || install uv
    # pip alone would try an index that does not answer for minutes. What uv says of one is not shown, since pip is next.
    if ! UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 "$python" -m uv pip install --quiet --python "$python" --torch-backend cpu \
        "torch==2.13.0" 2> /dev/null; then
        echo "builds for CPUs are not reached: torch from the usual index, which may be the build for CUDA, 2 to 5 GB"
        install "torch==2.13.0"
    fi
}

# The stamp says which requirements are installed for which checkout, so that a second run starts at once.
stamp="$venv/.rl_core${extra:+_$extra}"
wanted="$PWD $(cksum < setup.py)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing rl_core${extra:+[$extra]} into $venv: a minute, or more with a slow network"
    if ! "$python" -c 'import torch' 2> /dev/null; then
        if command -v nvidia-smi > /dev/null; then
            echo "a GPU: torch for CUDA, a download of 2 to 5 GB"
        else
            install_torch_for_cpu
        fi
    fi
    echo "installing rl_core and its other requirements"
    install -e ".${extra:+[$extra]}"
    "$python" -c 'from importlib.metadata import version
print("installed", ", ".join(f"{name} {version(name)}" for name in ("rl_core", "torch", "transformers")))'
    echo "$wanted" > "$stamp"
fi

# Tiny models gain nothing from more threads, and ranks that share the cores lose.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
