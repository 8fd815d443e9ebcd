from __future__ import annotations

import pytest
from kit import prompts_of
from test_chat import CHATML, make_tokenizer

from rl_core.data.chat import Chat
from rl_core.data.preference_pairs import reply_pair, scored_pair
from rl_core.data.samples import samples_from_turns
from rl_core.data.sft_samples import sft_samples
from rl_core.types import Completion, Turn


def turn(new_ids, token_ids, version=0, is_fresh=False, newer=()):
    message = {
        "token_ids": token_ids,
        "logprobs": [-float(t) for t in token_ids],
        "policy_version": version,
    }
    completion = Completion(**message, text="", finish_reason="stop", newer_versions=list(newer))
    return Turn(new_ids=new_ids, is_fresh=is_fresh, completion=completion)


def test_turns_that_extend_each_other_are_one_sample():
    turns = [
        turn([1, 2], [3, 4], version=7, is_fresh=True),
        turn([], [5]),
        turn([6], [7], version=8),
    ]
    (sample,) = samples_from_turns(turns, [0.5, 2.0, -1.0], group_id="g")
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert sample.rollout_logprobs.tolist() == [0, 0, -3.0, -4.0, -5.0, 0, -7.0]
    assert sample.policy_versions.tolist() == [-1, -1, 7, 7, 0, -1, 8]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 2.0, 0, -1.0]
    assert sample.group_id == "g"
    assert [(t.new_ids, t.completion.token_ids) for t in turns] == [
        ([1, 2], [3, 4]),
        ([], [5]),
        ([6], [7]),
    ]


def test_a_prompt_that_does_not_extend_the_tokens_before_begins_a_sample():
    turns = [
        turn([1, 2], [3, 4], is_fresh=True),
        turn([1, 2, 9, 4, 5], [6], is_fresh=True),
        turn([7], [8]),
    ]
    first, second = samples_from_turns(turns, 1.0)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [1, 2, 9, 4, 5, 6, 7, 8]
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 0, 1]
    assert prompts_of(turns) == [[1, 2], [1, 2, 9, 4, 5], [1, 2, 9, 4, 5, 6, 7]]


def test_each_token_has_the_version_that_sampled_it():
    turns = [
        turn([1], [2, 3, 4], version=5, is_fresh=True, newer=[(1, 6), (2, 8)]),
        turn([6], [7], version=8),
    ]
    (sample,) = samples_from_turns(turns, 1.0)
    assert sample.policy_versions.tolist() == [-1, 5, 6, 8, -1, 8]


def test_nothing_sampled_leaves_no_sample():
    assert samples_from_turns([], 1.0) == samples_from_turns([turn([1, 2], [])], 1.0) == []


def message(role, content):
    return {"role": role, "content": content}


TALK = [message("user", "hello"), message("assistant", "the fox"), message("user", "think")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [message("user", "think"), message("assistant", "42")], "answer": 1},
        {"prompt": "think", "response": "42"},
        {"prompt": "think", "completion": "42"},
        {"prompt": [message("user", "think")], "completion": [message("assistant", "42")]},
        {"instruction": "think", "input": "", "output": "42"},
        {"conversations": [{"from": "human", "value": "think"}, {"from": "gpt", "value": "42"}]},
        {"question": "think", "answer": "42"},
        {"problem": "think", "answer": "7", "solution": "42"},
        {"question": "think", "answer": "7", "response": "42"},
        # Answers in a prompt are not trained.
        {"prompt": TALK, "response": [message("assistant", "42")]},
    ],
)
def test_rows_of_sft(row):
    chat = Chat(make_tokenizer(), CHATML)
    (sample,) = sft_samples(chat, row)
    end = "<|im_start|>user\nthink<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    assert chat.tokenizer.decode(sample.token_ids.tolist()).endswith(end)
    assert chat.tokenizer.decode(sample.token_ids[sample.loss_mask].tolist()) == "42<|im_end|>"
    assert sample.advantages.tolist() == [float(m) for m in sample.loss_mask]


