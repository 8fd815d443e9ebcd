from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from rl_core.environments.turn_order import (
    MAX_TURNS,
    draw_turns,
    num_turns,
    parse_schedule,
    speakers_of,
)

ACTORS = ["alice", "bob", "carol"]


def drawn(text: str, seed: int = 0, actors=ACTORS) -> str:
    return " ".join(draw_turns(parse_schedule(text, actors), seed))


@pytest.mark.parametrize(
    "text, order",
    [
        ("bob", "bob"),
        ("bob->alice", "bob alice"),
        ("  bob\n->\talice ", "bob alice"),
        ("bob*3 -> alice", "bob bob bob alice"),
        ("bob*0 -> alice", "alice"),
        ("(bob -> alice)*2 -> carol", "bob alice bob alice carol"),
        ("((bob)*2 -> (alice -> carol*2)*1)*2", "bob bob alice carol carol " * 2),
        ("bob*(2..2)", "bob bob"),
        ("(bob/bob)*2", "bob bob"),
        ("((((bob))))", "bob"),
    ],
)
def test_a_schedule_without_chance_is_the_order_it_says(text, order):
    assert {drawn(text, seed) for seed in range(5)} == {order.strip()}


def test_a_choice_is_drawn_anew_for_every_repetition():
    orders = {drawn("(bob/alice)*5", seed) for seed in range(300)}
    assert len(orders) == 2**5
    assert {name for order in orders for name in order.split()} == {"alice", "bob"}


def test_a_star_is_any_actor_and_times_are_inclusive():
    counts = Counter(name for seed in range(300) for name in drawn("*", seed).split())
    assert counts.keys() == set(ACTORS) and min(counts.values()) > 60
    lengths = Counter(len(drawn("**(0..3)", seed).split()) for seed in range(400))
    assert lengths.keys() == {0, 1, 2, 3} and min(lengths.values()) > 60


def test_a_seed_repeats_the_order_and_no_global_generator():
    state = random.getstate()
    text = "bob -> alice -> (bob/alice/carol)*5 -> (* -> bob*(0..4))*3"
    tree = parse_schedule(text, ACTORS)
    assert draw_turns(tree, 7) == draw_turns(parse_schedule(text, ACTORS), 7)
    assert len({tuple(draw_turns(tree, seed)) for seed in range(50)}) > 40
    assert random.getstate() == state


def generated(rng: random.Random, depth: int) -> tuple[str, re.Pattern]:
    """A schedule of the grammar, and what its orders must look like, of the same random choices."""
    texts, patterns = [], []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(
            ["name", "star", "choice", "nested"] if depth else ["name", "star", "choice"]
        )
        if kind == "nested":
            text, pattern = generated(rng, depth - 1)
            text, pattern = f"({text})", f"(?:{pattern.pattern})"
        else:
            names = {
                "name": rng.sample(ACTORS, 1),
                "star": ACTORS,
                "choice": rng.sample(ACTORS, 2),
            }[kind]
            text = {"name": names[0], "star": "*", "choice": f"({'/'.join(names)})"}[kind]
            pattern = f"(?:(?:{'|'.join(names)}) )"
        low, high = sorted((rng.randint(0, 3), rng.randint(1, 3)))
        times, bounds = rng.choice(
            [("", "{1}"), (f"*{high}", f"{{{high}}}"), (f"*({low}..{high})", f"{{{low},{high}}}")]
        )
        texts.append(text + times)
        patterns.append(pattern + bounds)
    return " -> ".join(texts), re.compile("".join(patterns))


def test_orders_of_random_schedules_are_those_of_the_grammar():
    rng = random.Random(0)
    for seed in range(300):
        text, pattern = generated(rng, depth=2)
        order = [name + " " for name in drawn(text, seed).split()]
        assert pattern.fullmatch("".join(order)), (text, order)
        schedule = parse_schedule(text, ACTORS)
        assert len(order) <= num_turns(schedule)
        assert {name.strip() for name in order} <= set(speakers_of(schedule)), (text, order)


@pytest.mark.parametrize(
    "text, column, why",
    [
        ("bob -> -> alice", 7, "expected an actor's name"),
        ("bob ->", 6, "expected an actor's name"),
        ("", 0, "expected an actor's name"),
        ("bob alice", 4, "expected '->' or the end"),
        ("bob, alice", 3, "expected '->' or the end"),
        ("bob*", 4, "expected a number of repetitions, up to"),
        ("bob*alice", 4, "expected a number of repetitions"),
        ("bob*2*3", 5, "expected '->' or the end"),
        ("bob*(3..2)", 8, "expected at least 3"),
        ("bob*(3)", 6, "expected '..'"),
        ("bob*999999", 4, "expected a number of repetitions"),
        ("(bob/alice", 10, "expected ')'"),
        ("(bob -> alice)/carol", 14, "expected '->' or the end"),
        ("(bob*1/alice)", 6, "expected ')'"),
        ("(bob/*)", 5, "expected an actor's name"),
        ("bob -> alise", 7, "'alise' is not an actor; did you mean 'alice'?"),
        ("(bob/Alice)", 5, "'Alice' is not an actor; did you mean 'alice'?"),
    ],
)
def test_what_does_not_parse_is_refused_with_its_place_marked(text, column, why):
    with pytest.raises(ValueError, match=re.escape(why)) as error:
        parse_schedule(text, ACTORS)
    assert str(error.value).endswith(f"; at >>> in {text[:column]}>>>{text[column:]}")


def test_an_actor_that_is_not_there_can_be_added():
    with pytest.raises(
        ValueError, match=r"'alise' is not an .* \(--actors.alise.model PATH adds one\)"
    ):
        parse_schedule("bob -> alise", ACTORS)


@pytest.mark.parametrize(
    "text, turns", [("bob*0", 0), ("((bob*0)*9)*(0..9)", 0), ("(bob*200)*200", 40000)]
)
def test_a_schedule_has_at_least_one_turn_and_not_too_many(text, turns):
    with pytest.raises(
        ValueError, match=f"lasts at most {turns} turns; it must be 1 to {MAX_TURNS}"
    ):
        parse_schedule(text, ACTORS)


def test_what_nobody_says_is_not_repeated():
    assert drawn("bob -> (((alice*0)*9999)*9999)*9999") == "bob"  # Ends at all.
