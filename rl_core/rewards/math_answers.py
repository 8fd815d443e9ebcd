r"""Mathematical answers: extracts them from a text, parses LaTeX, and compares them.

    final_answer("Hence \\boxed{\\frac12}.")        "\\frac12"
    is_equal("\\frac12", "0.5")                     True

Sets, lists, tuples, intervals, matrices, equations and inequalities are compared by their items.
Expressions are compared by their values: exactly if rational, else at fixed points of their
variables. Nothing is simplified symbolically and large values are not computed, so a comparison
takes milliseconds. An answer that cannot be parsed equals only the same text.
"""

from __future__ import annotations

import cmath
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from rl_core.data.thoughts import without_thoughts
from rl_core.rewards.units import LETTERS, unit_value

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
MAX_CHARS = 2000  # Longest answer.
MAX_BOXES = 20  # Most boxes of a list.
MAX_ITEMS = 50  # Most items of a list that is compared in any order.
MAX_DEPTH = 40  # Deepest nesting of brackets.
MAX_BITS = 20_000  # Largest numerator or denominator of an exact number.
MAX_FACTORIAL = 1000
NUM_POINTS = 4  # Number of points at which expressions with variables are compared.
CLOSE = 1e-10  # Largest relative difference of equal inexact values.
DECIMAL_CLOSE = 1.1e-6  # Largest relative difference if one value is a decimal, perhaps rounded.

# LaTeX command -> character.
SIGNS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤",
    "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠", "lt": "<",
    "gt": ">", "in": "∈", "cup": "∪", "cap": "∩", "infty": "∞", "langle": "⟨", "rangle": "⟩",
    "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "vert": "|", "lvert": "|",
    "rvert": "|", "mid": "|", "emptyset": "∅", "varnothing": "∅", "lbrace": "⦃", "rbrace": "⦄",
    "lbrack": "[", "rbrack": "]", "prime": "'", "approx": "≈", "equiv": "≡", "land": ",",
    "wedge": ",", "or": "∨", "lor": "∨", "vee": "∨", "setminus": "∖", "backslash": "∖",
    "degree": "°", "colon": ":", "ldots": "…", "dots": "…", "cdots": "…",
}  # fmt: skip
LAYOUT = {
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl",
    "biggr", "middle", "displaystyle", "textstyle", "limits", "quad", "qquad", "rm", "bf", "boxed",
    "fbox", "circ", "phantom", "hspace", "allowbreak", "nolimits", "normalsize", "large",
    "mathstrut",
}  # fmt: skip
# Character -> equivalent character or LaTeX.
CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "≦": "≤", "≧": "≥",
    "⩽": "≤", "⩾": "≥", "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
    "√": "\\sqrt ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "²": "^2",
    "³": "^3", "′": "'", "’": "'", "ℝ": "\\mathbb{R}", "\u00a0": " ", "\u2009": " ", "，": ",",
    "（": "(", "）": ")", "：": ":",
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "sinh": cmath.sinh, "cosh": cmath.cosh,
    "tanh": cmath.tanh, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "ln": cmath.log, "log": cmath.log10, "exp": cmath.exp, "lg": cmath.log10,
    "cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
}  # fmt: skip
INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan")}
GREEK = re.compile(
    "(?:var)?(?:alpha|beta|[gG]amma|[dD]elta|epsilon|zeta|eta|[tT]heta|iota|kappa|[lL]ambda|mu|nu|"
    "[xX]i|Pi|rho|[sS]igma|tau|[uU]psilon|[pP]hi|chi|[pP]si|[oO]mega|ell|hbar)"
)
# Opening bracket -> (closing bracket, operation of the pair).
BRACKETS = {"(": (")", ""), "{": ("}", ""), "[": ("]", ""), "|": ("|", "abs"),
            "⌊": ("⌋", "floor"), "⌈": ("⌉", "ceil")}  # fmt: skip
