"""The endpoint for programs, by the official clients, with written replies."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import random
import re
import socket
import threading
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import anthropic
import httpx
import openai
import pydantic
import pytest
from anthropic import beta_async_tool
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsStreaming as BetaMessageCreateParamsStreaming,
)
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from PIL import Image
from test_images import png_of_size

from rl_core.config import AgentsConfig
from rl_core.data.chat import Chat
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.agents import chat_completions, messages, requests, responses
from rl_core.environments.agents.endpoint import MAX_BODY_BYTES, SOCKET, EndpointServer
from rl_core.environments.agents.requests import PIECE_CHARS, REFUSED, Refusal
from rl_core.environments.agents.tree import key_of
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.engine import EngineDied
from rl_core.types import SamplingParams

CHAT = plain_chat(ToolCalls)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array"}},
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
HI = [{"role": "user", "content": "hi"}]
OPEN = []  # clients of the test that runs


@asynccontextmanager
async def endpoint(*replies, max_turns=0, max_tokens=200, others=(), config=None, **actor):
    """An episode's endpoint, and the tree of its first actor. `others`: more actors."""
    made = ScriptedActor(**({"name": "policy", "chat": CHAT, "replies": replies} | actor))
    known = {each.name: each for each in (made, *others)}
    actors = EpisodeActors(known, SamplingParams(max_tokens=max_tokens), 1, "s")
    server = EndpointServer(config)
    llm = await server.open(actors, max_turns)
    try:
        yield llm, llm.trees["policy"]
    finally:
        while OPEN:
            await OPEN.pop().close()
        server.shut(llm)
        await server.close()


def openai_client(llm):
    OPEN.append(openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0))
    return OPEN[-1]


def anthropic_client(llm):
    OPEN.append(
        anthropic.AsyncAnthropic(base_url=llm.anthropic_url, api_key=llm.api_key, max_retries=0)
    )
    return OPEN[-1]


async def chat(client, messages, **more):
    reply = await client.chat.completions.create(model="any", messages=messages, **more)
    return reply.choices[0].message


def stream_of(trajectory):
    """All token ids, as the learner gets them."""
    ids = []
    for number, turn in enumerate(trajectory.turns):
        assert turn.is_fresh == (number == 0)
        ids += [*turn.new_ids, *turn.completion.token_ids]
    return ids


def text_of(trajectory):
    return CHAT.tokenizer.decode(stream_of(trajectory))


async def until(is_so):
    """Lets other tasks run until a condition holds."""
    for _ in range(6000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within a minute")


async def given_up(tree, asking):
    """Cancels a client when its request is sampled. The reply comes when the returned event is
    set."""
    begun, release, generate = asyncio.Event(), asyncio.Event(), tree.actor.engine.generate

    async def late(*args, **kwargs):
        begun.set()
        completion = await generate(*args, **kwargs)
        await release.wait()
        return completion

    tree.actor.engine.generate = late
    asking = asyncio.ensure_future(asking)
    await begun.wait()
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    attempts = [each for attempts in tree.attempts.values() for each in attempts]
    await until(lambda: any(attempt.is_lost for attempt in attempts))
    return release


def wait_for_requests(engine, number):
    """Makes the engine wait until N requests are under way."""
    generate, all_there, waiting = engine.generate, asyncio.Event(), []

    async def answer(*args, **kwargs):
        waiting.append(args)
        if len(waiting) == number:
            all_there.set()
        await all_there.wait()
        return await generate(*args, **kwargs)

    engine.generate = answer


async def test_a_program_that_appends_gives_one_stream_of_the_sampled_tokens():
    async with endpoint("<think>hm</think> One ", "Two", "Three") as (llm, _):
        client, messages = openai_client(llm), list(HI)
        for text in ("a", "b"):
            reply = await chat(client, messages)
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": text}]
        await chat(client, messages)
        (trajectory,) = llm.trajectories(0.5)
    assert text_of(trajectory) == (
        "<|start|>user\nhi<|end|>\n<|start|>assistant\n<think>hm</think> One <|end|>\n"
        "<|start|>user\na<|end|>\n<|start|>assistant\nTwo<|end|>\n"
        "<|start|>user\nb<|end|>\n<|start|>assistant\nThree<|end|>"
    )
    assert trajectory.reward == 0.5 and trajectory.metrics["agent_branches"] == 1


ECHOES = {
    "as it was": {},
    "as parts": {"content": [{"type": "text", "text": "thinking is done "}]},
    "with spaces": {"content": "\n thinking is done"},
    "with a name": {"name": "bot"},
    "other ids": {"refusal": None, "audio": None},
}


@pytest.mark.parametrize("change", ECHOES)
async def test_what_clients_change_in_an_echo_makes_no_branch(change):
    async with endpoint("<think>so</think>thinking is done ", "next") as (llm, _):
        client = openai_client(llm)
        reply = await chat(client, HI)
        echo = {"role": "assistant", "content": reply.content} | ECHOES[change]
        silent = {"role": "assistant", "content": ""}
        more = [{"role": "user", "content": "more"}]
        await chat(client, [*HI, echo, silent, *more])
        (trajectory,) = llm.trajectories(1.0)
    assert len(trajectory.turns) == 2
    assert "<think>so</think>thinking is done <|end|>" in text_of(trajectory)


async def test_arguments_of_calls_that_are_printed_anew_make_no_branch():
    async with endpoint(CALL, "3") as (llm, _):
        client = openai_client(llm)
        reply = await chat(client, HI, tools=TOOLS)
        (call,) = reply.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": [2, "x"]}
        echo = reply.model_dump()
        echo["tool_calls"][0]["function"]["arguments"] = '{"b":[2,"x"],\n"a":1}'
        result = {"role": "tool", "content": "3", "tool_call_id": call.id}
        last = await chat(client, [*HI, echo, result], tools=TOOLS)
        assert last.content == "3"
        (trajectory,) = llm.trajectories(1.0)
    assert [turn.is_fresh for turn in trajectory.turns] == [True, False]
    assert CALL in text_of(trajectory)


async def test_calls_of_all_conversations_of_an_episode_have_different_ids():
    async with endpoint(CALL + CALL, CALL) as (llm, _):
        client = openai_client(llm)
        calls = []
        for text in ("left", "right"):
            asked = [{"role": "user", "content": text}]
            calls += (await chat(client, asked, tools=TOOLS)).tool_calls
        ids = [call.id for call in calls]
    assert len(set(ids)) == 3 and all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)


async def test_a_rewritten_history_is_a_branch_that_shares_the_tokens_before():
    async with endpoint("one", "two", "three") as (llm, _):
        client = openai_client(llm)
        first = [*HI, {"role": "assistant", "content": (await chat(client, HI)).content}]
        left = [*first, {"role": "user", "content": "left"}]
        await chat(client, left)
        right = [*first, {"role": "user", "content": "right"}]
        await chat(client, right)
        left, right = llm.trajectories(1.0)
    assert left.turns[0] is right.turns[0]
    assert text_of(left).endswith("left<|end|>\n<|start|>assistant\ntwo<|end|>")
    assert text_of(right).endswith("right<|end|>\n<|start|>assistant\nthree<|end|>")


async def test_two_requests_that_continue_one_turn_at_once_are_two_branches():
    async with endpoint("one", "two", "three") as (llm, tree):
        client = openai_client(llm)
        first = [*HI, {"role": "assistant", "content": (await chat(client, HI)).content}]
        wait_for_requests(tree.actor.engine, 3)
        asked = [[*first, {"role": "user", "content": text}] for text in ("x", "y", "x")]
        replies = await asyncio.gather(*(chat(client, messages) for messages in asked))
        replies, branches = ([message.content for message in replies], llm.trajectories(1.0))
    assert sorted(replies) == ["three", "three", "two"]
    assert len(branches) == 3
    assert len({id(branch.turns[0]) for branch in branches}) == 1
    assert all(len(branch.turns) == 2 for branch in branches)


async def test_n_replies_are_branches():
    async with endpoint("one", "two") as (llm, _):
        reply = await openai_client(llm).chat.completions.create(
            model="m", messages=HI, n=2, seed=3
        )
        assert [choice.index for choice in reply.choices] == [0, 1]
        answer, branches = (sorted(c.message.content for c in reply.choices), llm.trajectories(1.0))
    assert answer == ["one", "two"]
    assert len(branches) == 2


async def test_n_replies_that_continue_a_turn_are_branches_of_it():
    async with endpoint("one", "two", "three", "four") as (llm, tree):
        client = openai_client(llm)
        first = [*HI, {"role": "assistant", "content": (await chat(client, HI)).content}]
        wait_for_requests(tree.actor.engine, 2)
        more = [*first, {"role": "user", "content": "more"}]
        reply = await client.chat.completions.create(model="m", messages=more, n=2)
        answers, branches = (
            sorted(c.message.content for c in reply.choices),
            llm.trajectories(1.0),
        )
    assert answers == ["three", "two"]
    assert [len(branch.turns) for branch in branches] == [2, 2]
    assert branches[0].turns[0] is branches[1].turns[0]
    for branch in branches:
        assert text_of(branch).count("more") == 1


async def test_a_request_whose_body_comes_after_the_episode_is_not_answered():
    async with endpoint("one") as (llm, tree):
        sent, is_over = asyncio.Event(), asyncio.Event()

        async def body():
            yield b'{"messages": '
            sent.set()
            await is_over.wait()
            yield json.dumps(HI).encode() + b"}"

        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = f"{llm.base_url}/chat/completions"
            asked = asyncio.ensure_future(client.post(url, content=body()))
            await sent.wait()
            await asyncio.sleep(0.1)
            llm.is_shut = True
            is_over.set()
            assert ((await asked).status_code, tree.num_turns) == (401, 0)


