NOTHING = {}


class Store:
    """How many of each thing there are."""

    def __init__(self, counts=NOTHING):
        self.counts = counts

    def add(self, name, number=1):
        if number < 0:
            raise ValueError("a number is at least 0")
        self.counts[name] = self.counts.get(name, 0) + number

    def take(self, name, number=1):
        """Takes things out. Raises ValueError, and takes nothing, if there are too few."""
        self.counts[name] -= number
        if self.counts[name] < 0:
            raise ValueError(f"there are too few of {name}")
        return self.counts[name]

    def most(self, number):
        """The names of which there are most, the most first; of equals, the first by name."""
        return sorted(self.counts, key=self.counts.get, reverse=True)[:number]