RELATIONS = "=<>≤≥≠≈≡"
FLIPPED = str.maketrans("<>≤≥", "><≥≤")
OPEN, CLOSED = "([{⦃⟨", ")]}⦄⟩"
# Letters right after a number are a product of variables (6abc, 6m), except for these units.
CLOSE_UNITS = r"(?:cm|mm|km|kg|mg|ml|mL|ft|in|yd|mi|lb|oz|hr|mph|rad|deg|m/s)"
UNITS = rf"(?:{CLOSE_UNITS}|(?i:[ck]m|kg|ft|in|yd|mi|lb|oz|hr)|pm|[a-zA-Z]{{3,}}|[msghL])"
UNIT_POWER = r"\.?(?:\^\{?-?[1-4]\}?)?"
BASE = r"([0-9A-F]+)_\{?(\d+)\}?"
# A function's value, a probability, a segment or an angle.
NAME = r"[fghFGHQ]'*(?:\^\{?-1\}?)?\([^()]*\)|[A-Za-z]\w*\([a-z,]+\)|[A-Za-z]{2,}\([\w,]+\)|"
NAME += r"[pquv]\([\d.,-]+\)|[a-zA-Z](?:\+[a-zA-Z])+|\|[a-zA-Z]\||"
NAME += r"\\(?:sin|cos|tan|det|gcd|dim|triangle)[({]?(?:\w|,|\\[a-z]+)+[)}]?|"
NAME += r"(?:P|E|Pr|Var)\([^()]*\)|[A-Z]{2,4}(?:\^2)?|\|[A-Z]{2,4}\||m?\\angle\w+|\[[A-Z]{3,}\]"
CLOCK = r"(\d{1,2}):(\d\d)([ap]m)?"
# A time of day, with or without minutes; a text group may hold its end.
HALF_DAY = re.compile(
    r"(?<![\d.,:])((?:1[0-2]|0?\d)(?::\d\d)*)\s*“?([ap])(?:\.\s?)?m\b\.?”?(?=\s*(?:[.,;”]|$))", re.I
)
BOX = r"\\(?:boxed|fbox)\s*\{"
DEGREES = r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°|\^\{?°\}?)(?:\s|~|\\[,;! ])*"
CELSIUS = r"(?:\\(?:text|mathrm|mathit|rm)\s*\{?)?\s*([CF])(?![A-Za-z])\}?"
# Markdown headings such as "#### Step 2" and "#### 2. Then", which are not answers.
HEADING = r"[*_\s]*(?:\d+[.):]\s+[A-Za-z]|[A-Za-z][A-Za-z'’-]*(?:[\s:*]|$))"
# Words in a text group that change the value next to it, and so are not units.
MODIFIER = re.compile(
    r"\b(?:if|when|for|where|otherwise|mod|not|to|base|or|and|more|less|fewer|than|least|most|about|"
    r"approximately|over|under|between|hundred|thousand|[mbtr]+illion|dozen|half|twice|times|up|"
    r"down|minus|negative|from|factorial|choose|below|(?<![a-z]\s)(?:squared|cubed))\b",
    re.I,
)
# Words that stand for an absent answer.
ABSENT = {"", "none", "null", "nan", "n/a", "na", "?", "unknown"}
MAX_WORDS = 3  # Most words of a reference without mathematics.
VERDICT = r"(?i)(?:yes|no|true|false)(?:[.,!;]|$)"
# A letter with a delimiter, alone or before the text of its option: (B), C) 12, E: words.
OPTION = re.compile(
    r"(?:(?i:option|choice) )?(?:\(\s*([A-J])\s*\)|([A-J])\s*(?:\)|[.:](?=\s|$)|$))\s*(.*)",
    re.S,
)
OPTIONS = re.compile(r"^[A-J]\W*$|\(?\b[A-J]\)|\b[A-J][.:]\s|(?:or|and|[,/])\s*[A-J]\s*$")
STYLE = r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|math(?:rm|bf|it|sf|cal)|bm|boldsymbol)\s*\{"


class Unknown(Exception):
    """Raised for an expression or value that cannot be parsed or is too large."""


# Extraction of the answer from a text


def final_answer(text: str) -> str:
    r"""The text of the final answer behind all thoughts: after `####`, in `\boxed{}` or `<answer>`,
    whichever comes last, or in a later line "Answer: ...". Without any, the last formula or number,
    or a reply of few words. "" if there is none."""
    text = without_thoughts(text)
    answer, end = max(
        last_box(text), last_line(text), last_tag(text), key=lambda candidate: candidate[1]
    )
    if end < 0:
        return last_expression(text)
    later = text[end:][-MAX_CHARS:]
    for match in re.finditer(r"(?i)(?:\banswer(?:\s+is)?|答案[是为為]?)[*_\s]*[:：][*_\s]*", later):
        answer = stated(later[match.end() :].partition("\n")[0]) or answer
    return answer


def last_tag(text: str) -> tuple[str, int]:
    """(answer in the last <answer> element, its end)."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    content = text[start + 8 : end].strip() if 0 <= start < end else ""
    if not content:
        return "", -1
    words = re.findall(r"(?<![\\{A-Za-z])[A-Za-z]{2,}", content)
    if "boxed" in content or "answer" in words or len(words) > MAX_WORDS:
        content = final_answer(content)
    return content, end


def last_box(text: str) -> tuple[str, int]:
    r"""(content of the last \boxed{}, its end). Boxes separated only by "and" or a comma are
    one list. A box that is not closed has no content: the text was cut off within its answer."""
    boxes = closed_boxes(text)[-MAX_BOXES:]
    closed_end = boxes[-1][1] if boxes else 0
    if unfinished := re.search(BOX, text[closed_end:]):
        return "", closed_end + unfinished.start()
    if not boxes:
        return "", -1
    start, end, content_start = boxes.pop()
    last_end, contents = end, [text[content_start : end - 1]]
    while boxes:
        before_start, before_end, content_start = boxes.pop()
        between = text[before_end:start]
        if not re.fullmatch(r"[\s$,;\\()]*(?:and|or)?[\s$,;\\()]*", between):
            break
        start, content = before_start, text[content_start : before_end - 1]
        if content != contents[0]:
            contents.insert(0, content)
    return ",".join(contents), last_end


def closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """(start, end, start of the content) of each outermost box that is closed."""
    boxes: list[tuple[int, int, int]] = []
    opened: list[tuple[int, int] | None] = []  # Open braces; a box has (start, content start).
    for match in re.finditer(BOX + r"|\\.|[{}]", text, re.S):
        if match[0] == "}":
            box = opened.pop() if opened else None
            if box:
                while boxes and boxes[-1][0] > box[0]:  # Drops the boxes inside this one.
                    boxes.pop()
                boxes.append((box[0], match.end(), box[1]))
        elif match[0] == "{":
            opened.append(None)
        elif match[0].endswith("{") and len(match[0]) > 2:
            opened.append((match.start(), match.end()))
    return boxes


def closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes one opened before `start`; -1 if it never closes."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.S).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1


def last_line(text: str) -> tuple[str, int]:
    """(text after the last `####` that is not a heading, start of the mark)."""
    for match in reversed([*re.finditer(r"(?<!#)####(?!#)", text)]):
        behind = text[match.end() : match.end() + 2 * MAX_CHARS]
        line, _, rest = behind.lstrip(" \t").partition("\n")
        if not line.strip() and "boxed" not in rest:
            line = rest.strip().partition("\n")[0]
        line = re.sub(r"\*\*|__", "", line).strip()
        is_heading = re.match(HEADING, line) and rest.strip()
        if line and not is_heading and "boxed" not in line:
            return line, match.start()
    return "", -1


OPERATORS = {"+", "-", "−", "–", "*", "/", "·", "⋅", "×", "÷"}
FORMULA = (
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|"
    r"(?<![\\\d$])\$(?!\s)((?:\\\$|[^\n$])+?)(?<![\\\s])\$"
)
PLAIN = rf"(?<![\d)\w.])[-−–]?\s?(?:\\?\$\s?)?(?:{NUMBER})(?:\s*/\s*(?:{NUMBER}))?|\\[dt]?frac\S+"


def last_expression(text: str) -> str:
    """The first formula or number after the last "answer is" or "answer:", else a last line that is
    an option or a verdict, else the last formula or number, else a text of few words."""
    text = text[-MAX_CHARS:]
    marks = r"(?i)(?:answer(?:\s+is|\s*[:：])|答案(?:[是为為]|\s*[:：]))[:：\s*]*"
    for match in reversed([*re.finditer(marks, text)]):
        if answer := stated(text[match.end() :].partition("\n")[0]):
            return answer
    line = re.sub(r"\*\*|__", "", text).strip().rpartition("\n")[2].strip()
    if option(line) or re.fullmatch(VERDICT, line):
        return line
    if spans := expressions(text):
        return max(spans, key=lambda span: span[1])[2]
    return line if len(text.split()) <= MAX_WORDS else ""


def stated(rest: str) -> str:
    """The option, formula, number or verdict that a line begins with or has first; "" if none."""
    rest = re.sub(r"\*\*|__", "", rest).strip()
    if choice := re.match(r"\(?([A-Z])\)?[.。]*(?:\s|$)", rest):
        return choice[1]
    if option(rest):
        return rest
    if spans := expressions(rest):
        return worked_out(rest, sorted(spans))
    verdict = re.match(VERDICT, rest)
    return verdict[0] if verdict else ""


def worked_out(text: str, spans: list[tuple[int, int, str]]) -> str:
    """The first expression; in a calculation such as 256 + 37 = 293, its result: the last side that
    is one expression."""
    sides = [[spans[0]]]
    for before, span in itertools.pairwise(spans):
        gap = text[before[1] : span[0]].strip(" ()")
        if gap == "=":
            sides.append([span])
        elif gap in OPERATORS or (not gap and span[2][0] in "-−–"):
            sides[-1].append(span)
        else:
            break
    results = [side[0][2] for side in sides if len(side) == 1]
    return results[-1] if results else spans[0][2]


def expressions(text: str) -> list[tuple[int, int, str]]:
    """(start, end, expression) of each formula, then of each number outside of formulas."""
    formulas = []
    for match in re.finditer(FORMULA, text, re.S):
        formulas.append((match.start(), match.end(), next(filter(None, match.groups()))))
    numbers = []
    covered = 0
    for match in re.finditer(PLAIN, text, re.ASCII):
        while covered < len(formulas) and formulas[covered][1] <= match.start():
            covered += 1
        if covered == len(formulas) or match.end() <= formulas[covered][0]:
            numbers.append((match.start(), match.end(), match[0]))
    return formulas + numbers


def alternatives(answer: object) -> list[object]:
    """The texts of a list or of its JSON text, such as '["34"]'; else the answer alone. Numbers are
    no alternatives: [1, 2] is an interval."""
    listed = answer
    if isinstance(answer, str) and re.match(r'\s*\[\s*"', answer):
        with suppress(ValueError):
            listed = json.loads(answer)
    if isinstance(listed, (list, tuple)) and all(isinstance(each, str) for each in listed):
        return list(listed) or [None]
    return [answer]


def reference_answer(answer: object) -> str:
    """The answer in a reference: a value, a bare formula, or a solution that ends in one. Raises
    ValueError if the reference holds none."""
    text = "" if answer is None else str(answer).strip()
    final = text
    if "####" in text or "boxed" in text:
        final = final_answer(text)
    elif re.search(r"\$|\\[(\[]", text):
        formulas = [span for span in expressions(text) if span[2] != text]
        around = re.sub(FORMULA, " ", text, flags=re.S)
        around = re.sub(r"\b(?:and|or)\b|\\text\{[^{}]*\}", "", around)
        is_prose = re.search(r"[A-Za-z]{2,}", around)
        if is_prose and formulas:
            final = max(formulas, key=lambda span: span[1])[2]
    is_math = option(final) or re.search(r"[\d\\$=^_(\[]|^\W*\w\W*$", final)
    is_absent = final.casefold() in ABSENT
    try:
        is_absent |= not cleaned(final)[0] or not (is_math or len(final.split()) <= MAX_WORDS)
    except Unknown:
        is_absent = True
    if is_absent:
        raise ValueError(f"answer={answer!r} must hold a number or a formula")
    return final


def option(text: str) -> tuple[str, str] | None:
    """(letter, text of the option) of a choice such as (B) or C) 12; None for other texts and for
    several options."""
    plain = re.sub(STYLE + r"|[{}$*~]|\\[ ,;:!]|\\q?quad", " ", text[: MAX_CHARS + 1])
    match = OPTION.fullmatch(" ".join(plain.split()))
    if len(text) > MAX_CHARS or match is None or OPTIONS.search(match[3]):
        return None
    letter = match[1] or match[2]
    rest = re.sub(
        rf"(?s)^.*?(?<![A-Za-z]){letter}(?![A-Za-z])\s*\}}?\s*(?:[).:]\s*)?\}}?", "", text, count=1
    )
    if rest.count("}") > rest.count("{"):
        rest = rest.rstrip("$ ").removesuffix("}")
    return letter, rest if match[3] else ""


# Conversion of LaTeX to text with one character for each sign


def cleaned(text: str) -> tuple[str, str]:
    """(the answer without layout, units, money and percent signs, its unit); text groups become
    `“text”`."""
    if len(text) > MAX_CHARS:
        raise Unknown
    for character, same in CHARACTERS.items():
        text = text.replace(character, same)
    text = re.sub(r"\\[\[\]()]|(?<!\\)\$", " ", text)  # Delimiters of a formula.
    text = re.sub(r"\\begin\{(?:aligned|array)\}(?:\{\w*\})?", r"\\begin{matrix}", text)
    text = re.sub(r"\\end\{(?:aligned|array)\}", r"\\end{matrix}", text)
    text = re.sub(r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\[dt]binom(?![A-Za-z])", r"\\binom", text)
    text = re.sub(r"\\operatorname\*?\s*\{(\w+)\}", r"\\\1 ", text)
    text = re.sub(r"(?<=[\d}])(?:\s|~|\\[,;: ])+\\Omega(?![A-Za-z])", " “ohm” ", text)
    text = re.sub(DEGREES + CELSIUS, r" “deg\1” ", text)
    text = re.sub(rf"(?<=[\d}})])\s*{DEGREES}(?=[\s$.]*$)", " “deg” ", text)
    text = re.sub(DEGREES, " ", text)
    text = re.sub(r"(\d)(?:,\\!|\\!,|\{,\}|\\,|\\!)\s*(?=\d{3}(?!\d))", r"\1", text)
    text = re.sub(r"(?<!\\)\\[,;:! ]|\\\$|\\?%|~|€|£", " ", text)
    text = text.replace(r"\{", "⦃").replace(r"\}", "⦄").replace("\\|", "|")
    text = re.sub(STYLE + r"((?:[^{}]|\{[^{}]*\})*)\}", text_group, text)
    text = HALF_DAY.sub(lambda time: f"{time[1]} “{time[2].lower()}m”", text)
    text = re.sub(r"\\mu\s*“\s*", "“µ", text)
    text = re.sub(r"\\([A-Za-z]+) ?", command, text)
    text = re.sub(r"(?<=[\d.])[eE]([+-]?\d+)(?![\w.])", r"*10^{\1}", text)
    text = " ".join(text.split())
    text = re.sub(r"(?<=[\d)\]}⦄⟩]),? and |(?<=\b[A-J]),? and (?=[A-J]\b)", ",", text)
    text = re.sub(r"(?<=[\w)\]}⦄⟩]),? or (?=.*[<>≤≥])|(?<=[\d)\]}⦄⟩]),? or ", "∨", text)
    is_region = all(re.search("[<>≤≥∈]", side) for side in text.split("∨"))
    text = text.replace("∨", "∪" if is_region else ",")
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        return text.replace(" ", ""), ""
    text, unit = without_units(text)
    choice = re.fullmatch(r"\(([A-Za-z])\)", text.strip())
    return choice[1] if choice else text.strip(), unit


def command(match: re.Match[str]) -> str:
    name = match[1]
    if name in LAYOUT:
        return " "
    return SIGNS.get(name, match[0])


def text_group(match: re.Match[str]) -> str:
    """The meaning of a text group: a list's "and", a letter, a function, a number with its unit, or
    text."""
    text = " ".join(match[1].split())
    if re.fullmatch(r"\(?[A-J]\)?(?:(?:,| and|, and) \(?[A-J]\)?)+", text):
        return text.replace(" and ", ",").replace(",,", ",")
    if re.fullmatch(r"(?:,\s*)?(?:and|or)", text):
        return "," if text.endswith("and") else "∨"
    before = re.sub(r"[\s~]+$", "", match.string[: match.start()])
    is_letter = re.fullmatch(r"\(?[A-Za-z]\)?", text)
    if is_letter and not (text in LETTERS and re.search(r"[\d)}/*”µ]$|\\mu$|\\cdot$", before)):
        return text
    is_applied = text.isalpha() and re.match(r"\s*\(", match.string[match.end() :])
    if text in FUNCTIONS or text == "pi" or is_applied:
        return f"\\{text} "  # A function may be unknown: \text{lcm}(4,6).
    if re.match(r"-?[\d.]", text):
        return text
    if text and not unit_value(text):
        text = text.casefold()
    return f" “{text}” " if text else " "


def without_units(text: str) -> tuple[str, str]:
    """(the text without units after a value and without a final full stop, the unit)."""
    text = re.sub(r"(?<![.\s])\s*[.,;:]$", "", text.strip())
    # A text group alone is the answer.
    group = r"(?:[*/]\s*)?“[^“”]*”(?:\s*\^\s*\{?-?\d\}?)?"
    bare, unit = re.sub(group, " ", text), ""
    words = [word.strip() for word in re.findall(r"“([^“”]*)”", text)]
    is_clock = HALF_DAY.search(text) is not None
    is_unit = not any(map(MODIFIER.search, words))
    if re.search(r"[\w∞∅)\]}⦄⟩]", bare) and not is_clock and is_unit:
        tail = re.search(rf"((?:\s*{group})+)[\s.,;:]*$", text)
        unit = tail[1] if tail else ""
        text = re.sub(r"^[=≈]|(?<![.\s])\s*[.,;:]$", "", " ".join(bare.split()))
    plain = rf"(?:{CLOSE_UNITS}|\s+{UNITS}){UNIT_POWER}(?:[\s/*]+{UNITS}{UNIT_POWER})*"
    value = re.fullmatch(rf"(.*[\d}})])\s*({plain})", text)
    # Letters after a variable are further variables, not a unit.
    if (
        value
        and not MODIFIER.search(text)
        and not re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", value[1])
    ):
        return value[1], value[2]
    return text, unit


def canonical(text: str) -> str:
    """The text without spaces and redundant braces. Spaces that matter stay marked: 2 3 is not 23,
    and 1, 234 is not 1,234."""
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_ ", text.strip())
    text = re.sub(r",\s+(?=\d{3}(?!\d))", ";", text)
    text = re.sub(r"(?<!_)\s+|[“”]", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


# Expressions


@dataclass(slots=True)
class LatexReader:
    """Recursive-descent parser of an expression. Trees are nested tuples (operation, arguments)."""

    text: str
    at: int = 0
    depth: int = 0

    def expression(self) -> tuple:
        tree = self.sum()
        if self.peek():
            raise Unknown(self.text[self.at :])
        return tree

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, pattern: str) -> str:
        """Consumes and returns the match of `pattern` at this position; "" if there is none."""
        self.peek()
        match = re.compile(pattern).match(self.text, self.at)
        self.at += len(match[0]) if match else 0
        return match[0] if match else ""

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unknown
        sign = self.take(r"[+-]")
        tree = self.product()
        if sign == "-":
            tree = ("neg", tree)
        while sign := self.take(r"[+-]"):
            tree = ("add", tree, self.product() if sign == "+" else ("neg", self.product()))
        self.depth -= 1
        return tree

    def product(self, in_function: bool = False) -> tuple:
        tree = self.signed_factor()
        while True:
            if self.take(r"\*(?!\*)"):
                tree = ("mul", tree, self.signed_factor())
            elif self.take(r"/"):
                tree = ("div", tree, self.signed_factor())
            elif self.begins_factor(in_function):
                tree = self.implied(tree)
            else:
                return tree

    def implied(self, tree: tuple) -> tuple:
        r"""A product without a sign, or a mixed number such as 2\frac{1}{2} or 2 1/2."""
        is_fraction = self.peek() == "\\"
        after = self.text[self.at - 1 : self.at] == " "
        factor = self.factor()
        if tree[0] == "num" and tree[1].denominator == 1 and not tree[2]:
            if is_fraction and factor[0] == "div" and factor[1][0] == factor[2][0] == "num":
                return ("add", tree, factor)
            if factor[0] == "num" and after and self.take("/"):
                return ("add", tree, ("div", factor, self.factor()))
        if factor[0] == "num":
            raise Unknown  # Two numbers in a row.
        return ("mul", tree, factor)

    def begins_factor(self, in_function: bool) -> bool:
        rest = self.text[self.at :] if self.peek() else ""
        if in_function and re.match(r"\\(?:" + "|".join(FUNCTIONS) + r")(?![A-Za-z])", rest):
            return False
        return re.match(r"[\w.({\\⌊⌈∞\[]", rest) is not None

    def signed_factor(self) -> tuple:
        if self.take("-"):
            return ("neg", self.signed_factor())
        self.take(r"\+")
        return self.factor()

    def factor(self) -> tuple:
        tree = self.atom()
        while True:
            if self.take(r"!(?!=)"):
                tree = ("factorial", tree)
            elif self.take(r"\^|\*\*"):
                tree = ("pow", tree, self.argument(is_power=True))
            else:
                return tree

    def argument(self, is_power: bool = False) -> tuple:
        """The argument of a command: in braces, or one digit, letter or command. A power takes all
        digits, because x^10 is often written without braces."""
        if self.take(r"\{"):
            tree = self.sum()
            if not self.take(r"\}"):
                raise Unknown
            return tree
        sign = self.take("-") if is_power else ""
        if digits := self.take(r"\d+" if is_power else r"\d"):
            tree: tuple = ("num", Fraction(digits), False)
        else:
            tree = self.atom()
        return ("neg", tree) if sign else tree

    def atom(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unknown
        tree = self.read_atom()
        self.depth -= 1
        return tree

    def read_atom(self) -> tuple:
        if digits := self.take(rf"(?:{NUMBER})"):
            return self.number(digits.replace(",", ""))
        if bracket := self.take(r"[({\[⌊⌈|]"):
            last, name = BRACKETS[bracket]
            tree = self.sum()
            if not self.take(re.escape(last)):
                raise Unknown
            return (name, tree) if name else tree
        if self.take("∞"):
            return ("inf",)
        if name := self.take(r"\\[A-Za-z]+"):
            return self.command(name[1:])
        if name := self.take(r"[A-Za-z]"):
            if name in "fgh" and self.peek() == "(":
                raise Unknown  # The value of an unknown function.
            return self.symbol(name)
        raise Unknown(self.text[self.at :])

    def number(self, digits: str) -> tuple:
        r"""A number with its repeating digits, if any: 0.1\overline{6}."""
        value = Fraction(digits)
        mark = r"\." if "." not in digits else ""
        pattern = re.compile(mark + r"\s?\\(?:overline|bar|dot)\s?\{?(\d{1,99})\}?")
        match = pattern.match(self.text, self.at)
        if match is None:
            return ("num", value, "." in digits)
        self.at = match.end()
        places = len(digits.partition(".")[2])
        repeating = Fraction(int(match[1]), 10 ** len(match[1]) - 1)
        return ("num", value + repeating / 10**places, False)

    def symbol(self, name: str) -> tuple:
        name += self.take(r"'+")
        if self.take("_"):
            start = self.at
            if self.take(r"\{"):
                end = closing_brace(self.text, self.at)
                if end < 0:
                    raise Unknown
                self.at = end + 1
            else:
                self.at += 1
            name += "_" + canonical(self.text[start : self.at])
        return {"i": ("i",), "e": ("e",)}.get(name, ("sym", name))

    def command(self, name: str) -> tuple:
        if name == "frac":
            top = self.argument()
            return ("div", top, self.argument())
        if name == "binom":
            top = self.argument()
            return ("binom", top, self.argument())
        if name == "sqrt":
            root = ("num", Fraction(2), False)
            if self.take(r"\["):
                root = self.sum()
                if not self.take(r"\]"):
                    raise Unknown
            return ("root", self.argument(is_power=True), root)
        if name == "pi":
            return ("pi",)
        if name in FUNCTIONS:
            return self.function(name)
        if GREEK.fullmatch(name):
            return self.symbol("\\" + name)
        if name in ("overline", "vec", "hat", "bar", "overrightarrow", "mathbb") and self.take("{"):
            end = closing_brace(self.text, self.at)
            content, self.at = self.text[self.at : end], end + 1
            if end >= 0 and name != "mathbb":
                return self.symbol(f"\\{name} {canonical(content)}")
        raise Unknown(name)

    def function(self, name: str) -> tuple:
        power = base = None
        while mark := self.take(r"[\^_]"):
            if mark == "^":
                power = self.argument(is_power=True)
            else:
                base = self.argument(is_power=True)
        if power == ("neg", ("num", Fraction(1), False)):
            name, power = INVERSES.get(name, ""), None
        is_closed = re.match(r"[({]", self.text[self.at :]) if self.peek() else None
        argument = self.atom() if is_closed else self.product(in_function=True)
        if name not in FUNCTIONS or (base and name != "log"):
            raise Unknown
        tree: tuple = ("call", name, argument)
        if base:
            tree = ("div", ("call", "ln", argument), ("call", "ln", base))
        return ("pow", tree, power) if power else tree


def symbols(tree: tuple) -> set[str]:
    if tree[0] == "sym":
        return {tree[1]}
    names: set[str] = set()
    for item in tree[1:]:
        if isinstance(item, tuple):
            names |= symbols(item)
    return names


def has_decimal(tree: tuple) -> bool:
    if tree[0] == "num":
        return tree[2]
    return any(isinstance(item, tuple) and has_decimal(item) for item in tree[1:])


def point(name: str, number: int) -> float:
    """The value of a variable at comparison point `number`: above 1, within (0, 1), or negative."""
    share = zlib.crc32(f"{name}/{number}".encode()) / 2**32
    return (1.5 + share, 0.3 + 0.5 * share, -0.7 - share, 2.5 + share)[number % 4]


Value = Fraction | float | complex


def evaluate(tree: tuple, number: int = 0) -> Value:
    """The value at a comparison point, a Fraction if it is exact. Raises Unknown if the value is
    too large or undefined."""
    try:
        return bounded(compute(tree, number))
    except (ArithmeticError, ValueError, RecursionError, TypeError):
        raise Unknown from None


def compute(tree: tuple, number: int) -> Value:
    kind = tree[0]
    if kind == "num":
        return bounded(tree[1])
    if kind == "sym":
        return point(tree[1], number)
    if kind in CONSTANTS:
        return CONSTANTS[kind]
    if kind == "call":
        return FUNCTIONS[tree[1]](complex(evaluate(tree[2], number)))
    return OPERATIONS[kind](*(evaluate(item, number) for item in tree[1:]))


CONSTANTS: dict[str, Value] = {"pi": math.pi, "e": math.e, "i": 1j, "inf": math.inf}


def bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise Unknown
    elif cmath.isnan(value):
        raise Unknown
    return value


def powered(base: Value, power: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(power, Fraction) and power.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(power) * size > MAX_BITS:
            if base in (0, 1):
                return base
            raise Unknown
        return base ** int(power)
    if isinstance(base, Fraction) and isinstance(power, Fraction):
        return rooted(powered(base, Fraction(power.numerator)), Fraction(power.denominator))
    return complex(base) ** complex(power)


def rooted(value: Value, root: Value) -> Value:
    """The real root of a real number if there is one, else the principal root."""
    if isinstance(value, Fraction) and isinstance(root, Fraction) and root.denominator == 1:
        degree = int(root)
        if not 1 <= degree <= 100:
            raise Unknown
        if value < 0 and degree % 2:
            return -rooted(-value, root)
        if value >= 0:
            exact = [integer_root(n, degree) for n in (value.numerator, value.denominator)]
            if exact[0] ** degree == value.numerator and exact[1] ** degree == value.denominator:
                return Fraction(exact[0], exact[1])
    if root == 2:
        return cmath.sqrt(complex(value))
    return complex(value) ** (1 / complex(root))


def integer_root(value: int, degree: int) -> int:
    """The integer part of a root, by Newton's method."""
    if value < 2:
        return value
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= MAX_FACTORIAL:
        return Fraction(math.factorial(int(value)))
    if isinstance(value, float) and abs(value) < 100:
        return math.gamma(value + 1)
    raise Unknown


