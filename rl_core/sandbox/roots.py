"""Root folders of images, for boxes of bubblewrap: made from a distribution's packages, kept on
disk, and shared by all runs of a user. docs/terminal.md

    CACHE/base/DEBIAN-12-HASH/         unpacked packages of a distribution
    CACHE/build/HASH/changes           a Dockerfile's changes to its base
    CACHE/build/HASH/image.json        variables and working folder of the image
"""

from __future__ import annotations

import configparser
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl_core.sandbox.isolation import NOBODY

# A build by another process is reported after NOTE_S; its lock is tried every LOCK_POLL_S.
NOTE_S, LOCK_POLL_S = 10.0, 0.2
BASE_S = 1800.0  # Fetching and unpacking a distribution has this deadline.
TOOLS = "/var/cache/rl_core"  # caches of installers in a box
VERSION = 2  # Raise when bases are made in another way.
PROBE_S = 5.0  # A mirror that gives no answer within this time is not reachable.
PYPI = "https://pypi.org/simple"
# A base without one of these was not made to its end, or is being removed.
BASE_FILES = ("etc/apt", "usr/bin/dpkg", "var/lib/dpkg/status", "usr/sbin/policy-rc.d")
BASE_FILES += ("var/lib/apt", "usr/lib", "usr/share", "etc/passwd")

DEBIAN, UBUNTU = "http://deb.debian.org/debian", "http://archive.ubuntu.com/ubuntu"
# Name and number of a release -> its suite.
SUITES = {"debian": {"11": "bullseye", "12": "bookworm", "13": "trixie"}}
SUITES["ubuntu"] = {"20.04": "focal", "22.04": "jammy", "24.04": "noble", "26.04": "resolute"}
LATEST = {"debian": "trixie", "ubuntu": "noble"}
# Suites whose own Python, or Node.js, has this version.
PYTHONS = {"3.8": "focal", "3.9": "bullseye", "3.10": "jammy", "3.11": "bookworm", "3.12": "noble"}
PYTHONS |= {"3.13": "trixie", "3.14": "resolute"}
NODES = {"12": "bullseye", "18": "bookworm", "20": "trixie"}
# Terminal-Bench's base images: a release with a terminal multiplexer and a recorder.
TERMINAL_BENCH = r"(?:ghcr\.io/)?laude-institute/t-bench/(ubuntu|python|debian)-([\d-]+)"
COMPILERS = ("build-essential", "curl", "wget", "git", "procps", "file", "unzip")
COMPILERS += ("gnupg", "netbase", "openssh-client", "xz-utils")
# The archive's keys, which Debian has no package for.
UBUNTU_KEYS = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
UBUNTU_KEYS_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"


@dataclass(kw_only=True, slots=True, frozen=True)
class Base:
    """A distribution's release with packages, in place of an image."""

    suite: str
    packages: tuple[str, ...] = ()
    python: str = ""  # the version that `python` has; "": the image has none

    @property
    def is_ubuntu(self) -> bool:
        return self.suite in SUITES["ubuntu"].values()

    @property
    def described(self) -> str:
        family = "ubuntu" if self.is_ubuntu else "debian"
        [release] = [number for number, suite in SUITES[family].items() if suite == self.suite]
        has = f" with Python {self.python} of its packages" if self.python else ""
        return f"{family.capitalize()} {release} ({self.suite}){has}"


def base_of(image: str) -> Base:
    """The packages that stand for an image. Raises ValueError for an image that none stand for."""
    name, _, tag = image.partition("@")[0].removeprefix("docker.io/").rpartition(":")
    if not name:
        name, tag = tag, "latest"
    name = name.removeprefix("library/")
    if match := re.fullmatch(TERMINAL_BENCH, name):
        base = base_of(f"{match[1]}:{match[2].replace('-', '.')}")
        return Base(
            suite=base.suite,
            packages=(*base.packages, "tmux", "asciinema"),
            python=base.python,
        )
    if name in SUITES:
        return Base(suite=release_of(name, tag, image))
    if name == "buildpack-deps":
        return Base(suite=release_of("debian", tag, image), packages=COMPILERS)
    if name in ("python", "node"):
        return language_base(name, tag, image)
    raise ValueError(f"FROM {image}: no packages stand for this image")


def release_of(family: str, tag: str, image: str) -> str:
    words = tag.removesuffix("-slim").split("-")
    releases = SUITES[family]
    for word in words:
        number = word if family == "ubuntu" else word.partition(".")[0]
        if number in releases:
            return releases[number]
        if word in releases.values():
            return word
    if words[0] in ("latest", "stable", "slim", "rolling", "scm", "curl"):
        return LATEST[family]
    raise ValueError(f"FROM {image}: no packages stand for this release")


