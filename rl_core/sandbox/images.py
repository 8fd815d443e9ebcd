"""Images for boxes of bubblewrap: built or pulled by podman, buildah or docker, unpacked once, and
shared by all runs of a user. docs/terminal.md

    CACHE/HASH/root          files of the image
    CACHE/HASH/image.json    its variables, working folder and entrypoint
    CACHE/files/...          one link to each file, by which images share equal ones
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rl_core.sandbox.engines import ENGINE_S
from rl_core.sandbox.isolation import NOBODY

BUILDERS = ("podman", "buildah", "docker")
INSTALL = "apt-get install podman, or buildah, or docker"
VERSION = 3  # Raise when images are unpacked in another way.
UNPACK_S = 1800.0
# A build by another process is reported after NOTE_S; its lock is tried every LOCK_POLL_S.
NOTE_S, LOCK_POLL_S = 10.0, 0.2
MAX_OUTPUT = 500  # Characters of a failed build's output.
IMAGE_FILE = "image.json"
TOOLS = "/var/cache/rl_core"  # Caches of installers in a box.
# Read-only for agents: programs and settings of the system, and state of its installers.
PROTECTED = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
PROTECTED += ("/var/lib/apt", "/var/lib/dpkg", "/var/cache")
# Write the files of image $1 to stdout, as a tar.
EXPORT = {
    engine: f'name=$({engine} create "$1" true) || exit; {engine} export "$name"; code=$?; '
    f'{engine} rm "$name" > /dev/null; exit $code'
    for engine in ("podman", "docker")
}
EXPORT["buildah"] = (
    'name=$(buildah from --pull-never "$1") || exit; path=$(buildah mount "$name") && '
    'tar -cC "$path" .; code=$?; buildah rm "$name" > /dev/null; exit $code'
)
# A box has one user, who cannot become apt's, and apt's downloads are kept for the next box.
UNPACK = f"""tar -xp --no-same-owner --exclude=dev/* --exclude=./dev/* && chmod u+rwx . || exit
rm -f etc/resolv.conf etc/hosts
[ ! -d etc/apt/apt.conf.d ] || cat > etc/apt/apt.conf.d/99rl_core <<'END'
APT::Sandbox::User "root";
Dir::Cache::Archives "{TOOLS}/apt";
APT::Keep-Downloaded-Packages "true";
END
mkdir -p .{TOOLS}/apt/partial"""


@dataclass(kw_only=True, slots=True)
class Image:
    """An unpacked image. It is kept as JSON next to its files."""

    layers: list[str]  # folders of the host, the topmost first
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    protected: list[str] = field(default_factory=list)  # folders that agents cannot write


def find_builder() -> str:
    """The first engine that builds images here. Raises ValueError with the command to install."""
    for engine in BUILDERS:
        if shutil.which(engine):
            with suppress(OSError, subprocess.TimeoutExpired):
                tried = subprocess.run([engine, "version"], capture_output=True, timeout=ENGINE_S)
                if tried.returncode == 0:
                    return engine
    raise ValueError(f"no container engine builds images here; {INSTALL}")


def cache_folder() -> Path:
    """$RL_CORE_ROOTS, or a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("RL_CORE_ROOTS") or f"{cache}/rl_core/roots").expanduser()


def cache_key(*names: str) -> str:
    text = "\0".join([str(VERSION), str(os.geteuid()), *names])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def image_folder(name: str) -> Path:
    return cache_folder() / cache_key(name)


def unpacked_image(name: str) -> Image | None:
    """The image in the cache, which needs no engine; None if it is not there."""
    try:
        return Image(**json.loads((image_folder(name) / IMAGE_FILE).read_text()))
    except FileNotFoundError:
        return None


def unpack_image(engine: str, name: str, timeout_s: float) -> Image:
    """Unpacks an image of the engine into the cache. Raises RuntimeError."""
    folder = image_folder(name)
    with making(folder, timeout_s + UNPACK_S) as made:
        if made is not None:
            settings = image_settings(engine, name)
            if settings is None:
                raise RuntimeError(f"{engine} has no image {name}")
            root = made / "root"
            unpack(engine, name, root)
            share_files(root)
            image = image_of(settings, root)
            image.layers = [str(folder / "root")]
            (made / IMAGE_FILE).write_text(json.dumps(asdict(image)))
    image = unpacked_image(name)
    assert image is not None, folder
    return image


def unpack(engine: str, name: str, root: Path) -> None:
    make_folder(root)
    export = ["/bin/sh", "-c", EXPORT[engine], "sh", name]
    if engine == "buildah" and os.geteuid() != 0:
        export[:0] = ["buildah", "unshare"]
    user = NOBODY if os.geteuid() == 0 else None
    with tempfile.TemporaryFile() as stderr:
        exporting = subprocess.Popen(export, stdout=subprocess.PIPE, stderr=stderr)
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", UNPACK],
                stdin=exporting.stdout,
                stderr=stderr,
                cwd=root,
                timeout=UNPACK_S,
                user=user,
                group=user,
            )
            code = exporting.wait(ENGINE_S) or done.returncode
        except subprocess.TimeoutExpired:
            exporting.kill()
            raise RuntimeError(f"{name} was not unpacked within {UNPACK_S:g} s") from None
        stderr.seek(0)
        if code:
            wrote = stderr.read().decode(errors="replace").strip()[-MAX_OUTPUT:]
            raise RuntimeError(f"{name} cannot be unpacked by {engine}: {wrote}")


def share_files(root: Path) -> None:
    """Makes equal files of all images one file on disk. No box writes to these."""
    store = cache_folder() / "files"
    store.mkdir(exist_ok=True)
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            status = path.lstat()
            # An unreadable file, or one with too many links, stays alone.
            with suppress(OSError):
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    with path.open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                    shared = store / f"{digest}.{status.st_mode:o}.{status.st_mtime_ns}"
                    share_file(path, shared)


def share_file(path: Path, shared: Path) -> None:
    try:
        shared.hardlink_to(path)
    except FileExistsError:
        other = shared.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        other.hardlink_to(shared)
        other.replace(path)


def image_settings(engine: str, name: str) -> dict[str, Any] | None:
    """The `Config` of an image; None if the engine does not have it."""
    inspecting = [engine, "image", "inspect", name]
    if engine == "buildah":
        inspecting = [engine, "inspect", "--type", "image", name]
    done = subprocess.run(inspecting, capture_output=True, timeout=ENGINE_S)
    if done.returncode:
        return None
    described = json.loads(done.stdout)
    return described["OCIv1"]["config"] if engine == "buildah" else described[0]["Config"]


def image_of(settings: dict[str, Any], root: Path) -> Image:
    pairs = [text.partition("=") for text in settings.get("Env") or []]
    environ = {name: value for name, _, value in pairs}
    cwd = settings.get("WorkingDir") or "/"
    names = environ.get("PATH", "").split(":")
    return Image(
        layers=[],
        environ=environ,
        cwd=cwd,
        entrypoint=settings.get("Entrypoint") or [],
        protected=[*PROTECTED, *program_folders(names, root, cwd)],
    )


def program_folders(names: Sequence[str], root: Path, cwd: str) -> list[str]:
    """Folders of a PATH outside of the system's: a virtual environment as a whole, others only if
    they are outside of the working folder, where agents write."""
    folders = []
    for name in names:
        if not name.startswith("/") or is_below(name, PROTECTED):
            continue
        parent = str(PurePosixPath(name).parent)
        if (root / parent[1:] / "pyvenv.cfg").is_file():
            folders.append(parent)
        elif (root / name[1:]).is_dir() and not is_below(name, [cwd]):
            folders.append(name)
    return folders


def is_below(path: str, folders: Sequence[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def digest_of(folder: Path) -> str:
    """A hash of the names, modes and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}\0{path.stat().st_mode & 0o777}\0{content}\n".encode())
    return digest.hexdigest()[:16]


def built_name(folder: Path, flags: Sequence[str] = ()) -> str:
    """The name of the image that a folder with a Dockerfile is built into."""
    tag = digest_of(folder)
    if flags:
        tag = hashlib.sha256("\0".join([tag, *flags]).encode()).hexdigest()[:16]
    return f"rl_core_task:{tag}"


def build_image(
    engine: str, folder: Path, timeout_s: float, network: bool = True, flags: Sequence[str] = ()
) -> str:
    """Builds the image of a folder with a Dockerfile, unless the engine has it, and returns its
    name. Concurrent calls build it once. Raises RuntimeError if the build fails."""
    image = built_name(folder, flags)
    command = [engine, "build", "--tag", image, *flags, str(folder)]
    if not network:
        command[2:2] = ["--network", "none"]
    make_image(engine, image, command, timeout_s)
    return image


def pull_image(engine: str, image: str, timeout_s: float) -> None:
    """Pulls an image unless the engine has it. Raises RuntimeError."""
    make_image(engine, image, [engine, "pull", image], timeout_s)


def make_image(engine: str, image: str, command: Sequence[str], timeout_s: float) -> None:
    name = f"rl_core_{cache_key(engine, image)}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as held:
        lock_within(timeout_s + 2 * ENGINE_S, held, image)
        try:
            if image_settings(engine, image) is not None:
                return
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{shlex.join(error.cmd)} ran longer than {error.timeout:g} s"
            ) from None
    if done.returncode != 0:
        wrote = (done.stderr.strip() or done.stdout.strip())[-MAX_OUTPUT:]
        raise RuntimeError(f"{shlex.join(command)} failed: {wrote}")


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
def making(folder: Path, timeout_s: float) -> Iterator[Path | None]:
    """An empty folder that becomes `folder` if the block ends without an exception; None if that
    exists. Of processes that ask at once, one makes the folder and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as file:
        lock_within(timeout_s, file, folder.name)
        if folder.is_dir():
            yield None
            return
        for old in folder.parent.glob(f"{folder.name}.*.part"):  # Of a killed process.
            remove(old)
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
        try:
            yield made
            made.rename(folder)
        finally:
            remove(made)


def make_folder(folder: Path) -> None:
    """Makes a folder for a box's user."""
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)


def remove(folder: Path) -> None:
    if not folder.exists():
        return
    for path, _, _ in os.walk(folder):  # Installers leave folders without rights.
        with suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def installers_environ() -> dict[str, str]:
    """Variables by which installers in a box use this machine's package indexes, proxies and
    certificates, and caches that the agent cannot write."""
    indexes = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "UV_DEFAULT_INDEX")
    indexes += ("UV_INDEX", "npm_config_registry")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.lower().endswith("_proxy") or name in indexes
    }
    for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        environ[name] = "/etc/rl_core.pem"
    environ |= {"NODE_EXTRA_CA_CERTS": "/etc/rl_core.pem", "GIT_SSL_CAINFO": "/etc/rl_core.pem"}
    environ |= {"PIP_CACHE_DIR": f"{TOOLS}/pip", "UV_CACHE_DIR": f"{TOOLS}/uv"}
    environ |= {"UV_PYTHON_INSTALL_DIR": f"{TOOLS}/python", "npm_config_cache": f"{TOOLS}/npm"}
    environ |= {"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return environ | {"DEBIAN_FRONTEND": "noninteractive", "UV_LINK_MODE": "copy"}
