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

NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9}|/[0-9]{1,9})?"
STATEMENT = rf"([xy])\s*(<=|>=|=|<|>)\s*({NUMBER})(?![0-9a-z]|[./][0-9])"
FLIPPED = {
    "<": ">",
    ">": "<",
    "<=": ">=",
    ">=": "<=",
}
HOW = "The last line of your answer is the solution alone, such as: {}"
FORMS = {
    "linear": "x = -3/2",
    "quadratic": "x = 2 or x = -3",
    "system": "x = 1, y = 4",
    "inequality": "x >= 5",
}


def term(number, name=""):
    """A term of a sum with its sign: `+3x`, `-x`, `+5`."""
    sign = "-" if number < 0 else "+"
    size = abs(number)
    if size == 1 and name:
        return sign + name
    return f"{sign}{size}{name}"


def total(*terms):
    """A sum of (number, name); those of 0 are left out."""
    text = "".join(term(number, name) for number, name in terms if number != 0)
    return text.removeprefix("+") or "0"


def nonzero(rng, most):
    return rng.choice((-1, 1)) * rng.randint(1, most)


def sides(level, rng, x):
    """Two sums, equal at x, and how much faster the left one grows."""
    while True:
        a = nonzero(rng, 9)
        b = nonzero(rng, 20)
        c = 0
        inner = 0
        if level > 1:
            c = nonzero(rng, 9)
        if level > 2:
            inner = nonzero(rng, 5)
        right = a * (x + inner) + b - c * x
        if a != c and right.denominator == 1:
            break
    name = "x"
    if inner:
        name = f"(x{term(inner)})"
    left = total((a, name), (b, ""))
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
    found = sign
    if slope < 0:
        found = FLIPPED[sign]
    return f"{left} {sign} {right}", f"x {found} {x}"


def quadratic(level, rng):
    """a (x - p)(x - q) = 0 with integers: the second root is a fraction above level 1, and above
    level 2 a part stands on the right."""
    a = 1
    if level > 1:
        a = rng.randint(2, 4)
    p = Fraction(nonzero(rng, 9))
    q = Fraction(nonzero(rng, 9), a)
    b = -a * (p + q)
    c = a * p * q
    d = 0
    e = 0
    if level > 2:
        d = nonzero(rng, 9)
        e = nonzero(rng, 9)
    left = total(
        (a, "x^2"),
        (b + d, "x"),
        (c + e, ""),
    )
    right = total((d, "x"), (e, ""))
    roots = [f"x = {root}" for root in sorted({p, q})]
    return f"{left} = {right}", " or ".join(roots)


def system(level, rng):
    most = 3 * level
    x = nonzero(rng, most)
    y = nonzero(rng, most)
    a, b, c, d = (nonzero(rng, most) for _ in range(4))
    if a * d == b * c:
        return system(level, rng)
    equations = []
    for of_x, of_y in ((a, b), (c, d)):
        left = total((of_x, "x"), (of_y, "y"))
        equations.append(f"{left} = {of_x * x + of_y * y}")
    return " and ".join(equations), f"x = {x}, y = {y}"


MAKERS = {
    "linear": linear,
    "quadratic": quadratic,
    "system": system,
    "inequality": inequality,
}


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for number in range(3600):
        kind = [*FORMS][number % 4]
        level = number // 4 % 3 + 1
        asked, answer = MAKERS[kind](level, rng)
        prompt = f"Solve {asked}\n{HOW.format(FORMS[kind])}"
        is_held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if is_held_out == (split != "train"):
            rows[prompt] = {
                "prompt": prompt,
                "answer": answer,
                "kind": kind,
                "level": level,
            }
    return list(rows.values())


def solution(text):
    """What a line says of x and y: a set of (name, sign, number)."""
    line = text.strip().split("\n")[-1]
    line = line.replace("\u2264", "<=").replace("\u2265", ">=").replace("\u2212", "-")
    found = set()
    for name, sign, number in re.findall(STATEMENT, line):
        top, _, bottom = number.partition("/")
        if not bottom or int(bottom):
            found.add((name, sign, Fraction(top) / Fraction(bottom or 1)))
    return found


def reward_fn(completion, answer):
    return float(solution(completion) == solution(answer) != set())