# Arguments that json.loads() reads, and that no template or tokenizer takes.
UNRENDERED = ['{"a": ' * 5000 + "1" + "}" * 5000]
UNRENDERED += ['{"a": ' * 490 + "1" + "}" * 490, r'{"a": "\ud83d"}', r'{"\ud83d": [1]}']
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "add"}


def called_with(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*HI, {"role": "assistant", "tool_calls": [call]}]


def used_with(arguments):
    block = {"type": "tool_use", "id": "c", "name": "add", "input": arguments}
    return {"role": "assistant", "content": [block]}


def tool_of(properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


@pytest.mark.parametrize("arguments", UNRENDERED, ids=range(len(UNRENDERED)))
async def test_calls_that_no_template_renders_are_text(arguments):
    spoken = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    async with endpoint(spoken, "two", max_tokens=1 << 17) as (llm, _):
        client = openai_client(llm)
        reply = await chat(client, HI, tools=TOOLS)
        more = [*HI, {"role": "assistant", "content": reply.content}, *HI]
        await chat(client, more, tools=TOOLS)
        (trajectory,) = llm.trajectories(1.0)
    assert (reply.content, reply.tool_calls) == (spoken, None)
    assert trajectory.metrics["tool_parse_failed"] == 1 and len(trajectory.turns) == 2


@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [5]}]}),
        ("chat/completions", {"messages": [{"role": 3}]}),
        ("responses", {"input": "x", "previous_response_id": {}}),
        ("responses", {"input": 3}),
        ("messages", {"messages": [{"role": "user", "content": 3}]}),
        ("messages", {"messages": [{"role": "user", "content": [3]}]}),
        *[("chat/completions", {"messages": called_with(text)}) for text in UNRENDERED],
        *[("responses", {"input": [CALL_ITEM | {"arguments": text}]}) for text in UNRENDERED],
        *[("messages", {"messages": [used_with(json.loads(text))]}) for text in UNRENDERED[1:]],
        ("chat/completions", {"messages": HI, "metadata": {"a": "\ud83d"}}),
        ("chat/completions", {"messages": HI, "tools": [tool_of({"\ud83d": {}})]}),
        ("chat/completions", {"messages": [*HI, {"role": "tool", "content": "\ud83d"}]}),
        ("responses", {"input": "hi", "instructions": "\ud83d"}),
        ("messages", {"messages": HI, "system": "\ud83d"}),
    ],
)
async def test_a_malformed_body_is_the_clients_error(path, body):
    async with endpoint("one") as (llm, _):
        headers = {"x-api-key": llm.api_key}
        async with httpx.AsyncClient(headers=headers) as client:
            # httpx would not send a lone surrogate.
            answer = await client.post(f"{llm.base_url}/{path}", content=json.dumps(body))
            assert answer.status_code == 400, answer.text


RETRY = {"extra_headers": {"x-stainless-retry-count": "1"}}


async def test_the_same_request_again_is_a_turn_and_a_clients_retry_is_not():
    async with endpoint("one", "two", "three", max_turns=2) as (llm, tree):
        client, seeds, generate = openai_client(llm), [], tree.actor.engine.generate

        async def note(ids, params, **more):
            seeds.append(more["seed"])
            return await generate(ids, params, **more)

        tree.actor.engine.generate = note
        asked = [{}, RETRY, {}, RETRY]
        replies = [(await chat(client, HI, **more)).content for more in asked]
        with pytest.raises(openai.BadRequestError, match="has had its 2 turns"):
            await chat(client, HI)
        branches = llm.trajectories(1.0)
    assert replies == ["one", "one", "two", "two"] and len({*seeds}) == 2
    assert [[turn.completion.text for turn in branch.turns] for branch in branches] == [
        ["one"],
        ["two"],
    ]
    assert branches[0].metrics["agent_requests"] == branches[0].metrics["agent_retries"] == 2


async def asked_chat(client, model, is_streamed):
    messages = [{"role": "user", "content": model}]
    reply = await client.chat.completions.create(model=model, messages=messages, stream=is_streamed)
    return [each async for each in reply] if is_streamed else reply.choices[0].message.content


async def asked_responses(client, model, is_streamed):
    reply = await client.responses.create(model=model, input=model, stream=is_streamed)
    return [each async for each in reply] if is_streamed else reply.output_text


async def asked_messages(client, model, is_streamed):
    messages = [{"role": "user", "content": model}]
    reply = await client.messages.create(
        model=model, messages=messages, max_tokens=99, stream=is_streamed
    )
    return [each async for each in reply] if is_streamed else reply.content[0].text


ASKED = {
    "chat": (openai_client, asked_chat),
    "responses": (openai_client, asked_responses),
    "messages": (anthropic_client, asked_messages),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", ASKED)
async def test_a_reply_that_the_client_gave_up_is_no_turn(dialect, is_streamed):
    """The actor "other" answers a client that has gone."""
    make, ask = ASKED[dialect]
    other = ScriptedActor(name="other", chat=CHAT, replies=["late"])
    async with endpoint("one", max_turns=1, others=[other]) as (llm, tree):
        slow = llm.trees["other"]
        release = await given_up(slow, ask(make(llm), "other", is_streamed))
        await ask(make(llm), "policy", is_streamed)
        assert [len(llm.trajectories(1.0, name)) for name in llm.trees] == [1, 0]
        release.set()
        await until(lambda: slow.nodes)
        assert (slow.num_turns, llm.trajectories(1.0, "other")) == (0, [])
        # The same request again gets the reply that nobody had.
        await ask(make(llm), "other", is_streamed)
        assert (slow.num_turns, slow.num_retries, len(llm.trajectories(1.0, "other"))) == (1, 1, 1)
        assert tree.num_turns == 1


async def test_a_branch_ends_before_the_reply_that_was_given_up():
    async with endpoint("one", "late", "two", max_turns=2) as (llm, tree):
        client = openai_client(llm)
        history = [*HI, {"role": "assistant", "content": (await chat(client, HI)).content}]
        asked = [*history, {"role": "user", "content": "check it"}]
        release = await given_up(tree, chat(client, asked))
        texts = [[turn.completion.text for turn in t.turns] for t in llm.trajectories(1.0)]
        assert texts == [["one"]]
        release.set()
        await until(lambda: len(tree.nodes) == 2)
        texts = [[turn.completion.text for turn in t.turns] for t in llm.trajectories(1.0)]
        assert texts == [["one"]]
        await chat(client, [*history, {"role": "user", "content": "go on"}])
        texts = [[turn.completion.text for turn in t.turns] for t in llm.trajectories(1.0)]
        assert texts == [["one", "two"]]


@pytest.mark.parametrize(
    "path, thoughts",
    [
        ("chat/completions", "<think>Let me count.</think>\n\n"),
        ("responses", ""),
        ("messages", "<think>Let me count.</think>\n\n"),
    ],
)
async def test_a_stream_is_trained_up_to_what_its_client_took(path, thoughts):
    """The client closes its connection in the middle. A Unix socket holds fewer bytes than a port."""
    text = thoughts + "".join(f"{number} " for number in range(80_000))
    body = {"messages": HI} | {"input": "hi", "stream": True}
    del body["messages" if path == "responses" else "input"]
    async with endpoint(text, max_tokens=len(text)) as (llm, _):
        [shown] = (await llm.binds()).values()
        reader, writer = await asyncio.open_unix_connection(f"{shown}/{SOCKET}", limit=1 << 12)
        sent, got = json.dumps(body), b""
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {llm.api_key}\r\n"
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n{sent}".encode())
        while got.count(b"data: ") < 12:
            got += await reader.read(1 << 12)
        writer.close()
        await until(lambda: not llm.server.server.limits.keys)
        (trajectory,) = llm.trajectories(1.0)
        completion = trajectory.turns[-1].completion
    read = b"".join(re.findall(rb'"(?:delta|content|text)": ?"([\d ]+)"', got)).decode()
    took = completion.text.removeprefix(thoughts)
    assert len(read) > 8_000 and took.startswith(read) and len(took) % PIECE_CHARS == 0
    assert len(completion.text) < len(text) and text.startswith(completion.text)
    assert completion.token_ids == CHAT.encode(completion.text)
    assert len(completion.logprobs) == len(completion.token_ids)
    assert trajectory.messages[-1]["content"] == completion.text


async def test_a_retry_while_the_first_request_is_under_way_is_no_branch():
    async with endpoint("one", "two") as (llm, tree):
        release = asyncio.Event()
        generate = tree.actor.engine.generate

        async def slow(*args, **kwargs):
            await release.wait()
            return await generate(*args, **kwargs)

        tree.actor.engine.generate = slow
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        body = {"messages": HI}
        url = f"{llm.base_url}/chat/completions"
        async with httpx.AsyncClient(headers=headers) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=body, timeout=0.3)
            again = client.post(url, json=body, headers={"x-stainless-retry-count": "1"})
            again = asyncio.ensure_future(again)
            await asyncio.sleep(0.1)
            release.set()
            reply = (await again).json()
        assert (reply["choices"][0]["message"]["content"], len(llm.trajectories(1.0))) == ("one", 1)


