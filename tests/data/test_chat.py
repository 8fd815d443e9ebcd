from __future__ import annotations

import asyncio
import json
import random
import re
from functools import lru_cache
from pathlib import Path

import pytest
from kit import prompts_of

from rl_core.config import Config
from rl_core.data.chat import LONG_CHARS, Chat
from rl_core.data.chat_loading import load_chat
from rl_core.data.chat_threads import prepare
from rl_core.data.samples import samples_from_turns
from rl_core.data.sft_samples import sft_samples, sft_turns, shared_length
from rl_core.data.task_rows import TaskSource
from rl_core.data.template_variables import check_variables
from rl_core.data.token_marks import unmarked
from rl_core.data.token_stream import TokenStream
from rl_core.data.tool_calls import ToolCalls
from rl_core.data.warnings.column_use import column_use
from rl_core.engines.scripted import plain_chat
from rl_core.tools.tiny_model import character_tokenizer
from rl_core.types import Completion

# TRL's, so that these tests need no TRL: templates/README.md.
TEMPLATES = sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))
TAKE_ONLY_PARTS = {
    p.read_text() for p in TEMPLATES if p.stem.startswith(("idefics3", "llava_next", "smolvlm"))
}
EOS = "<|a stop that no template writes|>"
WORDS = "the quick brown fox answers 42 because it can hello world think tool result"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# They drop the thoughts of earlier turns, also empty ones.
DROP_THOUGHTS = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
every_template = pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)


def special_strings() -> list[str]:
    text = "".join(p.read_text() for p in TEMPLATES)
    kinds = set(
        re.findall(
            r"<\|[a-zA-Z_/▁]+\|>|<｜[^｜]+｜>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|</?s>", text
        )
    )
    return sorted(kinds | {"<s>", "[INST]", "[/INST]", "[gMASK]", "<sop>", "<bos>", EOS})


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
        text * 3,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in special_strings()])
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=EOS)


def chat_of(path: Path) -> Chat:
    return Chat(make_tokenizer(), path.read_text(), tool_reader=ToolCalls)


def chat_named(name: str) -> Chat:
    return chat_of(next(p for p in TEMPLATES if p.stem == name))


def in_parts(messages):
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def reference_ids(chat, messages):
    """Token ids of the messages by the library itself."""
    messages = in_parts(messages) if chat.chat_template in TAKE_ONLY_PARTS else messages
    options = {
        "chat_template": chat.chat_template,
        "add_generation_prompt": True,
        "return_dict": False,
        **chat.template.variables,
    }
    return chat.tokenizer.apply_chat_template(messages, **options)


def user(text):
    return {"role": "user", "content": text}


def words(rng, low=1, high=6):
    return " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(low, high)))


def reads(chat, messages, text) -> bool:
    try:
        return text in chat.render(messages)
    except ValueError:
        return False


def opening(chat, text):
    """A system message where the template takes one, and the user's."""
    system = {"role": "system", "content": "system words"}
    takes_system = reads(chat, [system, user("hello")], "system words")
    return [{**system, "content": text}, user(text)] if takes_system else [user(text)]


def next_message(chat, messages, text):
    """A tool's result where the template takes one from a turn without tool calls, else the user's
    words."""
    takes_tools = reads(chat, [*messages, {"role": "tool", "content": "tool words"}], "tool words")
    return {"role": "tool", "content": text} if takes_tools else user(text)


def sampled_text(rng):
    kind, answer = rng.randrange(5), words(rng)
    forms = [
        f"<think>\n{words(rng)}\n</think>\n\n{answer}",
        f"{words(rng)}\n</think>\n\n{answer}",
        f" {answer} \n",
    ]
    return [*forms, answer, answer][kind]


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
    turns, grown = [], []
    for _ in range(num_turns):
        before = stream.prompt_ids
        token_ids, finish_reason = sample(chat, rng)
        text = chat.decode(token_ids)
        turns.append(turn_of(stream, token_ids, text, finish_reason, len(turns)))
        messages = [*messages, {"role": "assistant", "content": text}]
        new = (
            [next_message(chat, messages, words(rng))] if rng.random() < 0.4 else [user(words(rng))]
        )
        messages = messages + new
        grown.append(stream.append(token_ids, text, new))
        if grown[-1]:
            assert stream.prompt_ids[: len(before) + len(token_ids)] == before + token_ids
            decoded = chat.tokenizer.decode(stream.prompt_ids)
            reference = chat.tokenizer.decode(reference_ids(chat, stream.messages))
            assert without_space(decoded.replace(EOS, "")) == without_space(reference)
        else:
            assert stream.prompt_ids == reference_ids(chat, stream.messages)
    return turns, grown


