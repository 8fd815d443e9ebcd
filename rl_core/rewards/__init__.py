"""Common rewards: plain functions of a reply, for `reward_fn` of an environment.

    from rl_core.rewards import maths, matches

    def reward_fn(completion, answer):
        return {"right": maths(completion, answer), "format": 0.1 * matches(completion,
        r"(?s)<think>.*</think>.+")}

Each docstring has the range and the source. Functions that ask a model or run code are `async`:
await them in an `async def` hook. A reply that holds nothing to score earns the lowest value;
such a reference raises ValueError.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import unicodedata
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from rl_core.rewards.judges import compare, judge, ranked, rubric  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from rl_core.sandbox import Sandbox
    from rl_core.types import JSONObject

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
if TYPE_CHECKING:
    Batch = Callable[[list[_Item]], Awaitable[Sequence[_Result]]]

NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+"
FENCE = r"(?s)```[\w+-]*[ \t]*\n(.*?)```"


def exact(text: str, answer: str) -> float:
    """1 if the texts are equal apart from case, articles, punctuation and space, else 0. As SQuAD
    (arXiv:1606.05250)."""
    words, expected = (
        re.findall(r"\b(?!(?:an?|the)\b)\w+", str(each).casefold()) for each in (text, answer)
    )
    return float(words == expected != [])


def numeric(text: str, answer: str | float, tolerance: float = 1e-6) -> float:
    """1 if the last numbers of text and answer are equal within a relative tolerance, else 0. As
    many score GSM8K (arXiv:2110.14168): thousands separators, currency and units do not count."""
    numbers, expected = (re.findall(NUMBER, str(each), re.ASCII) for each in (text, answer))
    if not expected:
        raise ValueError(f"answer={answer!r} must hold a number")
    values = [float(each[-1].replace(",", "")) for each in (numbers, expected) if each]
    return float(len(values) == 2 and math.isclose(*values, rel_tol=tolerance))


@contextmanager
def needing(function: str, extra: str) -> Iterator[None]:
    """A context for imports. Raises ImportError with the extra that installs a missing library."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"{function}: {error}; pip install 'rl_core[{extra}]'") from None


def maths(text: str, answer: str | float | list[str]) -> float:
    r"""1 if the final answers are equal as mathematics, else 0. Thoughts hold no answer. Final
    is what stands after the last `####` (GSM8K), in the last `\boxed{}` (MATH,
    arXiv:2103.03874) or `<answer>`, whichever comes last, else the last formula or number. The
    reference may be LaTeX without dollars. A list of texts, or its JSON text, holds
    alternatives of which each is right. See rl_core/rewards/math_answers.py."""
    from rl_core.rewards.math_answers import alternatives, final_answer, is_equal, reference_answer

    final = final_answer(str(text))
    listed = alternatives(answer)
    references = [reference_answer(each) for each in listed]
    is_right = any(is_equal(final, reference) for reference in references)
    return float(is_right or final.strip() in [str(each).strip() for each in listed])


def matches(text: str, pattern: str) -> float:
    """1 if the whole text matches the regular expression, else 0: a reward for the form, as in
    DeepSeek-R1 (arXiv:2501.12948). A pattern that backtracks without end blocks the hook's
    thread."""
    return float(re.fullmatch(pattern, text.strip()) is not None)


def length(count: int, limit: int, slack: int) -> float:
    """0 up to `limit - slack` tokens or words, then falling to -1 at `limit` and beyond: DAPO's
    soft punishment of overlong replies, equation 13 of arXiv:2503.14476."""
    if not 0 < slack <= limit:
        raise ValueError(f"slack={slack} must be from 1 to limit={limit}")
    return min(0.0, max(-1.0, (limit - slack - count) / slack))


async def code_tests(
    sandbox: Sandbox,
    text: str,
    tests: Sequence[str | dict | tuple[str, str]],
    timeout_s: float = 5.0,
) -> float:
    """The share of tests that Python code passes in a sandbox, in [0, 1]: the last code block of
    the text, or all of it. `tests` as of rl_core.sandbox (docs/sandbox.md); as HumanEval
    (arXiv:2107.03374), where all must pass."""
    if not tests:
        raise ValueError("tests is empty; code without a test earns nothing")
    blocks = re.findall(FENCE, text)
    return (
        await sandbox.run(blocks[-1] if blocks else text, tests=tests, timeout_s=timeout_s)
    ).share


def syntax(text: str, name: str = "") -> float:
    """1 if the last code block of the text, or all of it, is Python with a function (called `name`,
    if given) that does something, else 0. `pass`, `...`, a bare `return` and a docstring do
    nothing. After CodeRL, which separates code that does not compile from code that
    fails (arXiv:2207.01780)."""
    blocks = re.findall(FENCE, text)
    try:
        tree = ast.parse(blocks[-1] if blocks else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    for node in ast.walk(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and name in ("", node.name) and not all(map(is_idle, node.body)):
            return 1.0
    return 0.0


def is_idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Return):
        return statement.value is None
    return isinstance(statement, ast.Pass)


def json_schema(text: str, schema: JSONObject) -> float:
    """1 if the text, or the last code block in it, is JSON that the schema allows, else 0
    (json-schema.org, by `jsonschema`; pip install rl_core[json])."""
    with needing("json_schema()", "json"):
        from jsonschema.validators import validator_for

    blocks = re.findall(FENCE, text)
    try:
        # JSON has no NaN and no Infinity; int() refuses their names.
        value = json.loads(blocks[-1] if blocks else text, parse_constant=int)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator_for(schema)(schema).is_valid(value))