BEGUN = [message("user", "think"), message("assistant", "4") | {"prefix": True}]
PARTIAL = [BEGUN[0], message("assistant", "4") | {"partial": True}]
ASKED = {"prompt": [BEGUN[0], message("assistant", "4")], "continue_final_message": True}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*BEGUN, message("assistant", "2")]},
        {"prompt": BEGUN, "completion": [message("assistant", "2")]},
        {"prompt": BEGUN, "response": "2"},
        {"prompt": [*TALK, *BEGUN], "response": "2"},
        {"messages": [*BEGUN, message("assistant", "2"), *BEGUN, message("assistant", "2")]},
        {"prompt": BEGUN, "chosen": "2", "rejected": "7"},
        {"chosen": [*BEGUN, message("assistant", "2")], "rejected": [*BEGUN, message("assistant", "7")]},
        {"messages": [*PARTIAL, message("assistant", "2") | {"partial": False}]},
        {"prompt": PARTIAL, "response": "2"},
        ASKED | {"response": "2"},
        ASKED | {"chosen": "2", "rejected": "7"},
    ],
)  # fmt: skip
def test_a_prefix_is_context_of_the_reply_that_continues_it(row):
    chat = Chat(make_tokenizer(), CHATML)
    is_pair = "rejected" in row
    sample = reply_pair(chat, row)[0] if is_pair else sft_samples(chat, row)[0]
    text, trained = (
        chat.tokenizer.decode(ids) for ids in (sample.token_ids, sample.token_ids[sample.loss_mask])
    )
    end = "<|im_start|>user\nthink<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    assert text.endswith(end)
    assert trained == "2<|im_end|>" * text.count("42")
    if is_pair:  # The conversation's last token is followed by that of the score.
        scored = scored_pair(chat, row)[0].token_ids[:-1]
        assert chat.tokenizer.decode(scored).endswith(end + "\n")


@pytest.mark.parametrize(
    "row, rule",
    [
        ({"messages": BEGUN}, "message 2 is to be continued, .*, and no reply continues it"),
        ({"messages": PARTIAL}, "message 2 is to be continued, by its prefix or partial"),
        ({"messages": TALK[:2], "continue_final_message": True}, "message 2 is to be continued"),
        ({"text": "hello"}, "needs one of the columns .*; has text; .* prompt=NAME"),
        ({"promt": "hello", "response": "1"}, "did you mean 'promt'. Read it by .* prompt=promt"),
        (
            {"prompt": "hello", "respone": "1"},
            "'response' .* 'prompt'; did you mean 'respone'. .* response=respone",
        ),
        (
            {"question": "hello", "reply": "42"},
            "'response' .* 'question'; it has question, reply; .* response=NAME",
        ),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [{"content": "hello"}]}, "must be a list"),
        ({"messages": TALK[:1]}, "nothing to train"),
    ],
)
def test_rows_with_nothing_to_train_are_refused(row, rule):
    with pytest.raises(ValueError, match=rule) as error:
        sft_samples(Chat(make_tokenizer(), CHATML), row, 1.0, 0.5)
    assert "\n" not in str(error.value)


def test_turns_that_branches_share_are_trained_once():
    shared = [turn([1, 2], [3, 4], is_fresh=True), turn([5], [6])]
    shared[0].name, shared[1].name = "a#0", "a#1"
    left, right = [*shared, turn([7], [8])], [*shared, turn([9], [10, 11])]
    left[2].name, right[2].name = "a#2", "a.0#2"
    trained = set()
    (first,) = samples_from_turns(left, 0.5, trained=trained)
    (second,) = samples_from_turns(right, 2.0, trained=trained)
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert second.loss_mask.tolist() == [0] * 7 + [1, 1]
    assert second.advantages.tolist() == [0.0] * 7 + [2.0, 2.0]
    assert second.policy_versions.tolist() == [-1] * 7 + [0, 0]
    assert samples_from_turns(left, 1.0, trained=trained) == []
    assert trained == {"a#0", "a#1", "a#2", "a.0#2"}
