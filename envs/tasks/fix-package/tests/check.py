"""The reward is 1 if the package answers all of these as its docstrings say."""

from programs import output, write_reward

START = "import sys; sys.path.insert(0, '/app'); from stock import Store, parse_line, table\n"
REFUSED = "\ntry: s.take({!r}, {})\nexcept ValueError: print('refused', s.counts)"
CASES = {
    "Store().add('a'); print(Store().counts)": "{}",
    "d = {'a': 1}; Store(d).add('a', 4); print(d)": "{'a': 1}",
    "s = Store({'pen': 3}); print(s.take('pen', 2), s.take('pen'))": "1 0",
    "s = Store({'pen': 3})" + REFUSED.format("pen", 4): "refused {'pen': 3}",
    "s = Store({'pen': 3})" + REFUSED.format("ink", 1): "refused {'pen': 3}",
    "print(Store({'c': 2, 'a': 2, 'b': 9, 'd': 1}).most(3))": "['b', 'a', 'c']",
    "print(parse_line('  blue ink pot :  407 '))": "('blue ink pot', 407)",
    "print(parse_line('jug: 5'))": "('jug', 5)",
    "print(repr(table(Store({}))))": "''",
    "print(table(Store({'c': 2, 'anchor': 22})))": "anchor: 22\nc     : 2",
    "print(table(Store({'zip': 1, 'lid': 22, 'rod': 3})))": "lid: 22\nrod: 3\nzip: 1",
}

found = [output("python3", "-c", START + code) for code in CASES]
write_reward(found == [f"{expected}\n" for expected in CASES.values()])
