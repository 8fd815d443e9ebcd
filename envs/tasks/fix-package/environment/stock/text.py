import re


def parse_line(line):
    """(name, number) of `red cup: 12`, with any spaces around both."""
    match = re.match(r"(\w+): (\d)", line)
    return match[1], int(match[2])


def table(store):
    """A line `name: number` for each thing, by name, the numbers in one column."""
    width = max(len(name) for name in store.counts)
    return "\n".join(f"{name:<{width}}: {count}" for name, count in store.counts.items())
