#!/bin/sh
cat > stock/store.py <<'END'
class Store:
    """How many of each thing there are."""

    def __init__(self, counts=()):
        self.counts = dict(counts)

    def add(self, name, number=1):
        if number < 0:
            raise ValueError("a number is at least 0")
        self.counts[name] = self.counts.get(name, 0) + number

    def take(self, name, number=1):
        """Takes things out. Raises ValueError, and takes nothing, if there are too few."""
        left = self.counts.get(name, 0) - number
        if left < 0:
            raise ValueError(f"there are too few of {name}")
        self.counts[name] = left
        return left

    def most(self, number):
        """The names of which there are most, the most first; of equals, the first by name."""
        return sorted(self.counts, key=lambda name: (-self.counts[name], name))[:number]
END
cat > stock/text.py <<'END'
def parse_line(line):
    """(name, number) of `red cup: 12`, with any spaces around both."""
    name, _, number = line.rpartition(":")
    return name.strip(), int(number)


def table(store):
    """A line `name: number` for each thing, by name, the numbers in one column."""
    width = max((len(name) for name in store.counts), default=0)
    return "\n".join(f"{name:<{width}}: {store.counts[name]}" for name in sorted(store.counts))
END