def language_base(name: str, tag: str, image: str) -> Base:
    """The release whose own packages have the version that a tag names."""
    versions = PYTHONS if name == "python" else NODES
    match = re.match(r"\d+(\.\d+)?", tag)
    wanted = match[0] if match else ""
    if name == "node":
        wanted = wanted.partition(".")[0]
    if wanted in ("", "3") and "alpine" not in tag:
        wanted = "3.13" if name == "python" else "20"
    if wanted not in versions or "alpine" in tag:
        raise ValueError(
            f"FROM {image}: no packages stand for this image; {name} has packages for "
            f"{', '.join(versions)}"
        )
    packages = {
        "python": ("python3", "python3-pip", "python3-venv", "netbase"),
        "node": ("nodejs", "npm"),
    }
    more = () if "slim" in tag else COMPILERS
    if name == "python" and more:
        more = (*COMPILERS, "python3-dev")
    python = wanted if name == "python" else ""
    return Base(suite=versions[wanted], packages=(*packages[name], *more), python=python)


def cache_folder() -> Path:
    """$RL_CORE_ROOTS, or a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("RL_CORE_ROOTS") or f"{cache}/rl_core/roots").expanduser()


def lock_within(timeout_s: float, file: IO[str], image: str) -> None:
    """Locks the file. Raises RuntimeError if it is held elsewhere for timeout_s."""
    began, is_noted = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise RuntimeError(
                f"{file.name} has been locked for {timeout_s:g} s to build {image}, by this run or "
                "another; end the other, or raise build_timeout_sec in task.toml"
            )
        if waited_s > NOTE_S and not is_noted:
            text = f"waits until {image} is built, by this run or another"
            print(text, file=sys.stderr, flush=True)
            is_noted = True
        time.sleep(LOCK_POLL_S)


@contextmanager
def making(folder: Path, timeout_s: float, files: Sequence[str] = ()) -> Iterator[Path | None]:
    """An empty folder that becomes `folder` if the block ends without an exception; None if that
    exists with these files in it. Of processes that ask at once, one makes the folder and the
    others wait. Raises RuntimeError if the new folder lacks a file."""
    with locked(folder, timeout_s):
        if is_complete(folder, files):
            yield None
            return
        # Processes that were killed leave such folders.
        for old in [folder, *folder.parent.glob(f"{folder.name}.*.part")]:
            remove(old)
        # Programs of a killed process may still write into the folder that it made.
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
        made.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(made, NOBODY, NOBODY)
        try:
            yield made
            if not is_complete(made, files):
                raise RuntimeError(f"{folder} was removed while it was made; try again")
            made.rename(folder)
        finally:
            remove(made)


@contextmanager
def locked(folder: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock of a folder in the cache, which may be removed with its lock at any time."""
    path = Path(f"{folder}.lock")
    while True:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), path.open("w") as file:
            lock_within(timeout_s, file, folder.name)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return


def is_complete(folder: Path, files: Sequence[str]) -> bool:
    return folder.is_dir() and all(os.path.lexists(folder / name) for name in files)


def remove(folder: Path) -> None:
    if not folder.exists():
        return
    for path, _, _ in os.walk(folder):  # Installers leave folders without rights.
        with suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def base_folder(base: Base) -> Path:
    """The unpacked packages. Raises RuntimeError if these cannot be fetched."""
    text = json.dumps([VERSION, base.suite, base.packages, os.geteuid()])
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = cache_folder() / "base" / f"{base.suite}-{key}"
    if is_complete(folder, BASE_FILES):
        return folder
    with making(folder, BASE_S, BASE_FILES) as made:
        if made is not None:
            print(f"fetches {base.described} for tasks' boxes", file=sys.stderr, flush=True)
            unpack_base(base, made)
    return folder


