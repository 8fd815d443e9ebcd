from __future__ import annotations

import importlib.util
import random
import re
from functools import lru_cache
from pathlib import Path

import pytest

from rl_core.data.chat import Chat, TokenStream
from rl_core.data.samples import samples_from_turns
from rl_core.types import Completion, Turn

pytest.importorskip("trl")

TEMPLATES = sorted(
    (Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates").glob("*.jinja")
)
EOS = "<|a stop that no template writes|>"
WORDS = "the quick brown fox answers 42 because it can hello world think tool result"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
every_template = pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)


def special_strings() -> list[str]:
    text = "".join(p.read_text() for p in TEMPLATES)
    found = set(re.findall(r"<\|[a-zA-Z_/▁]+\|>|<｜[^｜]+｜>|<\|turn>|<turn\|>|<(?:start|end)_of_\w+>|</?s>", text))
    return sorted(found | {"[INST]", "[/INST]", "[gMASK]", "<sop>", "<bos>", EOS})


@lru_cache
def make_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [WORDS, "user assistant system\n\n", *special_strings()]
    tokenizer.train_from_iterator(
        text * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in special_strings()])
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=EOS)


def chat_of(path: Path) -> Chat:
    return Chat(make_tokenizer(), path.read_text())


def in_parts(messages):
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def reference_ids(chat, messages):
    """What the library itself makes of the messages."""
    try:
        reads_strings = "hello" in chat.tokenizer.apply_chat_template([user("hello")], tokenize=False)
    except Exception:
        reads_strings = False
    messages = messages if reads_strings else in_parts(messages)
    return chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def user(text):
    return {"role": "user", "content": text}


def words(rng, low=1, high=6):
    return " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(low, high)))


def accepts(chat, messages) -> bool:
    try:
        return messages[-1]["content"] in chat.render(messages)
    except ValueError:
        return False


def opening(chat, text):
    """System message where the template takes one, else the user's alone."""
    system = {"role": "system", "content": "system words " + text}
    return [system, user(text)] if accepts(chat, [system]) or takes_system(chat, system) else [user(text)]


def takes_system(chat, system) -> bool:
    try:
        return system["content"] in chat.render([system, user("hello")])
    except ValueError:
        return False


def next_role(chat, messages, text):
    tool = {"role": "tool", "content": "tool result " + text}
    return tool if accepts(chat, [*messages, tool]) else user(text)


def sampled_text(rng):
    kind = rng.randrange(5)
    answer = words(rng)
    if kind == 0:
        return f"<think>\n{words(rng)}\n</think>\n\n{answer}"
    if kind == 1:
        return f"{words(rng)}\n</think>\n\n{answer}"
    if kind == 2:
        return f" {answer} \n"
    return answer


def sample(chat, rng):
    """(token_ids, finish_reason) as an engine might sample them."""
    ids = chat.tokenizer.encode(sampled_text(rng), add_special_tokens=False)
    ending = rng.choice(["end", "end", "eos", "length"])
    if ending == "length":
        return ids[: rng.randint(1, len(ids))], "length"
    return [*ids, chat.stop_token_ids[-1 if ending == "end" else 0]], "stop"


def without_space(text):
    return "".join(text.split())


def talk(chat, rng, num_turns):
    """One conversation as rollout runs it, with every law of the stream asserted on the way."""
    messages = opening(chat, words(rng))
    stream = TokenStream(chat, messages)
    assert stream.prompt_ids == reference_ids(chat, messages)
    turns, grown, stops = [], [], []
    for _ in range(num_turns):
        before = stream.prompt_ids
        token_ids, finish_reason = sample(chat, rng)
        text = chat.decode(token_ids)
        turns.append(turn_of(before, token_ids, text, finish_reason, len(turns)))
        messages = [*messages, {"role": "assistant", "content": text}]
        new = [next_role(chat, messages, words(rng))] if rng.random() < 0.4 else [user(words(rng))]
        messages = messages + new
        grown.append(stream.append(token_ids, text, new))
        stops.append(token_ids[-1] == chat.tokenizer.eos_token_id)
        if grown[-1]:
            assert stream.prompt_ids[: len(before) + len(token_ids)] == before + token_ids
            decoded = chat.tokenizer.decode(stream.prompt_ids)
            reference = chat.tokenizer.decode(reference_ids(chat, messages))
            assert without_space(decoded.replace(EOS, "")) == without_space(reference)
        else:
            assert stream.prompt_ids == reference_ids(chat, messages)
    return turns, grown


def turn_of(prompt_ids, token_ids, text, finish_reason, version):
    logprobs = [-0.5 - i for i in range(len(token_ids))]
    completion = Completion(
        token_ids=token_ids, logprobs=logprobs, text=text, finish_reason=finish_reason, policy_version=version
    )
    return Turn(prompt_ids=prompt_ids, completion=completion)


@every_template
def test_stream_grows_or_begins_anew_and_only_sampled_tokens_are_trained(path):
    chat = chat_of(path)
    rng = random.Random(path.stem)
    for num_turns in range(1, 7):
        turns, grown = talk(chat, rng, num_turns)
        samples = samples_from_turns(turns, 1.0)
        assert len(samples) == 1 + grown[:-1].count(False)
        trained = [t for s in samples for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
        assert trained == [t for turn in turns for t in turn.completion.token_ids]
        logprobs = [x for s in samples for x, m in zip(s.rollout_logprobs, s.loss_mask, strict=True) if m]
        assert logprobs == [x for turn in turns for x in turn.completion.logprobs]


def test_every_template_was_exercised_and_both_kinds_occur():
    assert len(TEMPLATES) >= 70
    cuts = set()
    for path in TEMPLATES:
        chat = chat_of(path)
        stream = TokenStream(chat, [user("hello")])
        text = "<think>\nthe fox\n</think>\n\nthe answer"
        ids = [*chat.tokenizer.encode(text, add_special_tokens=False), chat.stop_token_ids[-1]]
        if not stream.append(ids, text, [user("because")]):
            cuts.add(path.stem)
    assert {"qwen3", "qwen3_5_think", "deepseekv3", "glm4moe"} <= cuts
    assert cuts.isdisjoint({"qwen2_5", "llama3", "llama3_1", "gemma3", "phi3", "smolvlm", "qwen3_instruct_2507"})
    assert 10 < len(cuts) < len(TEMPLATES) - 10
