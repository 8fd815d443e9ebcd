"""Variables that a chat template reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from jinja2 import Environment, meta
from jinja2.nodes import Name, Node

from rl_core.data.messages import is_filled
from rl_core.data.pretrained import Tokenizer
from rl_core.errors import nearest
from rl_core.types import JSONObject

# Variables of a template that apply_chat_template() sets.
ARGUMENTS = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # TRL's training templates


def check_variables(tokenizer: Tokenizer, variables: JSONObject, where: str, fix: str = "") -> None:
    """Raises ValueError for a variable with a value that the chat template does not read."""
    filled = sorted(name for name, value in variables.items() if is_filled(value))
    if not filled:
        return
    known = template_variables(str(tokenizer.chat_template), tokenizer.special_tokens_map)
    for name in filled:
        if name not in known:
            reads = nearest(name, known) if known else "it reads no variables"
            raise ValueError(f"{where}: the chat template does not read {name!r}{fix}; {reads}")


def template_variables(template: str, special_tokens: Collection[str]) -> list[str]:
    """Variables that a chat template reads before it sets them, without those that are always
    given. `special_tokens`: names of the tokenizer's, such as bos_token."""
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
        GENERATION_TAG.sub("", template)
    )
    # jinja2 counts variables that are set in one branch; their first use here sets them.
    is_read: dict[str, bool] = {}
    for name in names_in_order(tree):
        is_read.setdefault(name.name, name.ctx == "load")
    unset = meta.find_undeclared_variables(tree) - {*ARGUMENTS, *special_tokens}
    return sorted(name for name in unset if is_read[name])


def names_in_order(node: Node) -> Iterator[Name]:
    """The names in a template, in the order in which they are read and set."""
    first = ("iter", "node")  # The values of loops and assignments.
    for child in (*node.iter_child_nodes(only=first), *node.iter_child_nodes(exclude=first)):
        if isinstance(child, Name):
            yield child
        yield from names_in_order(child)