async def test_another_list_of_tools_begins_anew():
    async with endpoint("one", "two") as (llm, _):
        client = openai_client(llm)
        reply = await chat(client, HI)
        more = [*HI, reply.model_dump(), {"role": "user", "content": "more"}]
        await chat(client, more, tools=TOOLS)
        assert [len(branch.turns) for branch in llm.trajectories(1.0)] == [1, 1]


async def test_a_stop_string_is_sampled_but_not_shown():
    async with endpoint("thought STOP rest", "two") as (llm, _):
        client = openai_client(llm)
        reply = await chat(client, HI, stop=["STOP"])
        more = [*HI, reply.model_dump(), {"role": "user", "content": "more"}]
        await chat(client, more, stop=["STOP"])
        shown, (trajectory,) = (reply.content, llm.trajectories(1.0))
    assert shown == "thought "
    assert "thought STOP" in text_of(trajectory) and "rest" not in text_of(trajectory)


async def test_max_tokens_of_a_request_cuts_its_reply():
    async with endpoint("a long reply") as (llm, _):
        reply = await openai_client(llm).chat.completions.create(
            model="m", messages=HI, max_tokens=5, max_completion_tokens=3, logprobs=True
        )
        reply, (trajectory,) = (reply, llm.trajectories(1.0))
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a l", "length")
    assert [token.token for token in choice.logprobs.content] == ["a", " ", "l"]
    assert reply.usage.completion_tokens == 3
    assert reply.usage.prompt_tokens == len(trajectory.turns[0].new_ids)
    assert trajectory.status == "truncated"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_above_the_runs_is_the_runs(name):
    async with endpoint("a long reply", max_tokens=4) as (llm, _):
        await chat(openai_client(llm), HI, **{name: 1000})
        (trajectory,) = llm.trajectories(1.0)
    assert len(trajectory.turns[0].completion.token_ids) == 4


async def test_an_empty_stop_is_refused():
    async with endpoint("one") as (llm, _):
        for stop in ("", ["x", ""]):
            with pytest.raises(openai.BadRequestError, match="none of them empty"):
                await chat(openai_client(llm), HI, stop=stop)


async def test_a_truncated_actor_leaves_the_others_trajectories_as_they_are():
    small = ScriptedActor(name="small", chat=CHAT, replies=["two"], max_context_tokens=60)
    async with endpoint("one", others=[small]) as (llm, _):
        client = openai_client(llm).chat.completions
        for name in ("policy", "small"):
            await client.create(model=name, messages=HI)
        with pytest.raises(openai.BadRequestError):
            await client.create(model="small", messages=[{"role": "user", "content": "m" * 99}])
        assert [llm.trajectories(1.0, name)[0].status for name in ("policy", "small")] == [
            "ok",
            "truncated",
        ]


def test_seeds_do_not_depend_on_the_order_of_other_requests():
    async def seeds(order):
        answers = {}
        async with endpoint("one") as (llm, tree):
            generate = tree.actor.engine.generate

            async def note(ids, params, **more):
                answers[CHAT.tokenizer.decode(ids)] = more["seed"]
                return await generate(ids, params, **more)

            tree.actor.engine.generate = note
            for text in order:
                more = {"tools": TOOLS} if text.isupper() else {}
                asked = [{"role": "user", "content": text.lower()}]
                with suppress(openai.BadRequestError):
                    await chat(openai_client(llm), asked, **more)
        return answers

    first, second = (asyncio.run(seeds(order)) for order in ("abcA", "cxAyab"))
    assert len(set(first.values())) == 4
    assert first.items() <= second.items()


async def test_what_the_trainer_decides_is_counted():
    async with endpoint("one", "two", max_turns=2) as (llm, _):
        client = openai_client(llm)
        await chat(client, HI, temperature=0.1, top_p=0.5)
        await chat(client, HI, tool_choice="required", tools=TOOLS)
        again = {"x-stainless-retry-count": "1"}
        await chat(client, HI, temperature=0.1, top_p=0.5, extra_headers=again)
        with pytest.raises(openai.BadRequestError):  # It has had its turns.
            await chat(client, [{"role": "user", "content": "more"}], temperature=0.1)
        metrics = llm.trajectories(1.0)[0].metrics
    counted = {name: metrics[name] for name in metrics if name.startswith("agent_overridden")}
    assert counted == {
        "agent_overridden": 6,
        "agent_overridden_temperature": 3,
        "agent_overridden_top_p": 2,
        "agent_overridden_tool_choice": 1,
    }


def own_addresses() -> set[str]:
    """IPv4 addresses of this machine, as its kernel lists them."""
    lines = Path("/proc/net/fib_trie").read_text().splitlines()
    pairs = pairwise(lines)
    return {before.split()[-1] for before, line in pairs if "host LOCAL" in line}


async def status_at(address: str) -> int:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{address}/v1/models")).status_code


@pytest.mark.skipif(
    not Path("/proc/net/fib_trie").exists(), reason="needs Linux's list of addresses"
)
def test_programs_elsewhere_are_told_an_address_of_this_machine():
    async def play(config):
        server = EndpointServer(config)
        llm = await server.open({})
        port = llm.address.rpartition(":")[2]
        try:
            elsewhere = []
            for address in own_addresses() - {"127.0.0.1"}:
                with suppress(httpx.ConnectError):
                    elsewhere.append(await status_at(f"http://{address}:{port}"))
            return llm.address, elsewhere
        finally:
            server.shut(llm)
            await server.close()

    address, elsewhere = asyncio.run(play(None))
    assert address.startswith("http://127.0.0.1:") and elsewhere == []
    address, elsewhere = asyncio.run(play(AgentsConfig(host="0.0.0.0")))
    assert address.split("//")[1].split(":")[0] in own_addresses() | {socket.gethostname()}
    assert elsewhere == [401] * len(own_addresses() - {"127.0.0.1"})  # a key is asked for
    address, _ = asyncio.run(play(AgentsConfig(host="0.0.0.0", public_host="node7")))
    assert address.startswith("http://node7:")


async def chat_stream(llm):
    async with openai_client(llm).chat.completions.stream(
        model="m", messages=HI, tools=TOOLS, stream_options={"include_usage": True}
    ) as events:
        async for _ in events:
            pass
        try:
            final = await events.get_final_completion()
        except openai.LengthFinishReasonError as error:
            final = error.completion
    message = final.choices[0].message
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
    return message.content, calls, final.choices[0].finish_reason, final.usage.completion_tokens


async def responses_stream(llm):
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    async with openai_client(llm).responses.stream(model="m", input="hi", tools=[tool]) as events:
        # The client's get_final_response() wants a completed one.
        async for event in events:
            final = getattr(event, "response", None)
    calls = [(c.name, json.loads(c.arguments)) for c in final.output if c.type == "function_call"]
    return final.output_text, calls, final.status, final.usage.output_tokens


async def messages_stream(llm):
    tool = {"name": "add", "input_schema": PARAMETERS}
    async with anthropic_client(llm).messages.stream(
        model="m", messages=HI, tools=[tool], max_tokens=200
    ) as events:
        async for _ in events:
            pass
        final = await events.get_final_message()
    text = "".join(block.text for block in final.content if block.type == "text")
    calls = [(block.name, block.input) for block in final.content if block.type == "tool_use"]
    return text, calls, final.stop_reason, final.usage.output_tokens


async def chat_plain(llm):
    reply = await openai_client(llm).chat.completions.create(model="m", messages=HI, tools=TOOLS)
    message = reply.choices[0].message
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
    return message.content, calls, reply.choices[0].finish_reason, reply.usage.completion_tokens


async def responses_plain(llm):
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    reply = await openai_client(llm).responses.create(model="m", input="hi", tools=[tool])
    calls = [(c.name, json.loads(c.arguments)) for c in reply.output if c.type == "function_call"]
    return reply.output_text, calls, reply.status, reply.usage.output_tokens


async def messages_plain(llm):
    tool = {"name": "add", "input_schema": PARAMETERS}
    reply = await anthropic_client(llm).messages.create(
        model="m", messages=HI, tools=[tool], max_tokens=200
    )
    text = "".join(block.text for block in reply.content if block.type == "text")
    calls = [(block.name, block.input) for block in reply.content if block.type == "tool_use"]
    return text, calls, reply.stop_reason, reply.usage.output_tokens


