"""Samples of SFT are the text of apply_chat_template(), for many templates and conversations."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from jinja2 import TemplateError
from kit import prompts_of
from test_chat import (
    CALL,
    RESULT,
    TAKE_ONLY_PARTS,
    TEMPLATES,
    TOOLS,
    answer,
    completion,
    in_parts,
    make_tokenizer,
    user,
    without_space,
)

from rl_core.data.chat import Chat
from rl_core.data.messages import with_text_arguments
from rl_core.data.samples import samples_from_turns
from rl_core.data.sft_samples import sft_turns, trained_messages
from rl_core.data.token_stream import TokenStream
from rl_core.data.tool_calls import ToolCalls

FILES = {path.stem: path.read_text() for path in TEMPLATES}
OPENING = (
    "{%- for t in tools or [] %}{{- '<tools>' + t | tojson }}{%- endfor %}"
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set text = m.content or '' %}{%- set thoughts = m.reasoning_content or '' %}"
    "{%- if '</think>' in text %}"
    "{%- set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 <= ns.last %}{%- set thoughts = '' %}{%- endif %}"
)
# Generation prompts with thoughts that a reply in the conversation has not, in short forms.
FILES["minimax_m2"] = OPENING + (
    "{%- if m.role == 'assistant' %}{{- ']~b]ai\\n' }}"
    "{%- if thoughts %}{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{%- endif %}{{- text }}"
    "{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}{%- for c in m.tool_calls %}"
    "{{- '<invoke name=\"' + c.function.name + '\">\\n' }}"
    "{%- for k, v in c.function.arguments.items() %}{{- '<parameter name=\"' + k + '\">' }}"
    "{{- v if v is string else v | tojson }}{{- '</parameter>\\n' }}{%- endfor %}"
    "{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}{{- '[e~[\\n' }}"
    "{%- else %}{{- ']~b]' + m.role + '\\n' + text + '[e~[\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}"
)
FILES["glm_4_7"] = OPENING + (
    "{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}"
    "{%- if thoughts %}{{- '<think>' + thoughts + '</think>' }}{%- else %}{{- '</think>' }}"
    "{%- endif %}{{- text.strip() }}{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>' + c.function.name }}{%- for k, v in c.function.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key><arg_value>' }}{{- v if v is string else v | tojson }}"
    "{{- '</arg_value>' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
    "{%- elif m.role == 'tool' %}{{- '<|observation|><tool_response>' + text }}"
    "{{- '</tool_response>' }}{%- else %}{{- '<|' + m.role + '|>' + text }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
    "{%- endif %}"
)
FILES["gemma4_large"] = FILES["gemma4_v4"].removesuffix("{%- endif -%}") + (
    "    {%- if not enable_thinking | default(false) -%}\n"
    "        {{- '<|channel>thought\\n<channel|>' -}}\n    {%- endif -%}\n{%- endif -%}"
)
FILES["cohere_r7b"] = (
    "{%- for m in messages %}{{- '<|START_OF_TURN_TOKEN|>' }}{%- if m.role == 'assistant' %}"
    "{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}"
    "{%- else %}{{- '<|USER_TOKEN|>' + m.content }}{%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>' }}"
    "{%- endif %}"
)
MARKS = ["[e~[", "]~b]ai", "<|START_THINKING|>", "<|END_THINKING|>", "</think>", "<think>"]
OTHER = {"id": "call00001", "type": "function", "function": {"name": "dice", "arguments": {}}}
TALKS = {
    "plain": [user("hello"), answer("fox"), user("because"), answer("42")],
    "system": [{"role": "system", "content": "quick"}, user("hello"), answer("fox")],
    "thoughts": [user("hello"), answer("fox", reasoning_content="because")],
    "history": [
        user("hello"),
        answer("fox", reasoning_content="because"),
        user("world"),
        answer("42", reasoning_content="brown"),
    ],
    "inline": [user("hello"), answer("<think>\nbecause\n</think>\n\nfox")],
    "call": [user("hello"), answer("", tool_calls=[CALL])],
    "two_calls": [user("hello"), answer("", tool_calls=[CALL, OTHER])],
    "result": [user("hello"), answer("", tool_calls=[CALL]), RESULT, answer("fox")],
    "call_thoughts": [
        user("hello"),
        answer("", tool_calls=[CALL], reasoning_content="because"),
        RESULT,
        answer("fox", reasoning_content="brown"),
    ],
}


@lru_cache
def tokenizer():
    made = make_tokenizer.__wrapped__()
    made.add_tokens(MARKS)
    return made


def rendered(name, messages, tools, variables, add_generation_prompt=False):
    """The library's text."""
    formed = []
    for message in messages:
        if name == "deepseekv3" and "tool_calls" in message:
            message = message | {
                "tool_calls": list(map(with_text_arguments, message["tool_calls"]))
            }
        if "reasoning_content" in message:
            message = message | {"thinking": message["reasoning_content"]}
        formed.append(message)
    if FILES[name] in TAKE_ONLY_PARTS:
        formed = in_parts(formed)
    return tokenizer().apply_chat_template(
        formed,
        tools=tools,
        chat_template=FILES[name],
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **variables,
    )


EMPTY = re.compile("|".join(map(re.escape, [*MARKS[2:], "<|channel>thought", "<channel|>"])))


def before_thoughts(text):
    """The end of a prompt without marks of thoughts, in which history and prompts differ."""
    return EMPTY.sub("", without_space(text))[-12:]


