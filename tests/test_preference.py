"""Preference pairs: rows, losses, learning, and a reward model that scores."""

from __future__ import annotations

import pytest
from test_chat import CHATML, make_tokenizer

from rl_core.data.chat import Chat, load_chat
from rl_core.data.samples import reply_pair, scored_pair
from rl_core.types import TrainingSample


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def trained(sample: TrainingSample) -> list[int]:
    return [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]


FORMS = [
    {"prompt": "hello", "chosen": "the fox", "rejected": "42"},
    {"prompt": [user("hello")], "chosen": [says("the fox")], "rejected": [says("42")]},
    {"messages": [user("hello")], "chosen": "the fox", "rejected": [says("42")]},
    {"chosen": [user("hello"), says("the fox")], "rejected": [user("hello"), says("42")], "prompt": "not used"},
]


@pytest.mark.parametrize("row", FORMS)
def test_every_form_of_a_pair_trains_the_two_replies_behind_one_prompt(row):
    chat = Chat(make_tokenizer(), CHATML)
    chosen, rejected = reply_pair(chat, row)
    prompt = chat.prompt_ids([user("hello")])
    end = chat.encode("<|im_end|>")
    assert chosen.token_ids == prompt + trained(chosen) and rejected.token_ids == prompt + trained(rejected)
    assert trained(chosen) == chat.encode("the fox", continues=True) + end
    assert trained(rejected) == chat.encode("42", continues=True) + end


@pytest.mark.parametrize("row", FORMS)
def test_a_scored_pair_is_the_template_s_text_and_one_token_for_the_score(row):
    chat = Chat(make_tokenizer(), CHATML)
    chosen, rejected = scored_pair(chat, row)
    for sample, text in ((chosen, "the fox"), (rejected, "42")):
        rendered = chat.tokenizer.apply_chat_template([user("hello"), says(text)], tokenize=False)
        assert sample.token_ids[:-1] == chat.tokenizer.encode(rendered, add_special_tokens=False)
        assert sample.loss_mask[-1] == 1
    shared = chosen.loss_mask.index(1)
    assert rejected.loss_mask.index(1) == shared and chosen.token_ids[:shared] == rejected.token_ids[:shared]
    assert chosen.token_ids[shared] != rejected.token_ids[shared]


def test_earlier_turns_of_a_conversation_are_context_only():
    chat = Chat(make_tokenizer(), CHATML)
    talk = [user("hello"), says("world"), user("think")]
    chosen, rejected = reply_pair(chat, {"chosen": [*talk, says("yes")], "rejected": [*talk, says("no")]})
    assert chat.decode(trained(chosen)) == "yes" and chat.decode(trained(rejected)) == "no"


def test_a_margin_is_carried_by_the_chosen_side():
    chat = Chat(make_tokenizer(), CHATML)
    for pair in (reply_pair, scored_pair):
        chosen, rejected = pair(chat, FORMS[0] | {"margin": 2})
        assert [a for a in chosen.advantages if a] == [2.0] * sum(chosen.loss_mask)
        assert not any(rejected.advantages)


@pytest.mark.parametrize(
    "row, error",
    [
        ({"prompt": "x", "choosen": "a", "rejected": "b"}, "needs a column 'chosen'; did you mean 'choosen'"),
        ({"promt": "x", "chosen": "a", "rejected": "b"}, "'messages' or 'prompt' that they reply to; did you mean"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "are equal, 'a'"),
        ({"prompt": "x", "chosen": "a", "rejected": " a "}, "have the same tokens"),
        ({"prompt": "x", "chosen": "a", "rejected": " "}, "column 'rejected' has an empty reply"),
        ({"chosen": [user("x"), says("a")], "rejected": [user("x")]}, "column 'rejected' has an empty reply"),
        ({"chosen": [user("x"), says("a")], "rejected": [user("y"), says("b")]}, "begins as the other one does"),
        ({"chosen": [user("x"), says("a")], "rejected": "b"}, "begins as the other one does"),
        ({"prompt": "x", "chosen": [{"content": "a"}], "rejected": "b"}, "column 'chosen': must be a list"),
        ({"prompt": "x", "chosen": [], "rejected": "b"}, "column 'chosen': must be a list"),
        ({"prompt": "x", "chosen": "a", "rejected": "b", "margin": "big"}, "'margin' holds 'big': it must be a number"),
    ],
)
def test_a_pair_that_is_none_is_refused(row, error, tiny_model):
    # This template trims, so that replies may differ in spaces alone.
    chat = Chat(make_tokenizer(), CHATML.replace("m.content", "m.content | trim"))
    for pair in (reply_pair, scored_pair):
        with pytest.raises(ValueError, match=error):
            pair(chat, row)


def test_a_template_that_rewrites_a_long_reply_is_refused():
    forgetful = "{% for m in messages[-2:] %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}" + CHATML[-76:]
    chat = Chat(make_tokenizer(), forgetful)
    reply = [says("a"), user("b"), says("c")]
    with pytest.raises(ValueError, match="rewrites earlier turns of column 'chosen'"):
        reply_pair(chat, {"prompt": "x", "chosen": reply, "rejected": "d"})


def test_a_conversation_that_ends_in_the_padding_token_is_refused(tiny_model):
    chat = load_chat(str(tiny_model))
    scored_pair(chat, FORMS[0])
    chat.tokenizer.pad_token = chat.tokenizer.eos_token
    with pytest.raises(ValueError, match="ends in the padding token '<|end|>'".replace("|", r"\|")):
        scored_pair(chat, FORMS[0])