def turn_of(stream, token_ids, text, finish_reason, version):
    message = {
        "token_ids": token_ids,
        "logprobs": [-0.5 - i for i in range(len(token_ids))],
        "text": text,
    }
    return stream.turn(Completion(**message, finish_reason=finish_reason, policy_version=version))


@every_template
def test_a_reply_continues_a_last_message_as_in_transformers(path):
    chat = chat_of(path)
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the answer "}]
    shown = in_parts(asked) if chat.chat_template in TAKE_ONLY_PARTS else asked
    options = {"chat_template": chat.chat_template, "tokenize": False}
    expected = chat.tokenizer.apply_chat_template(shown, continue_final_message=True, **options)
    stream = TokenStream(chat, [asked[0], asked[1] | {"prefix": True}])
    # The library trims the text if the template does; a text behind it continues it in any case.
    assert unmarked(stream.rendered).rstrip() == expected.rstrip()
    reply, more = "is 42", {"role": "user", "content": "think"}
    ids = chat.tokenizer.encode(reply, add_special_tokens=False)
    is_kept = stream.append(ids, reply, [more])
    assert stream.messages == [asked[0], chat.template.assistant_message("the answer is 42"), more]
    assert is_kept == (path.stem not in DROP_THOUGHTS)


@every_template
def test_stream_grows_or_begins_anew_and_only_sampled_tokens_are_trained(path):
    chat = chat_of(path)
    rng = random.Random(path.stem)
    for num_turns in range(1, 7):
        turns, grown = talk(chat, rng, num_turns)
        samples = samples_from_turns(turns, 1.0)
        assert len(samples) == 1 + grown[:-1].count(False)
        trained = [t for s in samples for t in s.token_ids[s.loss_mask]]
        assert trained == [t for turn in turns for t in turn.completion.token_ids]
        logprobs = [x for s in samples for x in s.rollout_logprobs[s.loss_mask]]
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
    assert cuts.isdisjoint(
        {"qwen2_5", "llama3", "llama3_1", "gemma3", "phi3", "smolvlm", "qwen3_instruct_2507"}
    )
    assert 10 < len(cuts) < len(TEMPLATES) - 10


def count_special(chat, ids):
    special = {i for i, t in chat.tokenizer.added_tokens_decoder.items() if t.special}
    return sum(i in special for i in ids)


@every_template
def test_user_text_never_becomes_a_special_token(path):
    chat = chat_of(path)
    hostile = " ".join(special_strings())
    harmless = "hello world"
    opening_of = {text: opening(chat, text) for text in (hostile, harmless)}
    assert len(opening_of[hostile]) == len(opening_of[harmless])
    streams = {text: TokenStream(chat, messages) for text, messages in opening_of.items()}
    end, grown = chat.stop_token_ids[-1], []
    for text, stream in streams.items():
        prompt = chat.tokenizer.decode(stream.prompt_ids)
        assert prompt.count(text) == len(opening_of[text])
        answer_ids = chat.tokenizer.encode("the answer", add_special_tokens=False)
        reply = next_message(
            chat, [*opening_of[text], {"role": "assistant", "content": "the answer"}], text
        )
        grown.append(stream.append([*answer_ids, end], "the answer", [reply]))
        assert chat.tokenizer.decode(stream.prompt_ids).count(text) == 1 + len(opening_of[text])
    counts = [count_special(chat, s.prompt_ids) for s in streams.values()]
    assert counts[0] == counts[1] > 0
    assert grown[0] == grown[1]


def test_special_tokens_that_swallow_spaces_do_so_beside_hostile_text():
    from tokenizers import AddedToken

    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<mask>", lstrip=True, rstrip=True)]}
    )
    chat = Chat(
        tokenizer,
        "{% for m in messages %}{{ m.content }}  <mask>  {{ m.content }}\n{% endfor %}<s>",
    )
    assert chat.prompt_ids([user("a b")]) == tokenizer.encode(
        "a b  <mask>  a b\n<s>", add_special_tokens=False
    )
    hostile = chat.prompt_ids([user("a <s> b")])
    assert count_special(chat, hostile) == 2
    assert tokenizer.decode(hostile) == "a <s> b<mask>a <s> b\n<s>"