def check_turns(name, messages, tools, variables):
    """Raises ValueError if the messages are refused."""
    chat = Chat(tokenizer(), FILES[name], variables, tool_reader=ToolCalls)
    turns, decode = sft_turns(chat, messages, tools), tokenizer().decode
    replies = trained_messages(messages)
    trained = [t for s in samples_from_turns(turns, 1.0) for t in s.token_ids[s.loss_mask]]
    assert trained == [t for turn in turns for t in turn.completion.token_ids]
    for i, turn, prompt_ids in zip(replies, turns, prompts_of(turns), strict=True):
        prompt = rendered(name, messages[:i], tools, variables, add_generation_prompt=True)
        assert without_space(decode(prompt_ids)) == without_space(prompt)
        *ids, end = turn.completion.token_ids
        if end not in chat.stop_token_ids:  # gpt-oss ends a reply in the middle as an analysis.
            assert name.startswith("gptoss") and i < replies[-1]
            ids.append(end)
        text, full = decode(ids), rendered(name, messages[: i + 1], tools, variables)
        if text not in full:  # The prompt opens thoughts that no history has.
            assert prompt.rstrip().endswith(("<think>", "<|channel>thought")) and text
            text = re.split("</think>|<channel.>", text)[1].lstrip()
            assert text in full
            continue
        history, tail = full[: full.rindex(text)], full[full.rindex(text) + len(text) :]
        assert before_thoughts(history) == before_thoughts(prompt)
        assert not chat.special_token.sub("", tail).strip()
        if end in chat.stop_token_ids and tail.strip():
            assert tail.strip().startswith(decode([end]))


def without_thoughts(message):
    content = message["content"].rpartition("</think>\n\n")[2]
    return {"role": message["role"], **message, "content": content, "reasoning_content": ""}


def check_refusal(error, name, messages, tools, variables):
    """The fixes that an error names lead to other errors or to none; the rest is true."""
    number = int((re.search(r"message (\d+)", error) or [0, 1])[1]) - 1

    def check_with(message, more=variables):
        changed = [*messages[:number], message, *messages[number + 1 :]]
        check(name, changed, tools, more, error)

    message = messages[number]
    if "has no thoughts" in error:
        check_with(message | {"reasoning_content": "world"})
        marks = re.search(r"begin its content with '(.*?)'", error)[1].replace("\\n", "\n")
        check_with(message | {"content": marks + message["content"]})
    elif "empty ones" in error:
        check_with(without_thoughts(message))
        check_with(message, {"enable_thinking": True})
    elif "does not render" in error:
        call = re.search(r"the call of (\w+)", error)
        word = call[1] if call else "because brown".split()[number > 2]
        assert word in str(message)
        full = rendered(name, messages[: number + 1], tools, variables)
        assert word not in full.partition("hello")[2]
    elif "is not before it" in error:
        check_with(message | {"train": False})
    else:
        assert "the chat template refuses messages" in error
        with pytest.raises(TemplateError):
            rendered(name, messages, tools, variables, add_generation_prompt=True)


def check(name, messages, tools, variables, seen=""):
    try:
        check_turns(name, messages, tools, variables)
    except ValueError as error:
        assert str(error) != seen
        check_refusal(str(error), name, messages, tools, variables)


@pytest.mark.parametrize("name", FILES)
def test_a_turn_is_the_templates_text_or_an_error_names_a_fix(name):
    is_switched = "enable_thinking" in FILES[name]
    switches = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    for variables in switches[: 3 if is_switched else 1]:
        for talk, messages in TALKS.items():
            tools = TOOLS if talk in ("call", "two_calls", "result", "call_thoughts") else None
            check(name, messages, tools, variables)


SAMPLED = {
    "minimax_m2": (
        'because\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">{}</parameter>\n</invoke>\n</minimax:tool_call>[e~['
    ),
    "glm_4_7": (
        "because</think><tool_call>weather<arg_key>city</arg_key><arg_value>{}</arg_value>"
        "</tool_call><|observation|>"
    ),
    "gemma4_large": '<|tool_call>call:weather{{city:<|"|>{}<|"|>}}<tool_call|><|tool_response>',
}


@pytest.mark.parametrize("name", SAMPLED)
def test_calls_behind_a_prompt_with_thoughts_are_read_and_appended(name):
    chat = Chat(tokenizer(), FILES[name], tool_reader=ToolCalls)
    chat.tool_calls.check(TOOLS, "env.py")
    stream, text = TokenStream(chat, [user("hello")], TOOLS), SAMPLED[name].format("Paris")
    ids, prompt = chat.encode(text), stream.rendered
    done = completion(ids, chat)
    message, has_failed = chat.tool_calls.read(done, 0, TOOLS, prompt)
    [call] = message["tool_calls"]
    assert not has_failed and call["function"] == CALL["function"]
    grows = stream.append(ids, done.text, [RESULT | {"tool_call_id": call["id"]}], message)
    # Gemma's history has no empty thoughts.
    assert grows == (name != "gemma4_large")
    thoughts = {} if name == "gemma4_large" else {"reasoning_content": "because"}
    messages = [user("hello"), answer("", tool_calls=[CALL], **thoughts), RESULT]
    full = rendered(name, messages, TOOLS, {}, add_generation_prompt=True)
    assert without_space(tokenizer().decode(stream.prompt_ids)) == without_space(full)
