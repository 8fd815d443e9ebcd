from __future__ import annotations

import pytest
from kit import prompts_of
from test_chat import CHATML, make_tokenizer

from rl_core.data.chat import Chat
from rl_core.data.samples import samples_from_turns
from rl_core.options.imitation import imitation_samples
from rl_core.types import Completion, Turn


def turn(new_ids, token_ids, version=0, is_fresh=False):
    logprobs = [-float(t) for t in token_ids]
    completion = Completion(
        token_ids=token_ids, logprobs=logprobs, text="", finish_reason="stop", policy_version=version
    )
    return Turn(new_ids=new_ids, is_fresh=is_fresh, completion=completion)


def test_turns_that_extend_each_other_are_one_sample():
    turns = [turn([1, 2], [3, 4], version=7, is_fresh=True), turn([5], [6], version=8)]
    (sample,) = samples_from_turns(turns, [0.5, -1.0], group_id="g")
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.rollout_logprobs.tolist() == [0, 0, -3.0, -4.0, 0, -6.0]
    assert sample.policy_versions.tolist() == [-1, -1, 7, 7, -1, 8]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0, -1.0]
    assert sample.group_id == "g"


def test_a_prompt_that_does_not_extend_the_tokens_before_begins_a_sample():
    turns = [turn([1, 2], [3, 4], is_fresh=True), turn([1, 2, 9, 4, 5], [6], is_fresh=True), turn([7], [8])]
    first, second = samples_from_turns(turns, 1.0)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [1, 2, 9, 4, 5, 6, 7, 8]
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 0, 1]
    assert prompts_of(turns) == [[1, 2], [1, 2, 9, 4, 5], [1, 2, 9, 4, 5, 6, 7]]


def test_a_turn_follows_directly_and_changes_no_turn():
    turns = [turn([1], [2], is_fresh=True), turn([], [3])]
    (sample,) = samples_from_turns(turns, 1.0)
    assert sample.token_ids.tolist() == [1, 2, 3]
    assert [t.completion.token_ids for t in turns] == [[2], [3]]
    assert turns[0].new_ids == [1]


def test_each_token_has_the_version_that_sampled_it():
    first, second = turn([1], [2, 3, 4], version=5, is_fresh=True), turn([6], [7], version=8)
    first.completion.newer_versions = [(1, 6), (2, 8)]
    (sample,) = samples_from_turns([first, second], 1.0)
    assert sample.policy_versions.tolist() == [-1, 5, 6, 8, -1, 8]


def test_nothing_sampled_leaves_no_sample():
    assert samples_from_turns([], 1.0) == []
    assert samples_from_turns([turn([1, 2], [])], 1.0) == []


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "42"}], "answer": 1},
        {"prompt": "hello", "response": "42"},
        {"prompt": [{"role": "user", "content": "hello"}], "response": [{"role": "assistant", "content": "42"}]},
    ],
)
def test_rows_to_imitate(row):
    chat = Chat(make_tokenizer(), CHATML)
    (sample,) = imitation_samples(chat, row)
    assert (
        chat.tokenizer.decode(sample.token_ids.tolist())
        == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    )
    trained = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert chat.tokenizer.decode(trained) == "42<|im_end|>"
    assert sample.advantages.tolist() == [float(m) for m in sample.loss_mask]


def test_answers_in_a_prompt_are_not_imitated():
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chat = Chat(make_tokenizer(), CHATML)
    (sample,) = imitation_samples(chat, {"prompt": prompt, "response": "d"})
    trained = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert chat.tokenizer.decode(trained) == "d<|im_end|>"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"text": "hello"}, "it needs"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [{"content": "hello"}]}, "must be a list"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "nothing to imitate"),
    ],
)
def test_rows_that_cannot_be_imitated_are_refused(row, rule):
    with pytest.raises(ValueError, match=rule) as error:
        imitation_samples(Chat(make_tokenizer(), CHATML), row)
    assert "\n" not in str(error.value)
