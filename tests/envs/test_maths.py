"""Answers are scored as mathematicians would: references in the style of MATH, MATH-500, Omni-MATH
and DAPO, and replies of any kind."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit import ROOT

from rl_core.data.thought_marks import MARKS
from rl_core.rewards import maths
from rl_core.rewards.math_answers import is_equal

# (reference, the same written otherwise) of each line. Neighbours differ.
REFERENCES = [
    line.split("\t")
    for line in (ROOT / "tests/cases/math_references.tsv").read_text("utf-8").splitlines()
]
STYLES = ("\\boxed{{{}}}", "First 1+2=3. So $\\boxed{{{}}}$.", "\\[\\fbox{{{}}}\\]")


@pytest.mark.parametrize("number", range(len(REFERENCES)), ids=lambda n: REFERENCES[n][0])
def test_a_reference_equals_itself_and_no_neighbour(number):
    reference, same = REFERENCES[number]
    neighbour = REFERENCES[(number + 1) % len(REFERENCES)][0]
    for style in STYLES:
        assert maths(style.format(reference), reference) == 1
        assert maths(style.format(same), reference) == maths(style.format(reference), same) == 1
        assert maths(style.format(neighbour), reference) == 0
        assert maths(style.format(reference), f"${reference}$") == 1
    for digits in set(re.findall(r"\d+", reference)) - {reference, same}:
        assert maths(f"\\boxed{{{digits}}}", reference) == 0, digits


def test_the_references_are_many_and_no_two_are_equal():
    assert len(REFERENCES) >= 200
    shuffled = random.Random(0).sample(REFERENCES, len(REFERENCES))
    pairs = zip(REFERENCES, shuffled, strict=True)
    assert not any(a != b and is_equal(a[0], b[0]) for a, b in pairs)


# (reply, reference, reward): the reference of public sets, and a reply in a box.
BOXED = [
    (r"2", "2x+1", 0), (r"5", "6 - 5i", 0), (r"-5", "−5", 1), (r"90^\circ", "90", 1),
    (r"2", "2^{2024}", 0), (r"2^{2025}", "2^{2024}", 0), (r"10^{10^{11}}", "10^{10^{10}}", 0),
    (r"3!", "3", 0), (r"18!", "18", 0), (r"5x", "5", 0), (r"5", "5x", 0), (r"5 m", "5", 1),
    (r"12.5", "12:30", 0), (r"2041", "2041_5", 0), (r"|x|", "x", 0), (r"\sqrt{x^2}", "x", 0),
    (r"(1,2)", "[1,2]", 0), (r"(1,2]", "[1,2]", 0), (r"(2,1)", "(1,2)", 0),
    (r"\{2,1\}", "(1,2)", 0), (r"1,2", r"\{1,2\}", 1), (r"\{1, 2\}", r"\{1\}", 0),
    (r"x>3", "x<3", 0), (r"x\ge3", "x>3", 0), (r"y=5", "x=5", 0), (r"x=5", "5", 1),
    (r"x=1\text{ or }x=2", "1,2", 1), (r"1,2", "x=1,x=2", 1), (r"x\approx 5", "5", 1),
    (r"0.333333", "1/3", 1), (r"0.3333", "1/3", 0), (r"3.14", r"\pi", 0), (r"0.3", 0.1 + 0.2, 1),
    (r"10^{-5}", 1e-5, 1), (r"1234", "1,234", 1), (r"1, 234", "1,234", 0), (r"20 000", "20000", 1),
    (r"2 3", "23", 0), (r"2 3", "6", 0), (r"31/6", "3 1/6", 0), (r"1/2/3", "1/6", 1),
    (r"\frac{12}{3}", r"\frac{1}{23}", 0), (r"50\%", "0.5", 0), (r"x/x", "1", 1),
    (r"\frac{x^2-1}{x-1}", "x+1", 1), (r"2X", "2x", 0), (r"\frac{1}{0}", r"\infty", 0),
    (r"\text{Bob}", r"\text{Evelyn}", 0), (r"Evelyn", r"\text{Evelyn}", 1), (r"B", "A", 0),
    (r"\text{Evelyn}", "Evelyn", 1), (r"(a)", "A", 1), (r"\text{Ann and Bob}", r"\text{Bob}", 0),
    (r"18 eggs", "18", 1), (r"12 \text{ miles per hour}", "12", 1), (r"10 \text{ million}", "10", 0),
    (r"3\text{ or more}", "3", 0), (r"\text{at least }3", "3", 0), (r"5\text{ or }6", "5", 0),
    (r"\text{5 or 6}", "5", 0), (r"3 \pmod 7", "3", 0), (r"5 \text{ if } x>0", "5", 0),
    (r"5abc", "5", 0), (r"6m^4", "6m^5", 0), (r"6m^5", "6", 0), (r"5cm", "5", 1), (r"5 m/s^2", "5", 1),
    (r"5 \text{ squared}", "5", 0), (r"5 cubed", "5", 0), (r"5\text{ cm squared}", "5", 1),
    (r"5\text{pi}", "5", 0), (r"\text{ln}5", "5", 0), (r"\text{lcm}(4,6)", "(4,6)", 0),
    (r"\mathrm{sin}(5)", "5", 0), (r"\mathrm{arctan} 2", r"\arctan 2", 1), (r"x=5", "2x=10", 0),
    (r"2x=10", "x=5", 0), (r"y=2x+1", "2x-y+1=0", 1), (r"2x-y+1=0", "y=2x+1", 1), (r"x=2y", "y=x/2", 1),
    (r"5,6", "$5$ or $6$", 1), (r"6", "$5$ or $6$", 0), (r"2 or 3", "2,3", 1), (r"3 or more", "3", 0),
    # Unknown signs.
    (r"5 \unknown 6", "5", 0), (r"5@6", "5", 0), (r"5\foo", "5", 0), (r"5?", "5", 0),
    (r"5\ldots", "5", 0), (r"5...", "5", 0), (r"f(2)", "2f", 0), (r"\foo{5}", "5", 0),
    (r"5\foo", r"5\foo", 1), (r"", "5", 0), (r"\text{}", "5", 0), (r"\infty-\infty", "0", 0),
]  # fmt: skip


@pytest.mark.parametrize("answer, reference, reward", BOXED)
def test_a_boxed_answer_is_compared_as_mathematics(answer, reference, reward):
    assert maths(f"So \\boxed{{{answer}}}.", reference) == reward


PLACED = [
    ("\\boxed{\\boxed{5}}", "5", 1), ("\\boxed{5}" + " so it goes" * 1000, "5", 1),
    ("#### 5" + "\nas was to be shown" * 1000, "5", 1), ("\\boxed{3} and $\\boxed{4}$", "3,4", 1),
    ("\\boxed{3} and \\boxed{4}", "4", 0), ("First \\boxed{3}. Rather \\boxed{4}", "4", 1),
    ("\\boxed{5} and then \\boxed{6", "5", 0), ("So \\boxed{5", "5", 0), ("\\boxed{6\n#### 5", "5", 1),
    ("#### Step 1\nWe add.\n#### Step 2\nSo \\boxed{7}", "7", 1),
    ("#### Solution\nIt is 7.", "7", 1), ("#### Final Answer\n7", "7", 1), ("#### 7 apples\n", "7", 1),
    ("\\boxed{3}\n#### 7", "7", 1), ("#### 3 cases\nHence \\boxed{5}", "5", 1), ("#### **7**", "7", 1),
    ("#### 2. Second\nThe answer is $\\frac{1}{2}$", "0.5", 1), ("#### $\\frac12$", "1/2", 1),
    ("The answer is (B).", "B", 1), ("Answer: **C**", "C", 1), ("The answer is 18, because 3+4=7", "18", 1),
    ("It costs $5 and $10", "10", 1), ("so $x=\\frac{1}{2}$.", "0.5", 1), ("It is 18!", "18", 1), ("It is −3.", "-3", 1), ("It is −3.", "3", 0),
    ("Answer: m+n = 256+37 = 293", "293", 1), ("Answer: m+n = 256+37 = 293", "256", 0), ("The answer is 10 - 3 = 7.", "7", 1),
    ("Answer: $5+3$ = $8$", "8", 1), ("Answer: 6 = 2*3", "6", 1), ("Answer: 6, as 2*3 = 6 and 1+4 = 5", "6", 1),
]  # fmt: skip


@pytest.mark.parametrize("reply, reference, reward", PLACED)
def test_the_final_answer_is_found_wherever_it_stands(reply, reference, reward):
    assert maths(reply, reference) == reward


# Replies whose answer is an option or a word, or stands behind another.
STATED = [
    ("B", "B", 1), ("C", "B", 0), ("**C**", "C", 1), ("**C**", "B", 0), ("(D)", "D", 1), ("Yes", "Yes", 1), ("No", "Yes", 0),
    ("Yes.", "yes", 1), ("<answer>B</answer>", "B", 1), ("<answer>C</answer>", "B", 0), ("<answer> $\\frac12$ </answer>", "0.5", 1),
    ("<answer>The answer is 7.</answer>", "7", 1), ("<answer>6</answer> or <answer>7</answer>", "7", 1),
    ("<answer>6</answer> or <answer>7</answer>", "6", 0), ("\\boxed{3} <answer>7</answer>", "7", 1), ("\\boxed{3} <answer>7</answer>", "3", 0),
    ("<answer>\\boxed{7}</answer>", "7", 1), ("<answer>7</answer> \\boxed{8}", "8", 1), ("<answer></answer> 7", "7", 1), ("<answer>7", "7", 1),
    ("There are \\boxed{3} cases.\n\n**Answer: D**", "D", 1), ("There are \\boxed{3} cases.\n\n**Answer: D**", "3", 0),
    ("\\boxed{3}\n**Answer:** D", "D", 1), ("\\boxed{3}\nFinal Answer: $\\frac{1}{2}$", "0.5", 1), ("\\boxed{3}\nAnswer: see above", "3", 1),
    ("\\boxed{3}. Is that the answer: no doubt.", "3", 1), ("\\boxed{C}\nAnswer: D", "C", 0), ("Answer: D\nHence \\boxed{C}", "C", 1),
    ("3+4=7, so\n\nB", "B", 1), ("3+4=7, so\n\n**(B) 7**", "B", 1), ("3+4=7, so\n\n(B) 7", "C", 0), ("It is odd.\nNo.", "No", 1),
    ("The answer is yes.", "Yes", 1), ("The answer is no.", "Yes", 0), ("The answer is C) 12", "C", 1), ("I would say B or C.", "B", 0),
    ("A", "A solution", 0), ("12", "C) 12", 1), ("\\boxed{A) 5 or B) 6}", "A", 0), ("Paris", "Paris", 1), ("not Paris", "Paris", 0),
    ("3+4=7\n答案：C", "C", 1), ("答案：C", "B", 0), ("因此，答案是C。", "C", 1), ("\\boxed{3}\n答案：D", "D", 1), ("答案是12个。共3步", "12", 1),
    ("<|inner_prefix|>\\boxed{5}<|inner_suffix|>Not known.", "5", 0),
]  # fmt: skip


@pytest.mark.parametrize("reply, reference, reward", STATED)
def test_an_option_a_word_or_a_later_statement_is_the_answer(reply, reference, reward):
    assert maths(reply, reference) == reward


GPT_OSS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


@pytest.mark.parametrize("opened, closed", [*MARKS.items(), GPT_OSS], ids=lambda mark: mark)
def test_thoughts_hold_no_answer(opened, closed):
    right, wrong = "so \\boxed{5}", "so \\boxed{6}"
    replies = {
        opened + right: 0,
        opened + right + closed: 0,
        opened + right + closed + "I do not know.": 0,
        opened + wrong + closed + right: 1,
        opened + right + closed + wrong: 0,
        opened + wrong + closed + "\n\nThe answer is 5.": 1,
        f"{opened}#### 6\n<answer>6</answer>{closed}<answer>5</answer>": 1,
        f"{right}\n{opened}{wrong}": 1,
        f" {opened}{wrong}{closed}\n{right}": 1,
        f"<b>Hm.</b> {opened}{wrong}{closed}{right}": 1,
    }
    if closed in MARKS.values():  # The prompt may have opened the thoughts.
        replies |= {
            wrong + closed + right: 1,
            right + closed: 0,
            right + closed + wrong: 0,
            f'{right}, "5"{closed}': 0,
            f"{right}, no '{closed}' needed": 1,
            f"{wrong}, then '{closed}'.{closed}{right}, no {closed} needed": 1,
            f"{opened}{wrong}{closed}{right}, no {closed} needed": 1,
            f"{opened}no `{closed}` yet, {right}": 0,
        }
    assert {reply: maths(reply, "5") for reply in replies} == replies


# Reference, the same otherwise, and answers that differ from both: another option, unit or end.
NEAR_MISSES = [
    line.split("\t")
    for line in (ROOT / "tests/cases/math_near_misses.tsv").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("reference, right, wrong", [(a, b, c) for a, b, *c in NEAR_MISSES])
def test_a_near_miss_of_a_published_answer_is_wrong(reference, right, wrong):
    for answer in (reference, right):
        assert maths(f"Hence \\boxed{{{answer}}}.", reference) == 1, answer
    for answer in wrong:
        assert maths(f"Hence \\boxed{{{answer}}}.", reference) == 0, answer


def test_the_near_misses_are_many():
    assert len(NEAR_MISSES) >= 120
    assert sum(len(row) - 2 for row in NEAR_MISSES) >= 240


NO_ANSWERS = ["", " ", None, "none", "NaN", "it has no answer at all", "$$", [], '["$$"]']


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_reference_without_an_answer_is_an_error(answer):
    with pytest.raises(ValueError, match="must hold a number or a formula"):
        maths("18", answer)


# Alternatives as a list of texts or its JSON text; numbers are the items of one answer.
ALTERNATIVES = [
    (["34"], ("34",), ("35",)),
    ('["34"]', ("34",), ("35", '["35"]')),
    ('[ "a", "\\\\frac{1}{2}"]', ("a", "0.5"), ("b", "2")),
    ("[1, 2]", ("[1,2]",), ("1", "2")),
    ([1, 2], ("[1,2]",), ("1", "2")),
]


@pytest.mark.parametrize("reference, right, wrong", ALTERNATIVES)
def test_each_alternative_of_a_reference_is_right(reference, right, wrong):
    assert [maths(f"\\boxed{{{answer}}}", reference) for answer in right] == [1] * len(right)
    assert [maths(f"\\boxed{{{answer}}}", reference) for answer in wrong] == [0] * len(wrong)


HOSTILE = r"""
import random, sys
from rl_core.rewards import maths