# Whole, streamed, why a turn with calls ended, and why a turn that was cut ended.
DIALECTS = {
    "chat": (chat_plain, chat_stream, "tool_calls", "length"),
    "responses": (responses_plain, responses_stream, "completed", "incomplete"),
    "messages": (messages_plain, messages_stream, "tool_use", "max_tokens"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tools_that_the_template_does_not_render_are_counted(dialect):
    tokenizer = copy.deepcopy(CHAT.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("if tools", "if false")
    without_tools = Chat(tokenizer, tool_reader=ToolCalls)

    async def play(chat):
        async with endpoint(CALL, chat=chat) as (llm, _):
            await DIALECTS[dialect][0](llm)
            return llm.trajectories(1.0)[0].metrics

    assert asyncio.run(play(without_tools))["agent_overridden_tools"] == 1
    assert asyncio.run(play(CHAT))["agent_overridden"] == 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_that_is_cut_after_a_whole_call_says_so(dialect, is_streamed):
    async with endpoint(f"{CALL} and more", max_tokens=len(CALL) + 4) as (llm, _):
        text, calls, finish, num_tokens = await DIALECTS[dialect][is_streamed](llm)
    assert (text, calls) == ("and", [("add", {"a": 1, "b": [2, "x"]})])
    assert (finish, num_tokens) == (DIALECTS[dialect][3], len(CALL) + 4)


SAID = [
    "Four",
    CALL,
    f"I add {CALL}{CALL}",
    "<think>hm</think>",
    "<think>hm</think>Four",
    "é🙂 <think>ü</think>",
    "",
]


@pytest.mark.parametrize("spoken", SAID)
async def test_each_token_has_a_logprob_and_its_bytes_whole_and_streamed(spoken):
    asked = {"model": "m", "messages": HI, "tools": TOOLS, "logprobs": True}
    async with endpoint(spoken) as (llm, _):
        client = openai_client(llm).chat.completions
        complete = await client.create(**asked)
        async with client.stream(**asked) as events:
            async for _ in events:
                pass
            streamed = await events.get_final_completion()
        logprobs = [reply.choices[0].logprobs.content for reply in (complete, streamed)]
        include = ["message.output_text.logprobs"]
        asked = {"model": "m", "input": "hi", "include": include}
        asked["tools"] = [{"type": "function"} | TOOLS[0]["function"]]
        client = openai_client(llm).responses
        complete = await client.create(**asked)
        async with client.stream(**asked) as events:
            deltas = [each async for each in events if each.type == "response.output_text.delta"]
            streamed = await events.get_final_response()
        for reply in (complete, streamed):
            texts = [item.content[0] for item in reply.output if item.type == "message"]
            logprobs += [text.logprobs for text in texts]
        if deltas:
            sent = [token.token for token in deltas[0].logprobs]
            assert sent == [token.token for token in logprobs[-1]]
        assert len(logprobs) == 2 + 2 * len(deltas)
        for tokens in logprobs:
            assert b"".join(bytes(t.bytes) for t in tokens) == f"{spoken}<|end|>".encode()
            assert len(tokens) == len(spoken.encode()) + 1


@pytest.mark.parametrize(
    "spoken, shown",
    [
        ("ab STOP", "ab "),
        ("abSTOPc", "ab"),
        ("aSTabENDc", "aSTab"),
        ("abENDSTOPc", "ab"),
        ("aSTOPbSTOPc", "a"),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_neither_a_stop_nor_the_rest_of_its_token_is_shown(dialect, spoken, shown):
    stops = ["STOP", "END"]
    async with endpoint(spoken, "two") as (llm, tree):
        generate = tree.actor.engine.generate

        async def to_the_end_of_the_token(ids, params, **more):
            return await generate(ids, replace(params, stop=()), **more)

        tree.actor.engine.generate = to_the_end_of_the_token
        if dialect == "chat":
            text = (await chat(openai_client(llm), HI, stop=stops)).content
        else:
            reply = await anthropic_client(llm).messages.create(
                model="m", messages=HI, max_tokens=99, stop_sequences=stops
            )
            assert reply.stop_reason == "stop_sequence" and reply.stop_sequence in stops
            text = reply.content[0].text
        echo = {"role": "assistant", "content": text}
        await chat(openai_client(llm), [*HI, echo, *HI])
        text, (trajectory,) = (text, llm.trajectories(1.0))
    assert text == shown
    assert f"<|start|>assistant\n{spoken}<|end|>" in text_of(trajectory)


NON_SCHEMAS = [
    {"type": "object", "properties": None},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"a": None}},
    {"type": "object", "properties": {"a": "integer"}},
    {"type": "object", "properties": {"a": {"type": 3}}},
    {"type": "object", "properties": {"a": {"anyOf": {"type": "integer"}}}},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": "x"}}}},
    {"type": "object", "required": "a"},
    {"type": []},
    {"type": "object", "properties": {"a": {"anyOf": []}}},
    "integer",
    True,
    [{}],
]


@pytest.mark.parametrize("schema", NON_SCHEMAS, ids=str)
async def test_parameters_that_are_not_a_schema_are_refused(schema):
    async with endpoint(CALL) as (llm, tree):
        client, other = openai_client(llm), anthropic_client(llm).messages
        function = {"name": "add", "parameters": schema}
        with pytest.raises(openai.BadRequestError, match="add: the parameters"):
            await chat(client, HI, tools=[{"type": "function", "function": function}])
        tools = [{"type": "function"} | function]
        with pytest.raises(openai.BadRequestError, match="add: the parameters"):
            await client.responses.create(model="m", input="hi", tools=tools)
        tools = [{"name": "add", "input_schema": schema}]
        with pytest.raises(anthropic.BadRequestError, match="add: the parameters"):
            await other.create(model="m", messages=HI, tools=tools, max_tokens=9)
        assert tree.num_turns == 0


ASKED_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES = {
    "chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "x", "tool_calls": [ASKED_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": TOOLS,
        "stop": ["z"],
        "n": 1,
        "max_tokens": 3,
        "logprobs": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}},
        "tool_choice": "auto",
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "reasoning", "summary": []},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
        "instructions": "x",
        "text": {"format": {"type": "json_schema", "schema": PARAMETERS}},
        "max_output_tokens": 3,
    },
    "messages": {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "3"}],
                    }
                ],
            },
        ],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "add", "input_schema": PARAMETERS}],
        "max_tokens": 3,
        "stop_sequences": ["z"],
        "tool_choice": {"type": "auto"},
        "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
    },
}
STRANGE = [None, True, 0, -1, 1.5, 10**30, "", "x", "tool", "text", "function", [], {}, [None]]
STRANGE += [[[]], [{}], {"type": None}, {"text": 3}, {"type": "text", "text": None}, "</think>"]


