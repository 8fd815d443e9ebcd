# Sourced by test_sglang.sh and test_vllm.sh: a new environment in $venv borrows torch from the environment of the other
# tests if that has the same build, which is not unpacked again then. By hard links: what pip replaces here stays there.
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