def unpack_base(base: Base, folder: Path) -> None:
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise RuntimeError(
            "a box with packages needs mmdebstrap; on Debian and Ubuntu: apt-get install mmdebstrap"
        )
    packages = ",".join(["ca-certificates", *base.packages])
    with tempfile.TemporaryDirectory(prefix="rl_core_base_") as scratch:
        os.chmod(scratch, 0o755)  # apt reads keys as a user without rights.
        tar = f"{scratch}/base.tar"
        # Docker's images of Debian and Ubuntu have the packages of this variant.
        line = [tool, "--variant=minbase", f"--include={packages}"]
        mirror = DEBIAN
        if base.is_ubuntu:
            line += ["--components=main,universe", f"--keyring={ubuntu_keys(Path(scratch))}"]
            mirror = UBUNTU
        run_tool([*line, base.suite, tar, mirror])
        user = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
        with open(tar, "rb") as file:
            unpack = ["tar", "-xp", "--no-same-owner", "--exclude=./dev/*"]
            run_tool(unpack, stdin=file, cwd=folder, **user)
        settle(base, folder, Path(scratch))


def run_tool(line: list[str], **options: object) -> None:
    try:
        done = subprocess.run(line, capture_output=True, timeout=BASE_S, **options)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{line[0]} ran longer than {BASE_S:g} s") from None
    if done.returncode:
        stderr = done.stderr.decode(errors="replace").strip()[-500:]
        raise RuntimeError(f"{' '.join(line)} failed: {stderr}")


def ubuntu_keys(scratch: Path) -> Path:
    """Keys of Ubuntu's archive: of this machine, else of its package, whose hash is known."""
    installed = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
    if installed.is_file():
        return installed
    package = scratch / "keys.deb"
    try:
        with urllib.request.urlopen(f"{UBUNTU}/{UBUNTU_KEYS}", timeout=60) as answer:
            package.write_bytes(answer.read())
    except OSError as error:
        raise RuntimeError(f"{UBUNTU}/{UBUNTU_KEYS}: {error}") from None
    if hashlib.sha256(package.read_bytes()).hexdigest() != UBUNTU_KEYS_SHA256:
        raise RuntimeError(f"{UBUNTU}/{UBUNTU_KEYS} has another hash than {UBUNTU_KEYS_SHA256}")
    run_tool(["dpkg-deb", "-x", str(package), str(scratch / "keys")])
    return scratch / "keys" / installed.relative_to("/")


SETTLED = {
    # Installers run as the box's only user.
    "etc/apt/apt.conf.d/99rl_core": f'APT::Sandbox::User "root";\n'
    f'Dir::Cache::Archives "{TOOLS}/apt";\nAPT::Keep-Downloaded-Packages "true";\n'
    'Acquire::Languages "none";\n',
    "etc/dpkg/dpkg.cfg.d/rl_core": "force-unsafe-io\n",
    "usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/resolv.conf": "",
    "etc/rl_core.pem": "",
    "etc/hostname": "box\n",
}
FOLDERS = ("app", "proc", "dev", "sys", "opt", "srv", "home", "mnt", "media", "var/log", "var/lib")
FOLDERS += (f"{TOOLS[1:]}/apt/partial",)


