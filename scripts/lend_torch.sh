# Sourced by test_sglang.sh and test_vllm.sh: the torch of a new environment in $venv, and install(), which takes a quarter of
# pip's time. A file that several environments have is one file with hard links: replace it, do not write into it.
# torch is borrowed from the environment of the other tests if that has the same build.
lender="${VIRTUAL_ENV:-$PWD/.venv}"
path_of_packages='import sysconfig; print(sysconfig.get_path("purelib"))'
lent="$("$lender/bin/python" -c "$path_of_packages" 2> /dev/null || true)"
site="$("$venv/bin/python" -c "$path_of_packages")"
minor="${site%/*}"
if [ "${minor##*/}" = "$(basename "$(dirname "$lent")")" ] && [ -d "$lent/torch-2.13.0+cpu.dist-info" ] &&
    [ ! -e "$site/torch" ]; then
    cp -al "$lent"/{torch,torchgen,functorch,torch-2.13.0+cpu.dist-info} "$site" 2> /dev/null ||
        rm -rf "$site"/{torch,torchgen,functorch,torch-2.13.0+cpu.dist-info}  # Another file system.
fi
"$venv/bin/python" -m pip install -q --no-compile uv torch==2.13.0
install() { "$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" "$@"; }
