"""Lines of a task's Dockerfile and scripts that need a network or install software."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_core.environments.agents.dockerfile import Instruction, joined_lines

# Where a command begins in a shell's line.
BEGIN = r"(?:^|[;&|(`]|\bthen\b|\bdo\b|\belse\b|\$\(|\bsudo\b|\btimeout\s+\S+)\s*(?:\w+=\S*\s+)*"
NETWORK = re.compile(
    BEGIN + r"(?:apt(?:-get)?\s.*?\b(?:update|install)\b|(?:apk|yum|dnf|microdnf)\s"
    r"|(?:\S*/)?(?:pip3?|python3?(?:\.\d+)?\s+-m\s+pip)\s+(?:install|download|wheel)\b"
    r"|uv\s+(?:pip|tool|sync|add|run|python|venv|init)\b|uvx\s|pipx\s|poetry\s+install|conda\s"
    r"|(?:npm|pnpm|yarn)\s+(?:i|ci|install|add)\b|npx\s|yarn\s*$|curl\s|wget\s"
    r"|git\s+(?:-\S+\s+)*clone\b|go\s+(?:install|get|mod\s+download)\b|cargo\s+(?:install|fetch)"
    r"|gem\s+install|bundle\s+install|playwright\s+install)"
)
LOCAL = re.compile(r"\b(?:curl|wget)\b.*(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])")
# Lines that change the system without a network.
SYSTEM = re.compile(
    BEGIN + r"(?:useradd|adduser|groupadd|addgroup|usermod|chpasswd|update-alternatives"
    r"|dpkg|ldconfig|locale-gen|a2en\w+|service\s|systemctl\s)"
    r"|(?:>|>>|\btee\b.*|\bln\b.*|\bcp\b.*|\bmv\b.*|\bmkdir\b.*|\bchmod\b.*|\bsed\s+-i\b.*|\brm\b.*)"
    r"\s+(?:/etc/|/usr/)"
)
SYSTEM_FOLDERS = ("/usr/", "/etc/", "/bin/", "/sbin/", "/lib/")


@dataclass(kw_only=True, slots=True, frozen=True)
class Line:
    location: str  # file:line
    text: str

    def __str__(self) -> str:
        return f"{self.location}: {self.text[:200]}"


def lines_of_script(path: Path) -> Iterator[Line]:
    for number, text, _ in joined_lines(path.read_text(encoding="utf-8", errors="replace")):
        yield Line(location=f"{path}:{number}", text=text.strip())


def uses_network(text: str) -> bool:
    return bool(NETWORK.search(text)) and not LOCAL.search(text)


def network_lines(script: Path) -> list[Line]:
    """Lines of a shell script that need a network."""
    return [line for line in lines_of_script(script) if uses_network(line.text)]


def network_instructions(instructions: list[Instruction]) -> list[Line]:
    """Instructions of a Dockerfile that need a network."""
    lines = []
    for instruction in instructions:
        text = "\n".join([instruction.text, *instruction.documents])
        is_url = instruction.name == "ADD" and "://" in instruction.text
        commands = re.sub(r"^(--\S+\s+)*", "", text).splitlines()
        if is_url or (instruction.name == "RUN" and any(map(uses_network, commands))):
            text = f"{instruction.name} {instruction.text}"
            lines.append(Line(location=instruction.location, text=text))
    return lines


def needs_image(instructions: list[Instruction]) -> bool:
    """True if a Dockerfile needs a system that it can change."""
    if sum(instruction.name == "FROM" for instruction in instructions) > 1:
        return True
    for instruction in instructions:
        if instruction.name == "RUN":
            text = "\n".join([instruction.text, *instruction.documents])
            if any(SYSTEM.search(line) for line in text.splitlines()):
                return True
        elif instruction.name in ("COPY", "ADD"):
            if instruction.flag("from") or instruction.words[-1].startswith(SYSTEM_FOLDERS):
                return True
        elif instruction.name == "WORKDIR" and instruction.text.startswith(SYSTEM_FOLDERS):
            return True
    return bool(network_instructions(instructions))