references = [line.split("\t")[0] for line in open(sys.argv[1], encoding="utf-8")]
signs = list("0123456789xyzi()[]{}^_+-*/=<>,;:.!|&$%#'\" \n\\⌊⦃“”½²٣１\ud800\0")
signs += ["\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\begin{pmatrix}", "\\end{pmatrix}", "####", "\\pm",
          "^{9^", "\\binom{", "10^{10", "\\{", "\\overline{", "\\log_", "\\sin^", "\\left(", "\\[", "\\cup"]
draw = random.Random(0)
for number in range(1000):
    reference = draw.choice(references)
    text = "".join(draw.choices(signs, k=draw.choice((3, 10, 40, 200))))
    at = draw.randrange(len(reference))
    maths("\\boxed{" + text + "}", reference)
    maths("\\boxed{" + reference[:at] + text[:20] + reference[at:] + "}", reference)
    maths(text, reference)
    maths(bytes(draw.choices(range(256), k=300)).decode("latin-1"), reference)
texts = ["{" * 10_000, "\\boxed{" * 10_000, "\\boxed{" + "{" * 10_000 + "}" * 10_001, "(" * 100_000, "$" * 100_000,
         "\\(" * 50_000, "#### \n" * 30_000, "#### Step\nx" * 30_000, "\\boxed{1}," * 30_000, "answer is " * 30_000,
         "9" * 200_000, "1," * 100_000, " " * 200_000, "\\frac{" * 30_000, "\\boxed{" + "9^" * 600 + "9}",
         "\\boxed{3" + "!" * 1500 + "}", "\\boxed{" + "2^{2000}" * 200 + "}", "\\boxed{10^{10^{10}}}",
         "\\boxed{e^{e^{e^{e^e}}}}", "\\boxed{\\sin(10^{300})}", "\\boxed{(10^{10})!}", "\\boxed{\\binom{10^9}{10^8}}",
         "\\boxed{" + "\\pm1" * 400 + "}", "\\boxed{" + "(1," * 600 + "1" + ")" * 600 + "}", "\\boxed{" + "A" * 1990 + "_2}",
         "\\boxed{0." + "1" * 1900 + "}", "\\boxed{1e999999999}", "\\boxed{" + "x_{" * 600 + "}", "\\boxed{1/0}"]
for text in texts:
    for reference in ("18", r"\{1,2,3\}", "x^2", r"\text{Evelyn}", "10^{10^{9}}", "12:30", "(1,2]"):
        assert maths(text, reference) == 0, (text[:50], reference)
"""


def test_no_reply_raises_or_takes_long():
    # A separate process: code that holds the interpreter would hold the tests too.
    file = str(Path(ROOT) / "tests/cases/math_references.tsv")
    command = [sys.executable, "-c", HOSTILE, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