def changed(value, rng, share):
    """A body in which a share of the values is another."""
    if rng.random() < share:
        return rng.choice(STRANGE)
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if rng.random() > share / 3}
        return {key: changed(each, rng, share) for key, each in kept.items()}
    return [changed(each, rng, share) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", [*BODIES, "messages/count_tokens"])
async def test_strange_bodies_are_answered_or_refused(path):
    rng, body = random.Random(path), BODIES[path.removesuffix("/count_tokens")]
    async with endpoint(CALL, "two") as (llm, _):
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            statuses = []
            for _ in range(400):
                sent = changed(body, rng, rng.choice([0.02, 0.05, 0.15]))
                answer = await client.post(f"{llm.base_url}/{path}", json=sent)
                assert answer.status_code in (200, 400), (sent, answer.text)
                statuses.append(answer.status_code)
            assert set(statuses) == {200, 400}


async def test_fields_of_a_tool_may_be_null():
    async with endpoint(CALL) as (llm, _):
        client = openai_client(llm)
        tool = {"type": "function", "name": "add", "description": None, "strict": None}
        tool["parameters"] = None
        reply = await client.responses.create(model="m", input="hi", tools=[tool])
        function = {"name": "add", "description": None, "parameters": None, "strict": None}
        message = await chat(client, HI, tools=[{"type": "function", "function": function}])
        assert [reply.output[0].name, message.tool_calls[0].function.name] == ["add", "add"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_official_client_reads_text_and_several_calls(dialect, is_streamed):
    reply = f"Adding. {CALL}{CALL.replace('1', '7')}"
    async with endpoint(reply) as (llm, _):
        text, calls, finish, num_tokens = await DIALECTS[dialect][is_streamed](llm)
    assert text == "Adding."
    assert calls == [("add", {"a": 1, "b": [2, "x"]}), ("add", {"a": 7, "b": [2, "x"]})]
    assert finish == DIALECTS[dialect][2]
    assert num_tokens == len(CHAT.encode(reply)) + 1  # the end token


LAST_EVENTS = {
    "chat/completions": "data: [DONE]",
    "responses": "event: response.completed",
    "messages": "event: message_stop",
}


@pytest.mark.parametrize("path", LAST_EVENTS)
async def test_a_stream_ends_with_the_last_event_of_its_dialect(path):
    async with endpoint("one") as (llm, _):
        body = {"input": "hi"} if path == "responses" else {"messages": HI}
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = f"{llm.base_url}/{path}"
            assert (
                (await client.post(url, json=body | {"stream": True}))
                .text.strip()
                .split("\n\n")[-1]
                .startswith(LAST_EVENTS[path])
            )


BEGUN = [*HI, {"role": "assistant", "content": "The answer is"}]


async def continued_chat(llm, messages, is_streamed=False):
    more = {"continue_final_message": True, "add_generation_prompt": False}
    more = more if messages[-1]["role"] == "assistant" else {}
    asked = {"model": "m", "messages": messages, "tools": TOOLS, "extra_body": more}
    client = openai_client(llm).chat.completions
    if not is_streamed:
        return (await client.create(**asked)).choices[0].message
    async with client.stream(**asked) as events:
        return (await events.get_final_completion()).choices[0].message


async def continued_messages(llm, messages, is_streamed=False):
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    asked = {"model": "m", "messages": messages, "tools": tools, "max_tokens": 200}
    client = anthropic_client(llm).messages
    if not is_streamed:
        return await client.create(**asked)
    async with client.stream(**asked) as events:
        return await events.get_final_message()


CONTINUED = {"chat": continued_chat, "messages": continued_messages}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", CONTINUED)
async def test_a_reply_continues_a_last_message_of_the_assistant(dialect, is_streamed):
    ask = CONTINUED[dialect]
    async with endpoint(" 42.", "yes", "y") as (llm, _):
        reply = await ask(llm, BEGUN, is_streamed)
        text = reply.content if dialect == "chat" else reply.content[0].text
        echo = {"role": "assistant", "content": BEGUN[-1]["content"] + text}
        more = {"role": "user", "content": "sure?"}
        await ask(llm, [*HI, echo, more])
        more = [*HI, echo, more, {"role": "assistant", "content": "yes"}, *HI, BEGUN[-1]]
        await ask(llm, more, is_streamed)
        (trajectory,) = llm.trajectories(1.0)
    assert text == " 42."
    turns, (_, text) = trajectory.turns, text_of(trajectory).split("<|end|>\n", 1)
    assert CHAT.tokenizer.decode(turns[0].new_ids).endswith(
        "<|start|>user\nhi<|end|>\n<|start|>assistant\nThe answer is"
    )
    assert text == (
        "<|start|>user\nhi<|end|>\n<|start|>assistant\nThe answer is 42.<|end|>\n"
        "<|start|>user\nsure?<|end|>\n<|start|>assistant\nyes<|end|>\n"
        "<|start|>user\nhi<|end|>\n<|start|>assistant\nThe answer isy<|end|>"
    )
    assert [turn.completion.text for turn in turns] == [" 42.", "yes", "y"]
    assert trajectory.messages[1] == echo


async def test_calls_behind_the_begin_of_a_message_are_read():
    async with endpoint(f" added.{CALL}", "3") as (llm, _):
        reply = await continued_chat(llm, BEGUN)
        (call,) = reply.tool_calls
        echo = reply.model_dump(exclude_none=True) | {"content": "The answer is added."}
        result = {"role": "tool", "content": "3", "tool_call_id": call.id}
        await continued_chat(llm, [*HI, echo, result])
        (trajectory,) = llm.trajectories(1.0)
    assert reply.content == " added." and call.function.name == "add"
    assert [turn.is_fresh for turn in trajectory.turns] == [True, False]
    assert f"The answer is added.{CALL}<|end|>\n<|start|>tool\n3<|end|>" in text_of(trajectory)


NOT_CONTINUED = {
    "another role": ({}, {"messages": HI}, "the last message must be the assistant's text"),
    "both": ({"add_generation_prompt": True}, {}, "set add_generation_prompt to false"),
    "the template refuses": ({}, {"chat": "ends"}, "must end with a user"),
    "the template drops": ({}, {"chat": "drops"}, "does not render the last message's text"),
    "behind an API": ({}, {}, "behind an API cannot continue"),
}


@pytest.mark.parametrize("name", NOT_CONTINUED)
async def test_a_message_that_cannot_be_continued_is_refused_with_the_reason(name):
    more, setting, reason = NOT_CONTINUED[name]
    checks = {
        "ends": "{% if messages[-1].role != 'user' %}{{ raise_exception('must end with a user') }}{% endif %}",
        "drops": "{% if messages[-1].role == 'assistant' %}{% set messages = messages[:-1] %}{% endif %}",
    }
    tokenizer = copy.deepcopy(CHAT.tokenizer)
    tokenizer.chat_template = checks.get(setting.get("chat"), "") + tokenizer.chat_template
    async with endpoint("x", chat=Chat(tokenizer, tool_reader=ToolCalls)) as (llm, tree):
        if name == "behind an API":
            tree.actor.chat = None
        body = {"continue_final_message": True} | more
        with pytest.raises(openai.BadRequestError, match=reason):
            await chat(openai_client(llm), setting.get("messages", BEGUN), extra_body=body)
        assert tree.nodes == []


class City(pydantic.BaseModel):
    name: str
    people: int


async def chat_parsed(llm, is_streamed):
    client = openai_client(llm).chat.completions
    asked = {"model": "m", "messages": HI, "response_format": City}
    if not is_streamed:
        return (await client.parse(**asked)).choices[0].message.parsed
    async with client.stream(**asked) as events:
        return (await events.get_final_completion()).choices[0].message.parsed


async def responses_parsed(llm, is_streamed):
    client = openai_client(llm).responses
    asked = {"model": "m", "input": "hi", "text_format": City}
    if not is_streamed:
        return (await client.parse(**asked)).output_parsed
    async with client.stream(**asked) as events:
        return (await events.get_final_response()).output_parsed


async def messages_parsed(llm, is_streamed):
    client = anthropic_client(llm).messages
    asked = {"model": "m", "messages": HI, "max_tokens": 99, "output_format": City}
    if not is_streamed:
        return (await client.parse(**asked)).parsed_output
    async with client.stream(**asked) as events:
        return (await events.get_final_message()).parsed_output


PARSED = {"chat": chat_parsed, "responses": responses_parsed, "messages": messages_parsed}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", PARSED)
async def test_a_wanted_schema_is_not_enforced_and_counted(dialect, is_streamed):
    """The clients parse by themselves; the second reply does not fit."""
    async with endpoint('{"name": "Rome", "people": 3}', "Rome") as (llm, _):
        parsed = await PARSED[dialect](llm, is_streamed)
        assert all(request.schema is None for request in llm.stored.values())
        assert len(llm.stored) == (dialect == "responses")
        with pytest.raises(ValueError):
            await PARSED[dialect](llm, is_streamed)
        parsed, trajectory = (parsed, llm.trajectories(1.0)[0])
    assert parsed == City(name="Rome", people=3)
    assert trajectory.metrics["agent_overridden_response_format"] == 2
    assert text_of(trajectory).startswith("<|start|>user\nhi<|end|>\n<|start|>assistant\n{")


@pytest.mark.parametrize("dialect", PARSED)
async def test_a_wanted_schema_is_refused_where_the_run_says_so(dialect):
    async with endpoint(CALL, config=AgentsConfig(response_format="refuse")) as (llm, tree):
        with pytest.raises(
            (openai.BadRequestError, anthropic.BadRequestError), match="response_format refuse"
        ):
            await PARSED[dialect](llm, False)
        await DIALECTS[dialect][0](llm)  # A request without a schema is answered.
        assert tree.num_turns == 1


async def test_a_schema_is_enforced_by_engines_with_grammars_alone():
    refused = {
        "no engine with grammars": {},
        "calls of tools do not fit it": {"tools": TOOLS},
    }
    config = AgentsConfig(response_format="enforce")
    async with endpoint('{"name": "Rome", "people": 3}', config=config) as (llm, tree):
        client = openai_client(llm)
        asked = {"response_format": {"type": "json_object"}}
        for error, more in refused.items():
            with pytest.raises(openai.BadRequestError, match=error):
                await chat(client, HI, **asked, **more)
        tree.actor.engine.has_grammars = True
        sampled, generate = [], tree.actor.engine.generate

        async def note(prompt_ids, params, **more):
            sampled.append(params.json_schema)
            return await generate(prompt_ids, params, **more)

        tree.actor.engine.generate = note
        await chat(client, HI, **asked, tools=TOOLS, tool_choice="none")
        await chat(client, HI)
        prompt = "{{- '<|start|>assistant\n<think>\n' }}"
        template = CHAT.chat_template.replace("{{- '<|start|>assistant\n' }}", prompt)
        tree.actor.chat = Chat(copy.deepcopy(CHAT.tokenizer), template)
        with pytest.raises(openai.BadRequestError, match="begins each reply with thoughts"):
            await chat(client, HI, **asked)
        assert (sampled, llm.trajectories(1.0)[0].metrics["agent_overridden"]) == (
            ['{"type": "object"}', ""],
            0,
        )


ANY_CITY = {"type": "json_schema", "schema": City.model_json_schema()}
FORMATS = [  # (module, fields, schema)
    (chat_completions, {"response_format": {"type": "text"}}, None),
    (chat_completions, {"response_format": {"type": "json_object"}}, {"type": "object"}),
    (responses, {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
    (responses, {"text": {"verbosity": "low"}}, None),
    (responses, {"text": {"format": ANY_CITY}}, City.model_json_schema()),
    (messages, {"output_config": {"effort": "low"}}, None),
    (messages, {"output_config": {"format": ANY_CITY}}, City.model_json_schema()),
    (messages, {"output_format": ANY_CITY}, City.model_json_schema()),
]


@pytest.mark.parametrize("dialect, fields, schema", FORMATS)
def test_each_dialect_has_its_field_for_a_schema(dialect, fields, schema):
    body = {"messages": HI, "input": "hi"}
    assert dialect.read(body | fields).schema == schema
    for wrong, error in ({"type": "regex"}, "regex"), (ANY_CITY | {"schema": {"type": 3}}, "not a"):
        is_direct = fields.keys() <= {"response_format", "output_format"}
        inner = dict.fromkeys(fields, wrong if is_direct else {"format": wrong})
        with pytest.raises(Refusal, match=error):
            dialect.read(body | inner)


async def test_a_conversation_by_responses_continues_by_items_and_by_id():
    async with endpoint(f"I add {CALL}", "three", "bye") as (llm, _):
        client = openai_client(llm)
        tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
        asked = {"model": "m", "tools": [tool], "instructions": "Be short."}
        items = [{"role": "user", "content": "1 + 2"}]
        first = await client.responses.create(input=items, **asked)
        items += [item.model_dump(exclude_none=True) for item in first.output]
        call_id = first.output[-1].call_id
        items.append({"type": "function_call_output", "call_id": call_id, "output": "3"})
        second = await client.responses.create(input=items, **asked)
        third = await client.responses.create(
            input="thanks", previous_response_id=second.id, **asked
        )
        with pytest.raises(openai.BadRequestError, match="no reply of this episode"):
            await client.responses.create(input="x", previous_response_id="resp_1", **asked)
        reply, (trajectory,) = (third.output_text, llm.trajectories(1.0))
    assert reply == "bye"
    assert len(trajectory.turns) == 3
    assert len(stream_of(trajectory)) == sum(
        len(turn.new_ids) + len(turn.completion.token_ids) for turn in trajectory.turns
    )


START = "<|start|>user\nhi<|end|>\n<|start|>assistant\none<|end|>"
REST = "\n<|start|>user\nand?<|end|>\n<|start|>assistant\ntwo<|end|>"
BRIEF, RUDE = (f"<|start|>system\nBe {how}.<|end|>\n" for how in ("brief", "rude"))
INSTRUCTIONS = {
    "equal": ("Be brief.", [BRIEF + START + REST]),
    "new": ("Be rude.", [BRIEF + START, RUDE + START + REST]),
    "none": (openai.omit, [BRIEF + START, START + REST]),
}


@pytest.mark.parametrize("second", INSTRUCTIONS)
async def test_a_response_inherits_the_messages_and_not_the_instructions(second):
    instructions, expected = INSTRUCTIONS[second]
    async with endpoint("one", "two") as (llm, _):
        client = openai_client(llm).responses
        first = await client.create(model="m", input="hi", instructions="Be brief.")
        more = {"previous_response_id": first.id, "instructions": instructions}
        await client.create(model="m", input="and?", **more)
        assert [text_of(trajectory) for trajectory in llm.trajectories(1.0)] == expected


async def test_items_of_earlier_responses_are_named_by_their_ids():
    async with endpoint(f"I add {CALL}", "three") as (llm, _):
        client = openai_client(llm)
        tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
        asked = {"model": "m", "tools": [tool]}
        first = await client.responses.create(input=HI, **asked)
        reply, call = first.output
        items = [
            {"role": "user", "content": "hi"},
            {"type": "item_reference", "id": reply.id},
            {"type": None, "id": call.id},
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
        ]
        second = await client.responses.create(input=items, **asked)
        unknown = [{"type": "item_reference", "id": "msg_1"}]
        with pytest.raises(openai.BadRequestError, match="'msg_1' is no item of this episode"):
            await client.responses.create(input=unknown, **asked)
        async with endpoint("one") as (of_other, _):
            for more, error in (
                ({"input": [{"type": "item_reference", "id": reply.id}]}, "is no item of this"),
                ({"input": "x", "previous_response_id": first.id}, "is no reply of this"),
            ):
                with pytest.raises(openai.BadRequestError, match=error):
                    await openai_client(of_other).responses.create(**more, **asked)
        reply, (trajectory,) = (second.output_text, llm.trajectories(1.0))
    assert reply == "three"
    assert [turn.is_fresh for turn in trajectory.turns] == [True, False]


async def test_calls_of_custom_tools_are_read_and_other_items_are_refused():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+ a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    shell = {"type": "local_shell_call", "call_id": "s", "action": {}, "status": "completed"}
    async with endpoint("one") as (llm, tree):
        client = openai_client(llm)
        reply = await client.responses.create(model="m", input=items)
        with pytest.raises(openai.BadRequestError, match="type 'local_shell_call' is not"):
            await client.responses.create(model="m", input=[*items, shell])
        answer, (_, asked, result, _) = (reply.output_text, tree.nodes[0].conversation.history)
    assert answer == "one" and result["content"] == "done"
    (call,) = asked["tool_calls"]
    assert call["function"] == {"name": "patch", "arguments": {"input": "+ a"}}


async def test_clients_find_models_and_that_something_listens():
    async with endpoint("one") as (llm, _), httpx.AsyncClient() as plain:
        probes = [await plain.request(verb, llm.address) for verb in ("GET", "HEAD")]
        assert [(probe.status_code, probe.content) for probe in probes] == [(200, b"")] * 2
        keyless = await plain.get(f"{llm.base_url}/models/policy")
        assert keyless.status_code == 401
        other = anthropic_client(llm)
        client = openai_client(llm)
        models = [await client.models.retrieve("org/any"), await other.models.retrieve("any")]
        listed = [(await one.models.list()).data[0].id for one in (client, other)]
        assert ([model.id for model in models], models[1].created_at.year, listed) == (
            ["org/any", "any"],
            1970,
            ["policy"] * 2,
        )


async def test_a_conversation_by_messages_continues_by_blocks():
    async with endpoint(f"<think>so</think>I add {CALL}", "three") as (llm, _):
        client = anthropic_client(llm)
        asked = {"model": "m", "max_tokens": 200, "system": [{"type": "text", "text": "Hm."}]}
        asked["tools"] = [{"name": "add", "input_schema": PARAMETERS}]
        first = await client.messages.create(messages=HI, **asked)
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"]}
        result["content"] = [{"type": "text", "text": "3"}]
        more = [*HI, {"role": "assistant", "content": blocks}]
        more.append({"role": "user", "content": [result]})
        counted = await client.messages.count_tokens(
            model="m", messages=HI, system="Hm.", tools=asked["tools"]
        )
        second = await client.messages.create(messages=more, **asked)
        counted, reply, (trajectory,) = (
            counted.input_tokens,
            second.content[0].text,
            llm.trajectories(1.0),
        )
    assert reply == "three" and len(trajectory.turns) == 2
    assert counted == len(trajectory.turns[0].new_ids)


@beta_async_tool
async def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
async def test_a_thread_is_one_conversation(is_streamed, forgets):
    """`forgets`: the second request finds no thread, and the client sends the conversation."""
    sent = []
    async with endpoint(f"<think>so</think>I add {ADD}", "three", "bye") as (llm, _):
        client = anthropic_client(llm).beta.messages
        asked = {"model": "m", "max_tokens": 200, "system": "Hm.", "tools": [add]}
        runner = client.tool_runner(messages=HI, stream=is_streamed, **asked)
        async for reply in runner:
            message = await reply.get_final_message() if is_streamed else reply
            sent.append(llm.stored[message.id].continues is not None)
            assert all(block.signature for block in message.content if block.type == "thinking")
            if forgets:
                llm.stored.clear()
        message, (trajectory,) = (message.content[0].text, llm.trajectories(1.0))
    assert message == "three" and sent == [False, not forgets]
    assert [turn.is_fresh for turn in trajectory.turns] == [True, False]
    assert text_of(trajectory).count("user\nhi<") == text_of(trajectory).count("Hm.") == 1
    assert "\n3<|end|>" in text_of(trajectory)


async def test_threads_branch_repeat_and_end(monkeypatch):
    monkeypatch.setattr("rl_core.environments.agents.endpoint.MAX_STORED", 3)
    async with endpoint("one", "two", "three", "four") as (llm, tree):
        client = anthropic_client(llm).beta.messages
        create = partial(client.create, model="m", max_tokens=99)

        async def continued(reply, text, **more):
            thread = {"type": "continue", "previous_message_id": reply.id}
            new = [{"role": "user", "content": text}]
            return await create(messages=new, thread=thread, **more)

        asked = {"thread": {"type": "create"}, "output_config": {"format": ANY_CITY}}
        first = await create(messages=HI, system="Hm.", **asked)
        assert llm.stored[first.id].schema is None
        left, right = [await continued(first, text) for text in ("left", "right")]
        again = await continued(first, "left", **RETRY)
        assert again.id == left.id and tree.num_retries == 1
        message = {"role": "assistant", "content": "one"}
        sent = [*HI, message, {"role": "user", "content": "left"}]
        again = await create(messages=sent, system="Hm.", **RETRY)
        assert again.id == left.id and tree.num_retries == 2
        with pytest.raises(anthropic.BadRequestError, match="system is the thread's") as error:
            await continued(left, "x", system="Ho.")
        assert error.value.body["error"]["details"]["error_code"].endswith("mismatch")
        await continued(right, "on")
        with pytest.raises(anthropic.NotFoundError, match="the last 3 are kept"):
            await continued(first, "late")
        counted = await client.count_tokens(model="m", messages=HI)
        left, right = ([text_of(branch) for branch in llm.trajectories(1.0)], counted.input_tokens)[
            0
        ]
    assert left.endswith("one<|end|>\n<|start|>user\nleft<|end|>\n<|start|>assistant\ntwo<|end|>")
    assert right.count("Hm.") == 1 and right.endswith("on<|end|>\n<|start|>assistant\nfour<|end|>")


SDK_TYPES = {
    chat_completions: [CompletionCreateParamsStreaming],
    responses: [ResponseCreateParamsStreaming],
    messages: [MessageCreateParamsStreaming, BetaMessageCreateParamsStreaming],
}
OF_OTHER_CLIENTS = {
    chat_completions: {"add_generation_prompt", "continue_final_message"},
    responses: {"client_metadata"},
    messages: {"output_format", "temperature", "top_k", "top_p"},
}
OF_HEADERS = {"betas", "user_profile_id", "workspace_id"}


@pytest.mark.parametrize("dialect", SDK_TYPES, ids=lambda dialect: dialect.PATH)
def test_each_field_of_the_clients_types_is_sorted(dialect):
    known = set()
    for each in SDK_TYPES[dialect]:
        known |= get_type_hints(each).keys() - OF_HEADERS
    fields = dialect.FIELDS
    listed = [*fields.used.split(), *fields.harmless.split(), *fields.decided.split()]
    assert len(set(listed)) == len(listed)
    assert known - {*listed, *fields.refused} <= REFUSED.keys()
    assert {*listed, *fields.refused} - known == OF_OTHER_CLIENTS[dialect]


@pytest.mark.parametrize("dialect", SDK_TYPES, ids=lambda dialect: dialect.PATH)
def test_fields_are_refused_or_counted_by_name(dialect):
    body = {"messages": HI, "input": "hi", "model": "m"}
    body = {name: value for name, value in body.items() if name in dialect.FIELDS.used.split()}
    for name in {**REFUSED, **dialect.FIELDS.refused}.keys() - dialect.FIELDS.used.split():
        with pytest.raises(Refusal, match=f"^{name} is not supported; "):
            dialect.read(body | {name: "auto"})
        assert dialect.read(body | {name: None}).overridden == []
    assert dialect.read(body | dict.fromkeys(dialect.FIELDS.harmless.split(), "x")).overridden == []
    for name in (*dialect.FIELDS.decided.split(), "of_a_vendor"):
        assert dialect.read(body | {name: 0.5}).overridden == [name]
    with pytest.raises(Refusal, match="is not the name of a field"):
        dialect.read(body | {"a b": 1})
    with pytest.raises(Refusal, match="did you mean 'temperature'"):
        dialect.read(body | {"temprature": 1})


@pytest.mark.parametrize(
    "dialect, fields, error",
    [
        (chat_completions, {"audio": {"id": "a"}}, "audio of a message is not supported"),
        (chat_completions, {"function_call": {"name": "f"}}, "function_call of a message is not"),
        (messages, {"clear_at": "next_user_message"}, "clear_at is not supported"),
    ],
)
def test_fields_of_a_message_are_refused(dialect, fields, error):
    with pytest.raises(Refusal, match=error):
        dialect.read({"messages": [*HI, {"role": "assistant", "content": "x"} | fields]})


def test_edits_of_the_context_are_refused_but_those_of_thinking():
    def read(kind, **more):
        edits = [{"type": kind} | more]
        return messages.read({"messages": HI, "context_management": {"edits": edits}})

    assert read("clear_thinking_20251015", keep="all").overridden == []
    assert read("clear_thinking_20251015").overridden == ["context_management"]
    with pytest.raises(Refusal, match="context_management: an edit of type 'compact_20260112'"):
        read("compact_20260112")


async def test_what_cannot_be_had_is_refused_in_the_dialects_words():
    async with endpoint("one") as (llm, _):
        client = openai_client(llm)
        with pytest.raises(openai.BadRequestError, match="part of type 'input_audio' is not"):
            await chat(client, [{"role": "user", "content": [{"type": "input_audio"}]}])
        with pytest.raises(openai.BadRequestError, match="at least 1"):
            await chat(client, HI, max_tokens=0)
        with pytest.raises(openai.BadRequestError, match="n: 129 must be at most 128"):
            await chat(client, HI, n=129)
        assert chat_completions.read({"messages": HI, "n": 128}).num_replies == 128
        call = ASKED_CALL | {"function": {"name": 3, "arguments": "{}"}}
        with pytest.raises(openai.BadRequestError, match="the name '3' must be a text"):
            await chat(client, [*HI, {"role": "assistant", "tool_calls": [call]}])
        wrong = openai_client(llm).with_options(api_key="sk-other")
        with pytest.raises(openai.AuthenticationError, match="no episode"):
            await chat(wrong, HI)
        assert llm.trees["policy"].nodes == []


def picture(number: int) -> str:
    """A PNG of one colour, as base64."""
    buffer = io.BytesIO()
    Image.new("RGB", (3 + number, 4), (9, 9, number)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def image_url(data: str) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def input_image(data: str) -> dict:
    return {"type": "input_image", "detail": "low", "image_url": f"data:image/png;base64,{data}"}


def source(data: str) -> dict:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


async def look_chat(llm, first, result):
    asked = [{"role": "user", "content": [{"type": "text", "text": "a"}, *map(image_url, first)]}]
    reply = await chat(openai_client(llm), asked, tools=TOOLS)
    asked += [reply.model_dump(exclude_none=True)]
    content = [image_url(result), {"type": "text", "text": "b"}]
    asked += [{"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": content}]
    await chat(openai_client(llm), asked, tools=TOOLS)


async def look_responses(llm, first, result):
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    content = [{"type": "input_text", "text": "a"}, *map(input_image, first)]
    asked = [{"role": "user", "content": content}]
    create = openai_client(llm).responses.create
    reply = await create(model="m", input=asked, tools=tools)
    asked += [item.model_dump() for item in reply.output]
    output = [input_image(result), {"type": "input_text", "text": "b"}]
    asked += [{"type": "function_call_output", "call_id": asked[-1]["call_id"], "output": output}]
    await create(model="m", input=asked, tools=tools)


async def look_messages(llm, first, result):
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    content = [{"type": "text", "text": "a"}, *map(source, first)]
    asked = [{"role": "user", "content": content}]
    client = anthropic_client(llm).messages
    reply = await client.create(model="m", messages=asked, tools=tools, max_tokens=200)
    asked += [{"role": "assistant", "content": [block.model_dump() for block in reply.content]}]
    content = [source(result), {"type": "text", "text": "b"}]
    block = {"type": "tool_result", "tool_use_id": reply.content[-1].id, "content": content}
    asked += [{"role": "user", "content": [block]}]
    counted = await client.count_tokens(model="m", messages=asked, tools=tools)
    reply = await client.create(model="m", messages=asked, tools=tools, max_tokens=200)
    assert counted.input_tokens == reply.usage.input_tokens


LOOKS = {
    "chat": (look_chat, openai.BadRequestError),
    "responses": (look_responses, openai.BadRequestError),
    "messages": (look_messages, anthropic.BadRequestError),
}


@pytest.mark.parametrize("dialect", LOOKS)
async def test_programs_send_images_in_messages_and_results_of_tools(dialect):
    look, _ = LOOKS[dialect]
    pictures = [f"data:image/png;base64,{picture(number)}" for number in range(4)]
    async with endpoint(CALL, "seen", CALL, "seen") as (llm, _):
        # Two conversations that differ in one image alone.
        await look(llm, [picture(0), picture(1)], picture(2))
        await look(llm, [picture(0), picture(3)], picture(2))
        trajectories = llm.trajectories(1.0)
    assert [len(trajectory.turns) for trajectory in trajectories] == [2, 2]
    for second, trajectory in zip((1, 3), trajectories, strict=True):
        asked, _, result, _ = trajectory.messages
        parts = [{"type": "image", "image": pictures[n]} for n in (0, second, 2)]
        assert asked["content"] == [{"type": "text", "text": "a"}, *parts[:2]]
        assert result["role"] == "tool"
        assert result["content"] == [parts[2], {"type": "text", "text": "b"}]
        sizes = [[image.width for image in turn.images] for turn in trajectory.turns]
        assert sizes == [[3, 3 + second], [5]]
        assert len([i for i in stream_of(trajectory) if i < 0]) == 3


BROKEN = {
    "damaged": (lambda data: data[:60], "is damaged|not base64|is not an image"),
    "an SVG": (lambda data: base64.b64encode(b"<svg/>").decode(), "an SVG, which has no pixels"),
    "a bomb": (
        lambda data: base64.b64encode(png_of_size(20_000, 20_000)).decode(),
        "has more than 64,000,000 pixels",
    ),
    "too many pixels": (str, "images of a request have more than 2 pixels together"),
}


@pytest.mark.parametrize("dialect", LOOKS)
@pytest.mark.parametrize("kind", [*BROKEN, "a model that reads text alone"])
async def test_images_that_cannot_be_read_are_refused_by_name(dialect, kind, monkeypatch):
    look, error = LOOKS[dialect]
    if kind == "too many pixels":
        monkeypatch.setattr(requests, "MAX_PIXELS", 2)
        monkeypatch.setattr(requests, "PIXELS_LEFT", ContextVar("PIXELS_LEFT", default=2))
    change, reason = BROKEN.get(kind, (str, "the model reads text alone"))
    blind = Chat(CHAT.tokenizer, tool_reader=ToolCalls)
    async with endpoint("one", chat=CHAT if kind in BROKEN else blind) as (llm, tree):
        with pytest.raises(error, match=reason):
            await look(llm, [change(picture(0))], picture(1))
        assert tree.nodes == []


@pytest.mark.parametrize(
    "path, message, error",
    [
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}},
         "an image is at 'http://x/a.png': a run downloads nothing"),
        ("/v1/messages", {"type": "image", "source": {"type": "file", "file_id": "f"}},
         "has none of the keys"),
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "https://x/a.png"}},
         "an image is at 'https://x/a.png': a run downloads nothing"),
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
         "paths are read in rows of a file alone"),
        ("/v1/responses", {"type": "input_image", "image_url": "http://x/a.png"},
         "an image is at 'http://x/a.png': a run downloads nothing"),
        ("/v1/responses", {"type": "input_image", "file_id": "f"},
         "a part of type 'input_image' has no image; it must be data:image/png"),
    ],
)  # fmt: skip
async def test_images_elsewhere_are_refused(path, message, error):
    async with endpoint("one") as (llm, _), httpx.AsyncClient() as client:
        asked = [{"role": "user", "content": [message]}]
        body = {"model": "m", "max_tokens": 9, "messages": asked, "input": asked}
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        url = llm.anthropic_url + path
        reply = await client.post(url, json=body, headers=headers)
    assert reply.status_code == 400 and error in reply.json()["error"]["message"], reply.text


