"""Groups under way -> the file of each rank in a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from rl_core.data.rows import read_json, write_trajectories
from rl_core.sampling.rollout import Group
from rl_core.sampling.under_way import GroupUnderWay, episodes_from, trajectory_from

FILE = "under_way.rank_"  # begins the file's name


def write_groups(file: Path, groups: Iterable[Group]) -> None:
    """Groups that have begun, one a line."""
    write_trajectories(file, [group_row(group) for group in groups])


def group_row(group: Group) -> dict[str, Any]:
    row = {
        "position": group.position,
        "version": group.version,
        "env": group.task.env,
        "task": group.task.id,
    }
    row |= {"trajectories": group.trajectories, "episodes": {}}
    for name, episode in group.under_way.episodes.items() if group.under_way else ():
        row["episodes"][name] = {"answers": episode.answers, "trajectories": episode.trajectories}
    return row


def read_groups(
    checkpoint: Path, positions: Container[int], oldest: int
) -> dict[int, dict[str, Any]]:
    """Position -> what group_row() gave, of these positions. Groups that began before version
    `oldest` are left out: they would be too stale."""
    found = {}
    for file in sorted(checkpoint.glob(f"{FILE}*")):
        for row in read_json(file):
            if row["position"] in positions and row["version"] >= oldest:
                found[row["position"]] = row
    return found


def restore(group: Group, row: dict[str, Any]) -> None:
    """The group goes on where the run before ended."""
    group.version = row["version"]
    group.trajectories = [trajectory_from(t) for t in row["trajectories"]]
    group.under_way = GroupUnderWay(episodes=episodes_from(row["episodes"]))