def binomial(top: Value, bottom: Value) -> Value:
    if isinstance(top, Fraction) and isinstance(bottom, Fraction):
        if top.denominator == bottom.denominator == 1 and 0 <= bottom <= top <= MAX_FACTORIAL:
            return Fraction(math.comb(int(top), int(bottom)))
        raise Unknown
    return factorial(top) / (factorial(bottom) * factorial(top - bottom))


def is_real(value: Value) -> bool:
    return not isinstance(value, complex) or abs(value.imag) <= CLOSE * max(1.0, abs(value))


def real(value: Value) -> Fraction | float:
    if not is_real(value):
        raise Unknown
    return value.real


def mixed(operation: Callable[[Value, Value], Value], a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return operation(a, b)
    # Python turns a large Fraction into a float by itself, or raises OverflowError.
    return operation(complex(a) if isinstance(b, complex) else a, b)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "neg": lambda a: -a,
    "add": partial(mixed, lambda a, b: a + b),
    "mul": partial(mixed, lambda a, b: a * b),
    "div": partial(mixed, lambda a, b: a / b),
    "pow": powered,
    "root": rooted,
    "factorial": factorial,
    "binom": binomial,
    "abs": lambda a: abs(a),
    "floor": lambda a: Fraction(math.floor(real(a))),
    "ceil": lambda a: Fraction(math.ceil(real(a))),
}