async def test_a_path_that_is_not_there_says_which_address_fits_which_client():
    async with endpoint("one") as (llm, _):
        client = openai_client(llm).with_options(base_url=llm.anthropic_url)
        with pytest.raises(openai.NotFoundError, match="no GET /models; the base URL of OpenAI"):
            await client.models.list()
        other = anthropic_client(llm).with_options(base_url=llm.base_url)
        with pytest.raises(
            anthropic.NotFoundError, match="no GET /v1/v1/models; the base URL of OpenAI"
        ):
            await other.models.list()


async def test_bodies_are_bounded_and_must_be_json():
    async with endpoint("one") as (llm, _), httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        answers = []
        for body in (b"x" * (MAX_BODY_BYTES + 1), b"{", b"[]", b"[" * 100_000):
            url = f"{llm.base_url}/chat/completions"
            reply = await client.post(url, content=body, headers=headers)
            answers.append((reply.status_code, "message" in reply.json()["error"]))
        assert answers == [(413, True), (400, True), (400, True), (400, True)]


async def test_a_full_context_is_told_and_makes_the_episode_truncated():
    async with endpoint("one", "two", max_context_tokens=60) as (llm, tree):
        client = openai_client(llm)
        reply = await chat(client, HI)
        more = [*HI, reply.model_dump(), {"role": "user", "content": "m" * 30}]
        with pytest.raises(openai.BadRequestError) as error:
            await chat(client, more)
        assert error.value.code == "context_length_exceeded"
        assert tree.is_truncated
        (trajectory,) = llm.trajectories(1.0)
    assert trajectory.status == "truncated" and len(trajectory.turns) == 1


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "count"])
async def test_messages_that_cannot_fit_are_refused_before_they_are_encoded(
    dialect, monkeypatch, capsys
):
    long = [{"role": "user", "content": "m" * 4_000_000}]
    encoded = []

    async def ask(llm):
        if dialect == "chat":
            return await chat(openai_client(llm), long)
        if dialect == "responses":
            return await openai_client(llm).responses.create(model="m", input=long)
        client = anthropic_client(llm).messages
        if dialect == "count":
            return await client.count_tokens(model="m", messages=long)
        return await client.create(model="m", messages=long, max_tokens=9)

    async with endpoint("one", max_context_tokens=1000) as (llm, tree):
        monkeypatch.setattr(CHAT, "encode", lambda text, *_: encoded.append(text) or [1])
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as error:
            await ask(llm)
        assert "the messages have at least 4000000 tokens" in str(error.value)
        assert (tree.is_truncated, tree.num_turns, tree.actor.conversations) == (True, 0, [])
    assert not encoded
    assert "a program that cannot fit into the context of 1000 tokens" in capsys.readouterr().err