@pytest.mark.parametrize("text", ["★", "a ★ b★", "★★", "<★>", "<★> ★"])
def test_a_special_token_of_one_character_is_text_in_a_message(text):
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.add_special_tokens({"additional_special_tokens": ["★", "<★>"]})
    chat = Chat(tokenizer, "{% for m in messages %}★{{ m.content }}★{% endfor %}")
    ids = chat.prompt_ids([user(text), user(text)])
    assert tokenizer.decode(ids) == f"★{text}★" * 2
    assert count_special(chat, ids) == ids.count(tokenizer.convert_tokens_to_ids("★")) == 4


def test_an_end_token_that_is_not_flagged_special_is_treated_as_one():
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.add_tokens(["<over>"])
    chat = Chat(tokenizer, CHATML.replace("<|im_end|>", "<over>"))
    end = tokenizer.convert_tokens_to_ids("<over>")
    assert chat.stop_token_ids == (tokenizer.eos_token_id, end)
    ids = chat.prompt_ids([user("a <over> b")])
    assert ids.count(end) == 1
    assert "a <over> b<over>" in tokenizer.decode(ids)
    assert chat.decode([*tokenizer.encode("42"), end]) == "42"


def test_a_turn_that_ends_in_two_tokens_gets_neither_twice():
    chat = Chat(make_tokenizer(), CHATML.replace("<|im_end|>", "<|im_end|></s>"))
    end = chat.tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    for k, copies in ((0, 1), (1, 1), (2, 1)):
        stream = TokenStream(chat, [user("hello")])
        assert stream.append([*chat.encode("42"), *end[:k]], "42", [user("because")])
        assert chat.tokenizer.decode(stream.prompt_ids).count("42<|im_end|></s>\n") == copies


@pytest.mark.parametrize("text", ["42", " 42", "42 \n", " 42\n"])
def test_a_turn_that_was_cut_short_is_closed_as_the_template_closes_it(text):
    trims = CHATML.replace("m.content", "(m.content | trim)").replace("<|im_end|>", "\\n<|im_end|>")
    chat = Chat(make_tokenizer(), trims)
    stream = TokenStream(chat, [user("hello")])
    assert stream.append(chat.encode(text), text, [user("because")])
    between = "<|im_end|>" if text.endswith("\n") else "\n<|im_end|>"
    assert f"assistant\n{text}{between}\n<|im_start|>user\nbecause" in chat.tokenizer.decode(
        stream.prompt_ids
    )


def test_thinking_is_kept_apart_where_the_template_reads_it_so():
    chat = chat_named("qwen3_8")
    stream = TokenStream(chat, [user("hello")])
    text = "the fox\n</think>\n\nthe answer"
    assert stream.append([*chat.encode(text), chat.end_token_id], text, [user("because")])
    assert stream.messages[1] == {
        "role": "assistant",
        "content": "the answer",
        "reasoning_content": "the fox",
    }


def test_sft_does_not_open_thinking_twice():
    chat = chat_named("deepseekv3")
    (turn,) = sft_turns(chat, [user("hello"), answer("<think>\nthe fox\n</think>\n\n42")])
    assert chat.tokenizer.decode(turn.new_ids).endswith("<think>\n")
    assert turn.completion.text == "the fox\n</think>\n\n42"