# Structures


@dataclass(frozen=True, slots=True)
class AnswerNode:
    """The structure of an answer.

    Example: "[1,2)" has the kind brackets, the mark "[)" and two expressions as items; "x=1" has
    the kind relation and the mark "=".
    """

    # "expression", "list", "brackets", "matrix", "relation", "union", "base", "clock" or "text".
    kind: str
    text: str  # The answer as canonical() returns it.
    mark: str = ""  # Brackets, or relation signs.
    items: tuple[AnswerNode, ...] = ()
    tree: tuple = ()  # The tree of an expression.


def read(text: str, depth: int = 0) -> AnswerNode:
    """The structure of a cleaned answer."""
    text = stripped(text)
    name = canonical(text)
    make = partial(AnswerNode, text=name)
    if depth > MAX_DEPTH:
        return make("text")
    match = re.fullmatch(BASE, name)
    if match and all(int(digit, 16) < int(match[2]) for digit in match[1]):
        return make("base", mark=f"{match[1]} {match[2]}")
    if match := re.fullmatch(CLOCK, name):
        return make("clock", mark=f"{int(match[1])}:{match[2]}{match[3] or ''}")
    # A = (1,2)∪(3,4) is an equation, and x<1∪x>2 a region.
    is_region = all(re.search(f"[{RELATIONS}∈]", side) for side in text.split("∪"))
    kinds = [("relation", RELATIONS), ("union", "∪")]
    for kind, signs in (("list", ",;"), *(reversed(kinds) if is_region else kinds)):
        parts, marks = split_outside(text, signs)
        if len(parts) > 1 and not (kind == "list" and depth == 0 and is_thousands(text)):
            if not all(map(str.strip, parts)):
                return make("text")
            items = tuple(read(item, depth + 1) for item in parts)
            return make(kind, mark=marks if kind == "relation" else "", items=items)
    parts, _ = split_outside(text, "∈")
    if len(parts) == 2 and re.fullmatch(r"\w", parts[0].strip()):
        return read(parts[1], depth + 1)
    if matrix := re.fullmatch(r"\\begin\{([a-z]*matrix)\}(.*)\\end\{\1\}", text, re.S):
        return read_matrix(matrix[1], matrix[2], name, depth)
    if brackets := enclosed(text):
        inside, _ = split_outside(text[1:-1], ",;")
        if len(inside) == 1 and inside[0].strip().startswith("\\begin"):
            return read(inside[0], depth + 1)
        if brackets == "⦃⦄" or len(inside) > 1:
            items = tuple(read(item, depth + 1) for item in inside if item.strip())
            return make("brackets", mark=brackets, items=items)
    if re.search("[±∓]", text):
        both = [text.translate(str.maketrans("±∓", signs)) for signs in ("+-", "-+")]
        return make("list", items=tuple(read(item, depth + 1) for item in both))
    with suppress(Unknown, RecursionError):
        return make("expression", tree=LatexReader(text).expression())
    return make("text")


