"""Finds in the output of a test.sh that its tools are missing, so that it could not score."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Programs that start tests. Agents are not asked to install them.
RUNNERS = ("uvx", "uv", "pytest", "py.test", "python3", "python")
NOT_FOUND = re.compile(r": ([\w.+-]+): (?:command )?not found$")
NO_PROGRAM = re.compile(r"env: [‘'\"]?([\w.+-]+)[’'\"]?: No such file or directory$")
NO_MODULE = re.compile(r"No module named '?(\w+)")
NO_DOWNLOAD = re.compile(
    r"Failed to (?:fetch|download)|No solution found when resolving|No interpreter found for|"
    r"error sending request|dns error"
)
# Lines of package managers that failed.
INSTALLER = re.compile(
    r"^E: |: (?:apt-get|apt|apk|yum|curl|wget|pip3?|npm): (?:command )?not found$|"
    r"Could not resolve|Temporary failure (?:in name resolution|resolving)|"
    r"Network is unreachable|No matching distribution found|" + NO_DOWNLOAD.pattern
)
RAN_TESTS = re.compile(
    r"^=+ test session starts =+$|^=* ?(?:\d+ \w+,? )*\d+ (?:passed|failed|skipped|errors?)\b.* in "
    r"[\d.]+s|\bno tests ran in ",
    re.MULTILINE,
)
UV_SITE = "astral.sh"
MAX_LINE = 120  # characters of a line in a reason


@dataclass(kw_only=True, slots=True)
class VerifierTools:
    """Names that a test.sh uses."""

    words: set[str]
    packages: set[str]  # Python packages that test.sh installs, as modules are named

    @classmethod
    def of(cls, *tests: Path) -> VerifierTools:
        """Reads the test.sh and the requirements files of folders that are laid over each other in
        /tests, the last on top."""
        scripts = [path / "test.sh" for path in tests if (path / "test.sh").is_file()]
        script = scripts[-1].read_text(encoding="utf-8", errors="replace")
        installing = [
            line for line in script.splitlines() if re.search(r"\binstall\b|--with| -w ", line)
        ]
        for file in (file for path in tests for file in path.glob("*requirements*.txt")):
            installing.append(file.read_text(encoding="utf-8", errors="replace"))
        names = re.findall(r"[A-Za-z][\w.-]*", "\n".join(installing))
        packages = {name.lower().replace("-", "_") for name in names}
        return cls(words=set(re.findall(r"[\w.+-]+", script)), packages=packages)

    def missing(self, wrote: str, code: int) -> str:
        """The line that says why tests did not run; "" if they may have run. `code`: the exit code
        of test.sh."""
        has_run = RAN_TESTS.search(wrote) is not None
        lines = [line.strip() for line in wrote.splitlines() if line.strip()]
        for line in lines:
            if sign := self.sign(line, has_run):
                return sign
        if lines and code != 0 and not has_run and INSTALLER.search(lines[-1]):
            return lines[-1][:MAX_LINE]
        return ""

    def sign(self, line: str, has_run: bool) -> str:
        if match := NO_MODULE.search(line):
            module = match[1].lower()
            # Tests that import a package are collected by a pytest that runs.
            is_tool = module in self.packages or (module == "pytest" and not has_run)
            return match[0] if is_tool and module in self.words | self.packages else ""
        if has_run:
            return ""
        match = NOT_FOUND.search(line) or NO_PROGRAM.search(line)
        if match and match[1] in RUNNERS and match[1] in self.words:
            return f"{match[1]}: command not found"
        is_fetched = not self.words.isdisjoint(("uv", "uvx"))
        return line[:MAX_LINE] if is_fetched and NO_DOWNLOAD.search(line) else ""


def first_failed_install(wrote: str) -> str:
    """The first line of a package manager that failed, or ""."""
    lines = (line.strip() for line in wrote.splitlines())
    return next((line[:MAX_LINE] for line in lines if INSTALLER.search(line)), "")


def failed_download(wrote: str) -> str:
    """The first line of an installer that the network gave nothing to, or "". A program that is
    not there needs no network, and boxes have a uv without its installer."""
    for line in map(str.strip, wrote.splitlines()):
        if INSTALLER.search(line) and not line.endswith("not found") and UV_SITE not in line:
            return line[:MAX_LINE]
    return ""