def sentencepiece_like_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    text = [WORDS, "[INST] </s> <s>", "user assistant\n\n", "".join(map(chr, range(32, 127)))]
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=[f"<0x{i:02X}>" for i in range(256)]
    )
    tokenizer.train_from_iterator(text * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_no_space_creeps_in_where_a_tokenizer_puts_one_before_a_text():
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>{% "
        "else %}"
        "[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    )
    chat = Chat(sentencepiece_like_tokenizer(), template)
    for question in ("hello", "the <s> fox"):
        stream = TokenStream(chat, [user(question)])
        ids = chat.encode("the answer", continues=True)
        assert stream.append([*ids, chat.end_token_id], "the answer", [user(question)])
        expected = f"<s>[INST]{question}[/INST]the answer</s>[INST]{question}[/INST]"
        assert chat.tokenizer.decode(stream.prompt_ids) == expected
        assert count_special(chat, stream.prompt_ids) == 2
    assert stream.prompt_ids.count(chat.end_token_id) == 1


@pytest.mark.parametrize("make", [make_tokenizer, sentencepiece_like_tokenizer])
@pytest.mark.parametrize("text", ["the quick fox", "é🙂 日本</s> x", "\n\n user\u0301"])
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(make, text):
    chat = Chat(make(), "{{ messages[0].content }}")
    ids = chat.encode(text, continues=True)
    assert b"".join(chat.facts.token_bytes(token) for token in ids) == text.encode()


def composing_tokenizer():
    """Writes a letter and its marks as one letter first, in words of eight such letters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["ǖ" * 8] * 3, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


@pytest.mark.parametrize(
    "make", [make_tokenizer, sentencepiece_like_tokenizer, composing_tokenizer]
)
def test_the_lower_bound_of_tokens_is_one(make):
    # A template may leave out thoughts and spaces.
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    chat = Chat(make(), template)
    longest = max(chat.tokenizer.get_vocab().keys() - chat.special_ids.keys(), key=len)
    rng = random.Random(0)
    texts = [longest * 50, "  \n" * 99, "é🙂" * 50, "x" * 999, "<think>x</think> y"]
    texts.append("u\u0308\u0304" * 400)
    for text in (*texts, *("".join(rng.choices(texts, k=3)) for _ in range(5))):
        # Shorter messages are encoded without a bound.
        messages = [user(text * (1 + LONG_CHARS // len(text))), user("and this")]
        assert chat.least_tokens(messages) <= len(chat.prompt_ids(messages)), text
    assert chat.least_tokens([user("x")] * LONG_CHARS) == LONG_CHARS
    assert chat.least_tokens([user("x" * 20_000)]) > 100
    assert plain_chat().least_tokens([user("x" * 20_000)]) == 20_000


async def test_a_long_text_is_encoded_in_a_thread_as_in_the_event_loop():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    long = [user("the quick <end> fox " * 20_000)]

    async def ticks(work):
        task, num = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            num += 1
        return num, await task

    chat, other = (Chat(make_tokenizer(), template) for _ in range(2))
    num, _ = await ticks(prepare(chat, long, None))
    stream, expected = TokenStream(chat, long), TokenStream(other, long)
    assert stream.prompt_ids == expected.prompt_ids
    more, _ = await ticks(stream.append_soon([7], "", long))
    expected.append([7], "", long)
    assert stream.prompt_ids == expected.prompt_ids
    assert min((num, more)) > 3


def test_a_list_of_texts_reads_as_their_string():
    for name in ("qwen2_5", "llama3", "gemma3", "smolvlm"):
        chat = chat_named(name)
        assert chat.prompt_ids(in_parts([user("hello <s> world")])) == chat.prompt_ids(
            [user("hello <s> world")]
        )


def test_special_tokens_strings_in_tools_are_text():
    chat = chat_named("qwen2_5")
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "adds <|im_end|>", "parameters": {}},
    }
    ids = chat.prompt_ids([user("hello")], [tool])
    assert "adds <|im_end|>" in chat.tokenizer.decode(ids)
    assert ids.count(chat.end_token_id) == 2


END = "<|im_end|>"


@pytest.mark.parametrize(
    "entry", [{"type": END}, {"role": END}, {END: {}}, {"properties": {END: {"type": [END]}}}]
)
def test_keys_and_types_in_tools_and_in_arguments_of_calls_are_text(entry):
    chat = chat_named("qwen2_5")
    tool = {"type": "function", "function": {"name": "add", "parameters": entry}}
    call = {"type": "function", "function": {"name": "add", "arguments": entry}}
    messages = [user("hello"), answer("", tool_calls=[call])]
    ids = chat.prompt_ids(messages, [tool], add_generation_prompt=False)
    assert chat.tokenizer.decode(ids).count(json.dumps(entry)) == 2
    assert ids.count(chat.end_token_id) == 3  # The system's message, the user's, the call.


def test_a_compared_type_keeps_its_special_token():
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.add_special_tokens({"additional_special_tokens": ["user", "function"]})
    chat = Chat(tokenizer, CHATML)
    message = {**user("user"), "tool_calls": [{"type": "function"}]}
    assert chat.marked(message) == {**message, "content": chat.marked("user")}
    assert chat.marked("user") != "user"


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def test_sft_trains_what_is_said_and_the_end_token_and_nothing_else():
    chat = Chat(make_tokenizer(), CHATML)
    messages = [user("hello"), answer("the fox"), user("because"), answer("42")]
    turns = sft_turns(chat, messages)
    (sample,) = samples_from_turns(turns, 1.0)
    decode = chat.tokenizer.decode
    assert decode(sample.token_ids[sample.loss_mask].tolist()) == "the fox<|im_end|>42<|im_end|>"
    rendered = chat.render(messages, add_generation_prompt=False)
    assert decode(sample.token_ids.tolist()) == rendered.removesuffix("\n")
    assert sample.token_ids.tolist() == chat.encode(rendered)[: len(sample.token_ids)]


def test_sft_leaves_out_messages_that_are_only_context():
    chat = Chat(make_tokenizer(), CHATML)
    turns = sft_turns(
        chat, [user("hello"), answer("the fox", train=False), user("because"), answer("42")]
    )
    assert [t.completion.text for t in turns] == ["42"]
    assert "the fox<|im_end|>\n" in chat.tokenizer.decode(turns[0].new_ids)


@every_template
def test_sft_turns_are_prompted_as_an_engine_would_be(path):
    chat = chat_of(path)
    thought = "<think>\nthe fox\n</think>\n\nthe answer"
    opens_thoughts = path.stem.startswith(
        "deepseek"
    )  # The template opens thoughts and does not close them.
    for reply_text in ("the answer", thought):
        if reply_text == thought and "nothink" in path.stem:
            with pytest.raises(ValueError, match="message 2 has thoughts, and the generation"):
                sft_turns(chat, [user("hello"), answer(thought)])
            chat = chat.with_variables({"enable_thinking": True})  # The fix that the error names.
        if reply_text == "the answer" and opens_thoughts:
            with pytest.raises(ValueError, match="message 2 has no thoughts, but the generation"):
                sft_turns(chat, [user("hello"), answer(reply_text)])
            reply_text = "<think>\n\n</think>\n\nthe answer"  # The fix that the error names.
        messages = [
            user("hello"),
            answer(reply_text),
            user("because"),
            answer(reply_text),
            user("hello"),
            answer(reply_text),
        ]
        turns = sft_turns(chat, messages)
        assert len(turns) == 3
        for i, (turn, seen) in enumerate(zip(turns, prompts_of(turns), strict=True)):
            prompt = chat.tokenizer.decode(seen)
            reference = chat.tokenizer.decode(reference_ids(chat, messages[: 2 * i + 1]))
            assert without_space(prompt) == without_space(reference)
            ids = turn.completion.token_ids
            if ids[-1] in chat.stop_token_ids:
                ids = ids[:-1]
            else:  # gpt-oss ends a reply in the middle as it ends an analysis
                assert path.stem.startswith("gptoss") and i < 2
            text = chat.tokenizer.decode(ids)
            assert text.endswith("the answer")
            assert count_special(chat, ids) == 0 or path.stem.startswith(("gptoss", "muse"))


CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris"}},
}
RESULT = {"role": "tool", "name": "weather", "content": "42", "tool_call_id": "call00000"}


def test_sft_renders_tool_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 42}}}
    turns = sft_turns(chat_named("qwen2_5"), [user("hello"), answer("", tool_calls=[call])])
    assert '"name": "add", "arguments": {"x": 42}' in turns[0].completion.text


def test_stop_tokens_are_the_tokenizers_and_the_templates():
    ends = {
        "qwen3": ["<|im_end|>"],
        "llama3": ["<|eot_id|>"],
        "gemma3": ["<end_of_turn>"],
        "phi3": ["<|end|>"],
        "lfm2_v2": ["<|im_end|>"],
        "cohere2": ["<|END_RESPONSE|>"],
        # The end of a call, and of a reply.
        "glm4moe": ["<|observation|>", "<|user|>"],
        "gemma4": ["<|tool_response>", "<turn|>"],
        # Not <|end|>, which also ends the analysis.
        "gptoss": ["<|call|>", "<|return|>"],
    }
    for name, tokens in ends.items():
        chat = chat_named(name)
        assert chat.tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids)) == [EOS, *tokens]


def test_load_chat_reads_a_template_from_a_file(tmp_path):
    make_tokenizer.__wrapped__().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no chat template.*--actors\.NAME\.chat_template FILE"):
        load_chat(str(tmp_path))
    (tmp_path / "mine.jinja").write_text(CHATML)
    chat = load_chat(str(tmp_path), str(tmp_path / "mine.jinja"))
    assert chat.decode(chat.prompt_ids([user("hello")])) == "user\nhello\nassistant\n"
    with pytest.raises(ValueError, match=r"missing\.jinja: no such file"):
        load_chat(str(tmp_path), str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize("family", ["qwen2", "gemma", "cohere", "gpt2"])
def test_a_folder_without_a_tokenizer_is_refused(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ValueError, match=rf"model {tmp_path} has no tokenizer.*: copy the"):
        load_chat(str(tmp_path), CHATML)


def test_what_a_template_refuses_is_an_error_of_one_line():
    chat = chat_named("gemma3")
    with pytest.raises(ValueError, match=r"roles \[user user\].*must alternate") as error:
        chat.prompt_ids([user("hello"), user("hello")])
    assert "\n" not in str(error.value)


# Tools

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER},
    }
]
MISTRAL = (  # As strict as Mistral's templates.
    "{%- set ns = namespace(n=0) %}{{- '<s>' }}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') "
    "}}{%- endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endif %}"
    "{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids "
    "have 9') }}{%- endif %}"
    "{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{{- c.function | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- "
    "']</s>' }}"
    "{%- else %}{{- m.content + '</s>' }}{%- endif %}{%- endfor %}"
)
APERTUS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|tool_output_start|>' + m.content + '<|tool_output_end|>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant_start|>' + m.content }}"
    "{%- if m.tool_calls %}{{- '<|tools_prefix|>[' }}{%- for c in m.tool_calls %}"
    "{{- '{\"' + c.function.name + '\": ' + (c.function.arguments | tojson) + '}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']<|tools_suffix|>' }}"
    "{%- elif loop.last or loop.nextitem.role != 'tool' %}{{- '<|assistant_end|>' }}{%- endif %}"
    "{%- else %}{{- '<|user_start|>' + m.content + '<|user_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant_start|>' }}{%- endif %}"
)
HERMES = 'Wait.\n<tool_call>\n{{"arguments":  {{"city": "{}"}},"name": "weather"}}\n</tool_call>'
MINIMAX = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>ai\n' + m.content "
    "}}{%- if m.tool_calls %}"
    "{{- '\n<minimax:tool_call>\n' }}{%- for c in m.tool_calls %}{{- '<invoke name=\"' + "
    "c.function.name + '\">\n' }}"
    "{%- for k, v in c.function.arguments.items() %}{{- '<parameter name=\"' + k + '\">' }}"
    "{{- v | tojson if v is not string else v }}{{- '</parameter>\n' }}{%- endfor %}{{- "
    "'</invoke>\n' }}{%- endfor %}"
    "{{- '</minimax:tool_call>' }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- "
    "endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>ai\n' }}{%- endif %}"
)
CODER = "<tool_call>\n<function=weather><parameter=city>{}</parameter></function>\n</tool_call>"
INVOKE = (
    '<minimax:tool_call><invoke name="weather"><parameter '
    'name="city">{}</parameter></invoke></minimax:tool_call>'
)
GEMMA = '<|tool_call>call:weather{{city:<|"|>{}<|"|>}}<tool_call|>'
KEYED = '<|tools_prefix|>[{{"weather":  {{"city": "{}"}}}}]'
PYTHON = '<|tool_call_start|>[weather(city = "{}")]<|tool_call_end|>'
# Replies in other words than the template's, with their ends, and the content of the message next
# to the calls.
SAID = {
    "qwen2_5": (HERMES, "<|im_end|>", "Wait."),
    "qwen3": ("<think>\nso\n</think>\n\n" + HERMES, "<|im_end|>", "<think>\nso\n</think>\n\nWait."),
    "qwen3_instruct_2507": (HERMES, "<|im_end|>", "Wait."),
    "llama3_1": ('{{"name":"weather",  "parameters":{{"city":"{}"}}}}', "<|eot_id|>", ""),
    "gptoss": (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.weather "
        '<|constrain|>json<|message|>{{"city":"{}"}}<|call|>',
        "",
        "so",
    ),
    "mistral": ('[TOOL_CALLS][{{"arguments": {{"city": "{}"}},  "name": "weather"}}]', "</s>", ""),
    "qwen3_5_nothink": ("Wait." + CODER, "<|im_end|>", "Wait."),
    "glm4moe": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>{}</arg_value></tool_call>",
        "",
        "",
    ),
    "minimax": ("Wait." + INVOKE, "<|im_end|>", "Wait."),
    "apertus": ("Wait." + KEYED, "<|tools_suffix|>", "Wait."),
    "gemma4": (GEMMA, "<|tool_response>", ""),
    "lfm2": ("Wait." + PYTHON, "<|im_end|>", "Wait."),
    "lfm2_v2": ("Wait." + PYTHON, "<|im_end|>", "Wait."),
}
BROKEN = {
    "qwen2_5": (
        "<tool_call>no JSON</tool_call>",
        '<tool_call>\n{"name": "x", "arguments": 3}\n</tool_call>',
        "<tool_call>{",
    ),
    "llama3_1": ('{"name": "weather", "parameters": {', '<|python_tag|>weather.call(city="x")'),
    "gptoss": ("<|channel|>commentary to=functions.weather <|message|>nothing<|call|>",),
    "mistral": ("[TOOL_CALLS] nothing", "[TOOL_CALLS][1]", "[TOOL_CALLS][]"),
    "qwen3_5_nothink": (
        CODER[:-12],
        CODER.replace("</parameter>", ""),
        CODER.replace("</p", "</q"),
        "<tool_call>{}</tool_call>",
    ),
    "glm4moe": (
        "<tool_call>weather<arg_key>city</arg_key></tool_call>",
        "<tool_call>weather city</tool_call>",
        "<tool_call>",
    ),
    "apertus": (
        "<|tools_prefix|>[]<|tools_suffix|>",
        '<|tools_prefix|>[{"weather": 3}]<|tools_suffix|>',
        '<|tools_prefix|>[{"weather": {}, "dice": {}}]<|tools_suffix|>',
        '<|tools_prefix|>{"weather": {}}',
    ),
    "minimax": (INVOKE[:-30], INVOKE.replace("</parameter>", " ")),
    "gemma4": (GEMMA[:-2], GEMMA.replace("city:", "city"), GEMMA.replace("call:", "")),
    "lfm2": (
        PYTHON[:-2],
        PYTHON.replace("city = ", ""),
        PYTHON.replace('"{}"', "x"),
        "<|tool_call_start|>[1]<|tool_call_end|>",
    ),
}


@every_template
def test_tools_of_which_the_model_does_not_read_are_known(path):
    chat = chat_of(path)
    text = unmarked(chat.render([user("hello")], TOOLS))
    assert chat.unread_tools([user("hello")], TOOLS) == ([] if "weather" in text else ["weather"])
    assert chat.unread_tools([user("Ask weather().")], TOOLS) == []


def tool_chat(name):
    if name == "minimax":
        return Chat(make_tokenizer(), MINIMAX, tool_reader=ToolCalls)
    if name not in ("mistral", "apertus"):
        return chat_named(name)
    template = MISTRAL if name == "mistral" else APERTUS
    tokenizer = make_tokenizer.__wrapped__()
    marks = [
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        *re.findall(r"<\|\w+\|>", APERTUS),
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*marks})})
    return Chat(tokenizer, template, tool_reader=ToolCalls)


def completion(ids, chat):
    same = {"logprobs": [0.0] * len(ids), "finish_reason": "stop", "policy_version": 0}
    return Completion(token_ids=ids, text=chat.decode(ids), **same)


@pytest.mark.parametrize("name", SAID)
def test_calls_are_read_and_keep_their_sampled_tokens(name):
    chat, (text, end, content) = tool_chat(name), SAID[name]
    stream = TokenStream(chat, [user("hello")], TOOLS)
    for number, city in enumerate(["Paris", "Rôme"]):
        before, ids = stream.prompt_ids, chat.encode(text.format(city) + end)
        done = completion(ids, chat)
        message, has_failed = chat.tool_calls.read(done, number)
        [call] = message["tool_calls"]
        assert (call["function"], has_failed) == (
            {"name": "weather", "arguments": {"city": city}},
            False,
        )
        assert message["content"] == content
        heard = {"role": "tool", "name": "weather", "content": "42", "tool_call_id": call["id"]}
        assert stream.append(ids, done.text, [heard], message), "history was rewritten"
        assert stream.prompt_ids[: len(before) + len(ids)] == before + ids
        # The text that the template writes between the end of these calls and the next turn.
        turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, heard]
        full = chat.render([user("hello"), *turns], TOOLS)
        assert full.endswith(between := chat.tokenizer.decode(stream.new_ids))
        assert "42" in between and "weather" not in re.sub(
            "functions.weather|response:weather", "", between
        )
    assert stream.messages[-1] == heard


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_cannot_be_read_is_told_and_other_text_is_none(name):
    chat = tool_chat(name)
    for text in BROKEN[name]:
        assert chat.tool_calls.read(completion(chat.encode(text), chat), 0) == (None, True), text
    assert chat.tool_calls.read(completion(chat.encode("hello world"), chat), 0) == (None, False)


@pytest.mark.parametrize(
    "name", ["qwen3_5_nothink", "nemotron_3_nano", "glm4moe", "minimax", "gemma4", "lfm2_v2"]
)
def test_calls_with_typed_arguments_are_read_as_the_template_writes_them(name):
    chat, arguments = (
        tool_chat(name),
        {
            "s": 'a <b> & "c"\n\n  007',
            "n": 7,
            "x": 0.5,
            "yes": True,
            "list": [1, "2"],
            "o": {"k": None},
        },
    )
    types = dict(
        zip(arguments, ("string", "integer", "number", "boolean", "array", "object"), strict=True)
    )
    properties = {key: {"type": kind} for key, kind in types.items()} | {
        "none": {"type": ["integer", "null"]}
    }
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"properties": properties}}}
        for n in ("f", "g")
    ]
    two = [{"name": "f", "arguments": arguments}, {"name": "g", "arguments": {}}]
    messages_said = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call} for call in two],
        }
    ]
    prompt = chat.render([user("hello")], tools)
    text = chat.render([user("hello"), *messages_said], tools, add_generation_prompt=False)
    text = text[shared_length(prompt, text) :]
    message, has_failed = chat.tool_calls.read(completion(chat.encode(text), chat), 0, tools)
    assert ([call["function"] for call in message["tool_calls"]], has_failed) == (two, False)


def test_several_calls_of_one_turn():
    two = [{"name": "weather", "arguments": {"city": city}} for city in ("Paris", "Rome")]
    texts = {
        "qwen3": "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in two),
        "mistral": "[TOOL_CALLS]" + json.dumps(two),
    }
    texts |= {
        "mistral ": "".join(
            f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'])}" for call in two
        )
    }
    for name, text in texts.items():
        chat = tool_chat(name.strip())
        message, _ = chat.tool_calls.read(completion(chat.encode(text), chat), 7)
        assert [call["function"] for call in message["tool_calls"]] == two
        assert [len(call["id"]) for call in message["tool_calls"]] == [9, 9]


def test_a_template_gets_its_own_variables_and_an_unknown_one_is_refused():
    chat = Chat(make_tokenizer(), chat_named("qwen3").chat_template, {"enable_thinking": False})
    assert chat.render([user("hello")]).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(
        ValueError, match="does not read 'enable_thinkin'; did you mean 'enable_thinking'"
    ):
        check_variables(chat.tokenizer, {"enable_thinkin": False}, "--chat_template_kwargs")


# Keys of smoltalk2's `chat_template_kwargs`; which of them are empty differs by row.
SMOLTALK = {"custom_instructions": "", "enable_thinking": None, "python_tools": [], "xml_tools": []}
READS = {  # As the templates' documentation lists them.
    "qwen2_5": "it reads no variables",
    "qwen3": "known: enable_thinking",
    "llama3_1": "did you mean 'custom_tools'?",
    "muse_glimmer": "known: current_date, knowledge_cutoff, reasoning_strength, tool_namespace_",
    "gptoss": "known: builtin_tools, model_identity, reasoning_effort",
    "gemma4_v5": "known: enable_thinking, preserve_thinking",
    "qwen3_training": "known: enable_thinking",
}


@pytest.mark.parametrize("name", READS)
def test_a_template_refuses_variables_that_it_lacks(name):
    row, chat = {"messages": [user("hello"), answer("42")]}, chat_named(name)
    (expected,) = sft_samples(chat, row)
    (sample,) = sft_samples(chat, row | {"chat_template_kwargs": SMOLTALK})
    assert sample.token_ids.tolist() == expected.token_ids.tolist()
    variables = SMOLTALK | {"custom_instructions": "Be brief."}
    error = (
        f"column 'chat_template_kwargs': the chat template does not read 'custom_instructions'"
        f": remove it, or ignore the column by --data.columns "
        f"my_chat_template_kwargs=chat_template_kwargs; {READS[name]}"
    )
    with pytest.raises(ValueError, match=re.escape(error)):
        sft_samples(chat, row | {"chat_template_kwargs": variables})


@every_template
def test_marks_of_the_template_in_a_prompt_are_counted(path):
    tokenizer = character_tokenizer()  # Some templates' marks are special tokens here.
    tokenizer.bos_token = "<s>"
    chat, talk = Chat(tokenizer, path.read_text()), [{"role": "user", "content": "aster"}]
    talk = in_parts(talk) if chat.chat_template in TAKE_ONLY_PARTS else talk
    options = {
        "chat_template": chat.chat_template,
        "add_generation_prompt": True,
        "tokenize": False,
    }
    behind = tokenizer.apply_chat_template(talk, **options).partition("aster")[2]
    rows = [{"prompt": text, "response": "b"} for text in ("aster", f"aster{behind}", "<think>")]
    for algorithm in ("sft", "grpo"):
        source = TaskSource(rows, env="e", split="train", seed=0, shuffle=False)
        config = Config(algorithm=algorithm, tasks_per_step=1)
        (remark,) = column_use(config, source, None, chat).remarks.items()
        assert "a mark of the chat template" in remark[0] and remark[1] == [1]
        is_text = re.search("has '(.*?)'", remark[0])[1] in chat.special_ids
        assert ("is read as text" if is_text else "begins another") in remark[0]