def stripped(text: str) -> str:
    """The text without braces around all of it."""
    text = text.strip()
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def is_thousands(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d,]*", text.strip()) is not None


def split_outside(text: str, signs: str) -> tuple[list[str], str]:
    """(parts, the signs between them) at signs outside of brackets and environments."""
    parts, marks, depth, start = [], "", 0, 0
    for match in re.finditer(r"\\begin|\\end|\\?.", text, re.S):
        token = match[0]
        if token in ("\\begin", *OPEN):
            depth += 1
        elif token in ("\\end", *CLOSED):
            depth -= 1
        elif token in signs and depth == 0:
            parts.append(text[start : match.start()])
            marks += token
            start = match.end()
    return [*parts, text[start:]], marks


def enclosed(text: str) -> str:
    """The brackets around all of the text, "" if there are none; those of an interval may differ,
    as in "[)"."""
    if len(text) < 2 or text[0] not in "([⦃⟨" or text[-1] not in ")]⦄⟩":
        return ""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in OPEN) - (character in CLOSED)
        if depth == 0 and index < len(text) - 1:
            return ""
    return text[0] + text[-1] if depth == 0 else ""


def read_matrix(name: str, content: str, text: str, depth: int) -> AnswerNode:
    lines = [line for line in re.split(r"\\\\|\\cr", content) if line.strip()]
    rows = []
    for line in lines:
        cells = tuple(read(cell, depth + 1) for cell in re.split(r"(?<!\\)&", line))
        rows.append(AnswerNode("brackets", "", "row", cells))
    # The brackets of a matrix are a matter of taste; a determinant's have a meaning.
    return AnswerNode("matrix", text, "det" if name[0] in "vV" else "", tuple(rows))