def settle(base: Base, folder: Path, scratch: Path) -> None:
    """Writes the files by which installers work in a box, and those of Docker's python images."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, text in SETTLED.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
    (folder / "usr/sbin/policy-rc.d").chmod(0o755)
    bin = folder / "usr/local/bin"
    if base.python:
        for name in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            name.unlink()
        for name in ("python", "python3"):
            (bin / name).symlink_to(f"/usr/bin/python{base.python}")
    add_uv(bin, scratch)
    give_to_nobody(folder)


def add_uv(bin: Path, scratch: Path) -> None:
    """Installs uv of PyPI, which test scripts often fetch from elsewhere; none without PyPI."""
    line = [sys.executable, "-m", "pip", "download", "uv", "--no-deps", "--only-binary=:all:"]
    with suppress(RuntimeError):
        run_tool([*line, "-d", str(scratch)])
    for wheel in scratch.glob("uv-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.endswith(("/scripts/uv", "/scripts/uvx")):
                    path = bin / entry.rpartition("/")[2]
                    path.write_bytes(archive.read(entry))
                    path.chmod(0o755)


def interpreters_folder() -> Path:
    """A layer with this machine's Python interpreters where uv looks for its own: the one that runs
    this, and those that pyenv or uv keep next to it. uv fetches others."""
    known = {}
    for folder in [Path(sys.base_prefix), *sorted(Path(sys.base_prefix).parent.glob("*"))]:
        for program in folder.glob("bin/python3.*"):
            if re.fullmatch(r"python3\.\d\d", program.name) and (folder / "lib").is_dir():
                known[program.name] = folder
    known = {} if sys.base_prefix in ("/usr", "/usr/local") else known
    key = hashlib.sha256(json.dumps([VERSION, os.geteuid(), *map(str, known.items())]).encode())
    made_of = cache_folder() / "base" / f"interpreters-{key.hexdigest()[:12]}"
    if made_of.is_dir():
        return made_of
    with making(made_of, BASE_S) as made:
        for name, folder in known.items() if made is not None else ():
            copy_interpreter(name, folder, made / TOOLS[1:] / "python")
        if made is not None:
            give_to_nobody(made)
    return made_of


def copy_interpreter(name: str, folder: Path, into: Path) -> None:
    line = [folder / "bin" / name, "-c", "import platform as p; print(p.python_version())"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        return
    target = into / f"cpython-{done.stdout.strip()}-linux-{os.uname().machine}-gnu"
    unused = shutil.ignore_patterns(
        "test", "tests", "__pycache__", "*.a", "site-packages", "idlelib"
    )
    library = Path("lib") / name
    shutil.copytree(folder / library, target / library, ignore=unused, symlinks=True)
    for file in folder.glob("lib/libpython3*.so*"):
        shutil.copy2(file, target / "lib", follow_symlinks=False)
    (target / library / "site-packages").mkdir()
    (target / "bin").mkdir()
    # Its library is searched by an absolute path, which a box lacks.
    old, new = str(folder / "lib").encode(), b"$ORIGIN/../lib"
    program = (folder / "bin" / name).read_bytes()
    if len(old) >= len(new):
        program = program.replace(old + b"\0", new.ljust(len(old) + 1, b"\0"))
    (target / "bin" / name).write_bytes(program)
    (target / "bin" / name).chmod(0o755)
    for link in ("python3", "python"):
        (target / "bin" / link).symlink_to(name)


def give_to_nobody(folder: Path) -> None:
    """Files of root become those of a box's user."""
    if os.geteuid() == 0:
        for path, folders, files in os.walk(folder):
            for name in ["", *folders, *files]:
                os.chown(os.path.join(path, name), NOBODY, NOBODY, follow_symlinks=False)


def installers_environ() -> dict[str, str]:
    """Variables by which installers in a box use this machine's package registries, proxies and
    certificates, and caches that the agent cannot write."""
    environ = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    index = pip_setting("index-url")
    extra = [url for url in pip_setting("extra-index-url").split() if "://" in url]
    extra = [url for url in extra if not url.startswith("file:")]
    if index:
        environ |= {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index}
    if extra:
        environ |= {"PIP_EXTRA_INDEX_URL": " ".join(extra), "UV_INDEX": " ".join(extra)}
    if trusted := pip_setting("trusted-host"):
        environ["PIP_TRUSTED_HOST"] = trusted
    environ |= {name: value for name, value in os.environ.items() if name == "npm_config_registry"}
    for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        environ[name] = "/etc/rl_core.pem"
    environ |= {"NODE_EXTRA_CA_CERTS": "/etc/rl_core.pem", "GIT_SSL_CAINFO": "/etc/rl_core.pem"}
    environ |= {"PIP_CACHE_DIR": f"{TOOLS}/pip", "UV_CACHE_DIR": f"{TOOLS}/uv"}
    environ |= {"UV_PYTHON_INSTALL_DIR": f"{TOOLS}/python", "npm_config_cache": f"{TOOLS}/npm"}
    environ |= {"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return environ | {"DEBIAN_FRONTEND": "noninteractive", "UV_LINK_MODE": "copy"}


@functools.cache
def unreachable_mirrors() -> str:
    """The addresses of package mirrors with their errors; "" if one of them answers."""
    index = urllib.parse.urlsplit(pip_setting("index-url") or PYPI)
    index = index._replace(netloc=index.netloc.rpartition("@")[2])  # A password is left out.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    errors = []
    for url in (index.geturl(), DEBIAN, UBUNTU):
        try:
            urllib.request.urlopen(url, timeout=PROBE_S, context=context).close()
        except urllib.error.HTTPError:
            return ""  # An error page is an answer.
        except (OSError, ValueError) as error:
            errors.append(f"{url}: {error}")
        else:
            return ""
    return "; ".join(errors)


def pip_setting(name: str) -> str:
    """A setting of pip on this machine: a variable, else the user's file, else the machine's."""
    if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return value
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    files = [f"{config}/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf", "/etc/xdg/pip/pip.conf"]
    for file in [os.environ.get("PIP_CONFIG_FILE", ""), *files]:
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(OSError, configparser.Error):
            parser.read(os.path.expanduser(file))
            if value := parser.get("global", name, fallback=""):
                return value
    return ""
