# Sourced by the other scripts, with the wanted extra in $extra, in the repository's root: sets $python to that of the
# active virtual environment, or of .venv, which it makes if need be, with this checkout installed.
venv="${VIRTUAL_ENV:-$PWD/.venv}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python="$venv/bin/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "rl_core needs Python >= 3.10" >&2; exit 1; }

# The stamp says which requirements are installed for which checkout, so that a second run starts at once.
stamp="$venv/.rl_core${extra:+_$extra}"
wanted="$PWD $(cksum < setup.py)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing rl_core${extra:+[$extra]} into $venv"
    if ! command -v nvidia-smi > /dev/null && ! "$python" -c 'import torch' 2> /dev/null; then
        # Without a GPU one pinned torch gives the same floating-point results everywhere.
        "$python" -m pip install -q "torch==2.13.0"
    fi
    "$python" -m pip install -q -e ".${extra:+[$extra]}"
    echo "$wanted" > "$stamp"
fi

# Tiny models gain nothing from more threads, and ranks that share the cores lose.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