def nodes_equal(a: AnswerNode, b: AnswerNode) -> bool:
    if a.text and a.text == b.text:
        return True
    a, b = without_name(a, b), without_name(b, a)
    a, b = as_interval(a, b), as_interval(b, a)
    if a.kind == b.kind == "expression":
        return trees_equal(a.tree, b.tree)
    if {a.kind, b.kind} <= {"list", "brackets"}:
        is_set = [n.kind == "list" or n.mark == "⦃⦄" for n in (a, b)]
        if all(is_set):
            return same_items(a.items, b.items)
        return a.mark == b.mark and same_sequence(a.items, b.items)
    if a.kind != b.kind:
        return False
    if a.kind == "union":
        return same_items(a.items, b.items)
    if a.kind == "matrix":
        return a.mark == b.mark and same_sequence(a.items, b.items)
    if a.kind == "relation":
        return relations_equal(a, b)
    return a.kind in ("base", "clock") and a.mark == b.mark


def same_sequence(first: Sequence[AnswerNode], second: Sequence[AnswerNode]) -> bool:
    return len(first) == len(second) and all(map(nodes_equal, first, second))


def same_items(first: Sequence[AnswerNode], second: Sequence[AnswerNode]) -> bool:
    """True if the items are equal in any order."""
    if len(first) != len(second) or len(first) > MAX_ITEMS:
        return False
    left = list(second)
    for item in first:
        match = next((other for other in left if nodes_equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def is_name(node: AnswerNode) -> bool:
    """True for a variable, f(x), or a tuple of variables, which name the value after an equals
    sign."""
    if node.kind == "expression" and node.tree[0] == "sym":
        return True
    if node.kind == "brackets":
        return node.mark == "()" and all(map(is_name, node.items))
    return re.fullmatch(NAME, node.text) is not None


def without_name(node: AnswerNode, other: AnswerNode) -> AnswerNode:
    """The last value of x=5 or x=2+3=5 if the other answer is a value without a name."""
    if node.kind != "relation" or set(node.mark) - {"=", "≈"}:
        return node
    first, last = node.items[0], node.items[-1]
    if other.kind != "relation":
        return last if is_name(first) or not has_names(node) else node
    if len(node.items) > 2:
        return AnswerNode("relation", "", "=", (first, last))
    return node


def has_names(node: AnswerNode) -> bool:
    if node.tree and symbols(node.tree):
        return True
    return node.kind == "text" or any(map(has_names, node.items))


def as_interval(node: AnswerNode, other: AnswerNode) -> AnswerNode:
    """The interval of an inequality such as 1<x≤2 if the other answer is an interval or a union."""
    if node.kind != "relation" or other.kind not in ("brackets", "union"):
        return node
    items, marks = node.items, node.mark
    if set(marks) <= set(">≥"):
        items, marks = items[::-1], marks[::-1].translate(FLIPPED)
    if not set(marks) <= set("<≤"):
        return node
    edge = [{"<": "()", "≤": "[]"}[mark] for mark in marks]
    infinite = AnswerNode("expression", "∞", tree=("inf",))
    below = AnswerNode("expression", "-∞", tree=("neg", ("inf",)))
    if len(items) == 3 and is_name(items[1]):
        return AnswerNode("brackets", "", edge[0][0] + edge[1][1], (items[0], items[2]))
    if len(items) == 2 and is_name(items[0]):
        return AnswerNode("brackets", "", "(" + edge[0][1], (below, items[1]))
    if len(items) == 2 and is_name(items[1]):
        return AnswerNode("brackets", "", edge[0][0] + ")", (items[0], infinite))
    return node


def gives_value(node: AnswerNode) -> bool:
    """True for a solved equation such as x=5. 2x=10 has the same solution but is not solved."""
    first, last = node.items
    is_solved = (is_name(first) and not has_names(last)) or (is_name(last) and not has_names(first))
    return node.mark == "=" and is_solved


def relations_equal(a: AnswerNode, b: AnswerNode) -> bool:
    """True if the sides are equal, in either direction, or if the differences of the two sides are
    equal up to a factor."""
    if a.mark == b.mark and same_sequence(a.items, b.items):
        return True
    if a.mark == b.mark[::-1].translate(FLIPPED) and same_sequence(a.items, b.items[::-1]):
        return True
    if not len(a.items) == len(b.items) == 2:
        return False
    if any(item.kind != "expression" for item in (*a.items, *b.items)):
        return False
    if gives_value(a) or gives_value(b):
        return False
    first, second = (("add", n.items[0].tree, ("neg", n.items[1].tree)) for n in (a, b))
    if a.mark == b.mark:
        is_flipped = False
    elif a.mark == b.mark.translate(FLIPPED):
        is_flipped = True
    else:
        return False
    names = sorted(symbols(first) | symbols(second))
    if not names or symbols(first) != symbols(second):
        return False
    ratios = []
    with suppress(Unknown, ArithmeticError):
        for number in range(NUM_POINTS):
            ratios.append(complex(evaluate(first, number)) / complex(evaluate(second, number)))
        ratio = ratios[0]
        is_constant = all(abs(other - ratio) <= CLOSE * abs(ratio) for other in ratios)
        is_positive = abs(ratio.imag) < CLOSE and (ratio.real > 0) != is_flipped
        return is_constant and ratio != 0 and (is_positive or a.mark in "=≠")
    return False


def trees_equal(a: tuple, b: tuple) -> bool:
    """True if two expressions are equal at every comparison point at which both have a value.
    Points with a complex value may differ from the third one on."""
    num_points = NUM_POINTS if symbols(a) | symbols(b) else 1
    is_rounded = has_decimal(a) or has_decimal(b)
    num_equal = 0
    for number in range(num_points):
        try:
            values = evaluate(a, number), evaluate(b, number)
        except Unknown:
            continue
        if values_equal(*values, is_rounded):
            num_equal += 1
        elif num_points == 1 or all(map(is_real, values)) or number < 2:
            return False
    return num_equal >= min(2, num_points)


def values_equal(a: Value, b: Value, is_rounded: bool) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if a == b:
            return True
        if not is_rounded:
            return False
        bound = CLOSE if is_terminating(a) and is_terminating(b) else DECIMAL_CLOSE
        return abs(a - b) <= Fraction(bound) * max(abs(a), abs(b))
    try:
        first, second = complex(a), complex(b)
    except OverflowError:
        return False
    if cmath.isinf(first) or cmath.isinf(second):
        return first == second
    bound = DECIMAL_CLOSE if is_rounded else CLOSE
    return abs(first - second) <= bound * max(abs(first), abs(second))


def is_terminating(value: Fraction) -> bool:
    """True for a number with a finite decimal expansion."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def is_equal(answer: str, reference: str) -> bool:
    """True if two answers are equal as mathematics."""
    if answer.strip() == reference.strip() != "":
        return True
    a, b = option(answer), option(reference)
    if a and b:
        is_same = not (a[1] and b[1]) or not re.search(r"\d", a[1] + b[1]) or is_equal(a[1], b[1])
        return a[0] == b[0] and is_same
    if (a and a[1]) or (b and b[1]):
        return is_equal(a[1] if a else answer, b[1] if b else reference)
    try:
        (first, unit), (second, other) = cleaned(answer), cleaned(reference)
        if not first or not second:
            return False
        units = [unit_value(each) for each in (unit, other)]
        if units[0] and units[1] and units[0] != units[1]:
            if units[0][1] != units[1][1]:
                return False
            first = f"({first})*{units[0][0] / units[1][0]}"
        is_text = all(re.fullmatch("[A-Za-z“” ]+", text) for text in (first, second))
        if is_text and canonical(first).casefold() == canonical(second).casefold():
            return True
        return nodes_equal(read(first), read(second))
    except (Unknown, RecursionError, ArithmeticError):
        return False
