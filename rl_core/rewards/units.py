"""Units of measurement in answers: values of units that are known; others are ignored."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import product

# Names = factor, then base units and their exponents. The base units of mechanics are m, k(g), s.
TABLE = """
m meter metre=1 m 1; g gram=1/1000 k 1; s sec second=1 s 1; A amp ampere=1 A 1; K kelvin=1 K 1;
mol mole=1 mol 1; L l liter litre=1/1000 m 3; N newton=1 k 1 m 1 s -2; J joule=1 k 1 m 2 s -2;
W watt=1 k 1 m 2 s -3; Pa pascal=1 k 1 m -1 s -2; bar=100000 k 1 m -1 s -2;
atm=101325 k 1 m -1 s -2; Hz hertz=1 s -1; C coulomb=1 A 1 s 1; V volt=1 k 1 m 2 s -3 A -1;
ohm=1 k 1 m 2 s -3 A -2; F farad=1 k -1 m -2 s 4 A 2; T tesla=1 k 1 s -2 A -1;
H henry=1 k 1 m 2 s -2 A -2; eV=1 eV 1; cal calorie=1 cal 1; Wh=3600 k 1 m 2 s -2;
min minute=60 s 1; h hr hour=3600 s 1; d day=86400 s 1; week=604800 s 1; month=1 month 1;
yr year=12 month 1; in inch=127/5000 m 1; ft foot feet=381/1250 m 1; yd yard=1143/1250 m 1;
mi mile=201168/125 m 1; mph=1397/3125 m 1 s -1; lb pound=1 lb 1; oz ounce=1/16 lb 1;
rad radian=1 rad 1; deg degree=1 deg 1; degC=1 degC 1; degF=1 degF 1; dollar=1 $ 1;
cent=1/100 $ 1
"""
PREFIXES = {
    "f": -15, "p": -12, "n": -9, "µ": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9,
    "nano": -9, "micro": -6, "milli": -3, "centi": -2, "kilo": 3, "mega": 6, "giga": 9,
}  # fmt: skip
LETTERS = set("msghlLNJWVACKTHFd")  # Units of one letter.
ATOM = re.compile(r"\s*(/?)\s*([A-Za-zµ]+)\s*(?:\^\s*\{?(-?\d)\}?)?")

Unit = tuple[Fraction, Counter[str]]


@cache
def known_units() -> dict[str, Unit]:
    units = {}
    for row in TABLE.rstrip().split(";"):
        names, value = row.split("=")
        factor, *base = value.split()
        exponents = Counter(dict(zip(base[::2], map(int, base[1::2]), strict=True)))
        for name in names.split():
            units[name] = Fraction(factor), exponents
    return units


@cache
def named_unit(name: str) -> Unit | None:
    """The value of a unit such as kJ, kilometers or feet; None if it is unknown. Other cases of its
    letters count if all that are units have one value: KM is km, but MG may be mg or Mg."""
    if (unit := exact_unit(name)) or len(name) == 1:
        return unit
    letters = zip(name.lower(), name.upper(), strict=True)
    cases = map("".join, product(*letters)) if len(name) < 5 else [name.lower()]
    values = [unit for each in cases if (unit := exact_unit(each))]
    return values[0] if values and values.count(values[0]) == len(values) else None


def exact_unit(name: str) -> Unit | None:
    units = known_units()
    for singular in (name, name.removesuffix("s"), name.removesuffix("es")):
        if singular in units and (singular == name or len(singular) > 2):
            return units[singular]
        for prefix, power in PREFIXES.items():
            rest = singular.removeprefix(prefix)
            # Symbols have prefixes of one letter, and words have words. Min is no megainch.
            if (
                rest not in (singular, "in")
                and rest in units
                and (len(prefix) == 1) == (len(rest) < 4)
            ):
                factor, exponents = units[rest]
                return factor * Fraction(10) ** power, exponents
    return None


def unit_value(text: str) -> Unit | None:
    """(factor to base units, their exponents) of a unit such as km/h; None if it is unknown."""
    text = re.sub(r"\bper\b", "/", re.sub(r"[“”~.*]|\\cdot", " ", text))
    text = re.sub(r"\bsquare (\w+)", r"\1^2", re.sub(r"\bcubic (\w+)", r"\1^3", text))
    text = re.sub(r"\b(k?m)s\s*\^\s*\{?-", r"\1 s^{-", text)  # Metres per second.
    if not re.fullmatch(rf"(?:{ATOM.pattern})+\s*", text):
        return None
    factor, exponents = Fraction(1), Counter[str]()
    for slash, name, digits in ATOM.findall(text):
        power = int(digits or 1) * (-1 if slash else 1)
        unit = named_unit(name)
        if unit is None:
            return None
        factor *= unit[0] ** power
        for base, exponent in unit[1].items():
            exponents[base] += exponent * power
    return factor, Counter({base: n for base, n in exponents.items() if n})