def tool_list(number):
    functions = [{"name": f"tool_{n}", "parameters": PARAMETERS} for n in range(number)]
    return [{"type": "function", "function": function} for function in functions]


async def test_threads_render_tools_a_constant_number_of_times(monkeypatch):
    number, rendered, apply = 400, [], CHAT.tokenizer.apply_chat_template
    loop_thread = threading.get_ident()

    def note(messages, tools=None, **more):
        rendered.append((len(tools or ()), threading.get_ident() == loop_thread))
        return apply(messages, tools=tools, **more)

    tokenizer = copy.deepcopy(CHAT.tokenizer)
    fresh = Chat(tokenizer, tool_reader=ToolCalls)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", staticmethod(note))
    async with endpoint(CALL, chat=fresh) as (llm, tree):
        await chat(openai_client(llm), HI, tools=tool_list(number))
        assert tree.num_turns == 1
    assert sum(num_tools for num_tools, _ in rendered) < 6 * number
    # The loop asks once whether the template renders tools at all.
    assert sum(is_in_loop for num_tools, is_in_loop in rendered if num_tools) <= 1


LARGE = {
    "many values": ({"metadata": [[]] * 1_000_001}, "more than 1,000,000 values"),
    "many tools": ({"tools": tool_list(300)}, "the prompt has at least .* which cannot fit"),
}


