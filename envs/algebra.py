"""Algebra: equations, systems and inequalities to solve, at three levels; 1 if the solutions are
right, else 0.

    rl-core train --env_path envs/algebra.py --model M --max_tokens 512 --out runs/algebra

Kinds (column `kind`): linear, quadratic, system, inequality, each of `level` 1 to 3. The last line
of a reply is the answer: `x = 3`, `x = 2 or x = -1/2`, `x = 1, y = 4`, `x >= 5/2`. Numbers are
compared as fractions, in any order. A hash of the prompt says which tenth is held out. Rows of your
own: a prompt, and `answer` in this form. Needs a GPU, not run.
"""

import random
import re
import zlib
from fractions import Fraction

KINDS = ("linear", "quadratic", "system", "inequality")
NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9}|/[0-9]{1,9})?"
STATEMENT = rf"([xy])(<=|>=|=|<|>)({NUMBER})(?![0-9./a-z])"
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "="}
HOW = "The last line of your answer is the solution alone, such as: {}"
FORMS = {
    "linear": "x = -3/2",
    "quadratic": "x = 2 or x = -3",
    "system": "x = 1, y = 4",
    "inequality": "x >= 5",
}


def term(number, name=""):
    """A term of a sum with its sign: `+3x`, `-x`, `+5`."""
    size = "" if abs(number) == 1 and name else abs(number)
    return f"{'-' if number < 0 else '+'}{size}{name}"


def total(*terms):
    """A sum of (number, name); those of 0 are left out."""
    text = "".join(term(number, name) for number, name in terms if number != 0)
    return text.removeprefix("+") or "0"


def nonzero(rng, most):
    return rng.choice((-1, 1)) * rng.randint(1, most)


def sides(level, rng, x):
    """Two sums, equal at x, and how much faster the left one grows."""
    while True:
        a, c = nonzero(rng, 9), 0
        if level > 1:
            c = nonzero(rng, 9)
        b, inner = nonzero(rng, 20), 0
        if level > 2:
            inner = nonzero(rng, 5)
        right = a * (x + inner) + b - c * x
        if a != c and right.denominator == 1:
            break
    left = total((a, "x"), (b, ""))
    if level > 2:
        left = f"{total((a, f'(x{term(inner)})'))}{term(b)}"
    return left, total((c, "x"), (right, "")), a - c


def linear(level, rng):
    x = Fraction(nonzero(rng, 12))
    if level == 3:
        x = Fraction(nonzero(rng, 12), rng.choice((1, 2, 3)))
    left, right, _ = sides(level, rng, x)
    return f"{left} = {right}", f"x = {x}"


def inequality(level, rng):
    x = Fraction(nonzero(rng, 12))
    left, right, slope = sides(level, rng, x)
    sign = rng.choice(("<", ">", "<=", ">="))
    return f"{left} {sign} {right}", f"x {sign if slope > 0 else FLIPPED[sign]} {x}"


def quadratic(level, rng):
    """a (x - p)(x - q) = 0 with integers: the second root is a fraction above level 1, and above
    level 2 a part stands on the right."""
    a = 1 if level == 1 else rng.randint(2, 4)
    p, q = Fraction(nonzero(rng, 9)), Fraction(nonzero(rng, 9), a)
    b, c = -a * (p + q), a * p * q
    moved = 0, 0
    if level == 3:
        moved = nonzero(rng, 9), nonzero(rng, 9)
    left = total((a, "x^2"), (b + moved[0], "x"), (c + moved[1], ""))
    right = total((moved[0], "x"), (moved[1], ""))
    return f"{left} = {right}", " or ".join(f"x = {root}" for root in sorted({p, q}))


def system(level, rng):
    most = 3 * level
    x, y = nonzero(rng, 4 * level), nonzero(rng, 4 * level)
    a, b = nonzero(rng, most), nonzero(rng, most)
    c, d = nonzero(rng, most), nonzero(rng, most)
    if a * d == b * c:
        return system(level, rng)
    first = f"{total((a, 'x'), (b, 'y'))} = {a * x + b * y}"
    second = f"{total((c, 'x'), (d, 'y'))} = {c * x + d * y}"
    return f"{first} and {second}", f"x = {x}, y = {y}"


MAKERS = {"linear": linear, "quadratic": quadratic, "system": system, "inequality": inequality}


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for number in range(3600):
        kind = KINDS[number % 4]
        level = number // 4 % 3 + 1
        asked, answer = MAKERS[kind](level, rng)
        prompt = f"Solve {asked}\n{HOW.format(FORMS[kind])}"
        is_held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if is_held_out == (split != "train"):
            rows[prompt] = {"prompt": prompt, "answer": answer, "kind": kind, "level": level}
    return list(rows.values())


def solution(text):
    """What a line says of x and y: a set of (name, sign, number)."""
    line = re.sub(r"[\s$*]", "", text.strip().split("\n")[-1])
    line = line.replace("\u2264", "<=").replace("\u2265", ">=").replace("\u2212", "-")
    found = set()
    for name, sign, number in re.findall(STATEMENT, line):
        top, _, bottom = number.partition("/")
        if not bottom or int(bottom):
            found.add((name, sign, Fraction(top) / Fraction(bottom or 1)))
    return found


def reward_fn(completion, answer):
    return float(solution(completion) == solution(answer) != set())