def repetition(text: str, size: int = 4) -> float:
    """Minus the share of n-grams of `size` words that stood before in the text, in (-1, 0]. After
    Yeo et al. 2025, appendix C.2 (arXiv:2502.03373)."""
    words = text.casefold().split()
    grams = list(zip(*(words[first:] for first in range(size)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def language(text: str, script: str = "LATIN") -> float:
    """The share of letters of a script, in [0, 1]; 0 without letters. `script`: first words of
    Unicode's names of its letters, such as "LATIN", "CYRILLIC", "CJK HIRAGANA KATAKANA". As
    in DeepSeek-R1 (arXiv:2501.12948). Languages with one script are not distinguished."""
    scripts = [
        unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha()
    ]
    return sum(name in script.split() for name in scripts) / len(scripts) if scripts else 0.0


def rouge(text: str, reference: str, kind: str = "L") -> float:
    """F1 of ROUGE-1, ROUGE-2 or ROUGE-L (`kind` 1, 2 or L), in [0, 1] (Lin 2004,
    aclanthology.org/W04-1013). As the package `rouge-score` without its stemmer. Words are of a
    to z and digits: a text in another script has none."""
    if kind not in ("1", "2", "L"):
        raise ValueError(f"kind={kind!r} must be 1, 2 or L: kind='L', say")
    words, expected = (re.findall("[a-z0-9]+", each.lower()) for each in (text, reference))
    if not expected:
        raise ValueError(f"reference={reference!r} must hold a word of a to z or digits")
    if kind == "L":
        return 2 * common_subsequence(words, expected) / (len(words) + len(expected))
    grams, other = ngrams(words, int(kind)), ngrams(expected, int(kind))
    return 2 * (grams & other).total() / max(1, grams.total() + other.total())


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, by bit vectors: a word costs one addition
    (Hyyro 2004)."""
    positions: dict[str, int] = {}
    for index, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << index
    row = full = (1 << len(first)) - 1
    for word in second:
        same = row & positions.get(word, 0)
        row = (row + same | row - same) & full
    return (full ^ row).bit_count()


def ngrams(items: Sequence[str], size: int) -> Counter:
    """N-grams of `size` items with their counts."""
    return Counter(zip(*(items[first:] for first in range(size)), strict=False))


def bleu(text: str, reference: str) -> float:
    """BLEU of a sentence, in [0, 1] (Papineni et al. 2002, aclanthology.org/P02-1040, by
    `sacrebleu`; pip install rl_core[text])."""
    return overlap("bleu", text, reference)


def chrf(text: str, reference: str) -> float:
    """chrF: F2 of character n-grams up to 6, in [0, 1], for any script (Popovic 2015,
    aclanthology.org/W15-3049, by `sacrebleu`; pip install rl_core[text])."""
    return overlap("chrf", text, reference)


def overlap(name: str, text: str, reference: str) -> float:
    if not reference.strip():
        raise ValueError(f"reference={reference!r} must hold a word")
    with needing(f"{name}()", "text"):
        import sacrebleu
    score = getattr(sacrebleu, f"sentence_{name}")(text, [reference]).score
    return min(1.0, score / 100)  # Rounding can give equal texts more than 100.


def together(
    size: int, wait_s: float = 1.0
) -> Callable[[Batch[_Item, _Result]], TogetherCalls[_Item, _Result]]:
    """Decorator of an `async` function from a list of items to a list of results: concurrent calls,
    each with one item, become one call, such as one request to a judge for all episodes of a step.
    Sent once `size` calls wait, or no further one came for `wait_s` seconds."""
    if size < 1 or wait_s < 0:
        raise ValueError(f"size={size} must be at least 1, and wait_s={wait_s} at least 0")
    return lambda function: TogetherCalls(function, size, wait_s)


class TogetherCalls(Generic[_Item, _Result]):
    """The waiting calls of a function decorated with together()."""

    def __init__(self, function: Batch[_Item, _Result], size: int, wait_s: float):
        self.function, self.size, self.wait_s = function, size, wait_s
        self.waiting: list[tuple[_Item, asyncio.Future[_Result]]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.tasks: set[asyncio.Task] = set()

    async def __call__(self, item: _Item) -> _Result:
        loop = asyncio.get_running_loop()
        # An earlier event loop may have ended while calls waited.
        self.waiting = [call for call in self.waiting if call[1].get_loop() is loop]
        future = loop.create_future()
        self.waiting.append((item, future))
        if self.timer is not None:
            self.timer.cancel()
        if len(self.waiting) >= self.size:
            self.send()
        else:
            self.timer = loop.call_later(self.wait_s, self.send)
        return await future

    def send(self) -> None:
        calls = [call for call in self.waiting if not call[1].done()]
        self.waiting, self.timer = [], None
        if calls:
            task = asyncio.get_running_loop().create_task(self.run(calls))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def run(self, calls: list[tuple[_Item, asyncio.Future[_Result]]]) -> None:
        """Sets each call's result, or the error of all."""
        error, results = None, []
        try:
            results = list(await self.function([item for item, _ in calls]))
            if len(results) != len(calls):
                raise ValueError(
                    f"{self.function.__name__}() returned {len(results)} results for "
                    f"{len(calls)} items; it must return one for each"
                )
        except Exception as raised:
            error = raised
        for number, (_, future) in enumerate(calls):
            if future.done():
                continue
            if error is None:
                future.set_result(results[number])
            else:
                future.set_exception(error)