@pytest.mark.parametrize("name", LARGE)
async def test_what_grows_with_a_request_is_bounded_before_it_is_encoded(name, monkeypatch):
    more, error = LARGE[name]
    async with endpoint("one", max_context_tokens=20_000) as (llm, tree):
        monkeypatch.setattr(Chat, "encode", None)
        with pytest.raises(openai.BadRequestError, match=error):
            await openai_client(llm).chat.completions.create(
                **{"model": "m", "messages": HI, "extra_body": more}
            )
        assert (tree.num_turns, tree.actor.conversations) == (0, [])


async def test_turns_beyond_max_turns_are_refused():
    async with endpoint("one", "two", max_turns=1) as (llm, _):
        await chat(openai_client(llm), HI)
        with pytest.raises(openai.BadRequestError, match="1 turns"):
            await chat(openai_client(llm), [{"role": "user", "content": "ho"}])
        assert llm.trajectories(1.0)[0].status == "truncated"


def no_system_chat():
    """CHAT, whose template refuses the word "bad" and system messages."""
    tokenizer = copy.deepcopy(CHAT.tokenizer)
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.content == 'bad' or m.role == 'system' %}"
        "{{ raise_exception('no') }}{%- endif %}{%- endfor %}" + tokenizer.chat_template
    )
    return Chat(tokenizer, tool_reader=ToolCalls)


def test_a_refused_request_leaves_no_trace():
    async def play(*refused):
        async with endpoint("one", "two", max_turns=3, chat=no_system_chat()) as (llm, tree):
            client = openai_client(llm)
            for length in (1, 40_000) if refused else ():
                with pytest.raises(openai.BadRequestError, match="refuses"):
                    await chat(client, [{"role": "system", "content": "be" * length}, *HI])
            reply = await chat(client, HI)
            history = [*HI, {"role": "assistant", "content": reply.content}]
            for text in refused:
                with pytest.raises(openai.BadRequestError, match="refuses"):
                    await chat(client, [*history, {"role": "user", "content": text}], n=2)
            history.append({"role": "user", "content": "good"})
            reply = await chat(client, history)
            history.append({"role": "assistant", "content": reply.content})
            for text in refused:  # behind the last turn
                with pytest.raises(openai.BadRequestError, match="refuses"):
                    await chat(client, [*history, {"role": "user", "content": text}])
            (trajectory,) = llm.trajectories(1.0)
            num_attempts = sum(map(len, tree.attempts.values()))
            kept = len(tree.actor.conversations), num_attempts, trajectory.messages
            return (
                kept,
                trajectory.status,
                trajectory.metrics,
                stream_of(trajectory),
                trajectory.turns[-1].name,
            )

    assert asyncio.run(play("bad", "bad")) == asyncio.run(play())


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_dies_fails_the_request_and_is_kept_for_the_run(is_streamed):
    """A stream has begun when its engine dies."""
    async with endpoint("one") as (llm, tree):

        async def die(*args, **kwargs):
            await asyncio.sleep(0.3 * is_streamed)
            raise EngineDied("gone")

        tree.actor.engine.generate = die
        with pytest.raises(openai.APIError, match="begins again") as error:
            async for _ in await openai_client(llm).chat.completions.create(
                model="m", messages=HI, stream=is_streamed
            ):
                pass
        assert isinstance(error.value, openai.InternalServerError) != is_streamed
        assert (str(llm.failure), llm.refused) == (
            "gone",
            "the engine died; the episode begins again",
        )


async def test_episodes_do_not_see_each_other():
    async with endpoint("one") as (llm, _), endpoint("two") as (other, tree):
        stranger = openai_client(llm).with_options(api_key=other.api_key)
        with pytest.raises(openai.AuthenticationError):
            await chat(stranger, HI)
        assert [m.id async for m in openai_client(llm).models.list()] == ["policy"]
        assert tree.nodes == []


async def test_the_socket_for_boxes_lies_in_a_folder_of_this_user_alone():
    async with endpoint("x") as (llm, _):
        [shown] = (await llm.binds()).values()
        assert Path(shown).parent.stat().st_mode & 0o777 == 0o700


async def test_connections_of_a_box_are_bounded_as_all_are(monkeypatch, capsys):
    monkeypatch.setattr("rl_core.http_guard.MAX_OPEN_FILES", 40)  # a quarter for strangers
    async with endpoint("x") as (llm, _):
        [shown] = (await llm.binds()).values()
        path = f"{shown}/{SOCKET}"
        crowd = [await asyncio.open_unix_connection(path) for _ in range(30)]
        transport = httpx.AsyncHTTPTransport(uds=path)
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(transport=transport, headers=headers) as client:
            answer = await client.get("http://x/v1/models")
        for _, writer in crowd:
            writer.close()
        assert answer.status_code == 200
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["HTTP: refused connections next to 10 others that have not sent the token"]


def test_a_message_and_its_echo_have_one_key_and_others_have_not():
    message = {"role": "assistant", "content": "<think>a</think>b"}
    assert key_of(message) == key_of({"role": "assistant", "content": " b\n"})
    assert key_of(message) != key_of({"role": "user", "content": "b"})
    assert key_of({"role": "user", "content": "a b"}) != key_of({"role": "user", "content": "ab"})
    assert key_of({"role": "tool", "content": "3"}) != key_of({"role": "tool", "content": "4"})


async def test_a_server_that_cannot_listen_for_boxes_says_so_each_time():
    server = EndpointServer()
    await server.start()
    (server.shown_folder() / SOCKET).mkdir()
    for _ in range(2):
        with pytest.raises(OSError):
            await server.listen_for_boxes()
    await server.close()
