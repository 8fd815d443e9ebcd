"""The embedded engine: promises of every engine (tokens, logprobs, seeds, stops, weights), and its
cost."""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import replace

import peft
import pytest
import torch
from kit import embedded, metrics, words
from kit import run as run_command
from models_table import load_plain, make_family
from test_engine_contract import LORAS, load, logprobs_of, random_prompts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rl_core.engines.embedded
from rl_core.data.chat import Chat
from rl_core.engines.grammars import Grammars, masked_logits
from rl_core.engines.hf_sampling import choose_sampler
from rl_core.engines.kv_slots import SlotModel, bytes_per_token, device_memory, sample_tokens
from rl_core.sampling.actor import Actor
from rl_core.types import SamplingParams

VOCAB_SIZE = 104


@pytest.fixture
def model(tiny_model):
    return load(tiny_model)


def run(engine, prompts, params, first_seed: int = 0):
    """Completions of all prompts at once; params is one for all or a list."""
    params = params if isinstance(params, list) else [params] * len(prompts)

    async def gather():
        return await asyncio.gather(
            *(
                engine.generate(p, q, seed=first_seed + i)
                for i, (p, q) in enumerate(zip(prompts, params, strict=True))
            )
        )

    return asyncio.run(gather())


def assert_logprobs(model, prompts, completions, temperature=1.0):
    """By plain forwards."""
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = logprobs_of(model, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


async def has_decoded(engine, num_steps):
    while engine.stats["decode_steps"] < num_steps:  # noqa: ASYNC110 - an event in the engine would serve tests alone
        await asyncio.sleep(0)


# Sampling


ENDS = (1, 5)  # ids
SCHEMAS = {  # schema: all texts of it
    "words": ({"enum": ["no", "noon", "yes"]}, ['"no"', '"noon"', '"yes"']),
    "numbers": ({"type": "integer", "minimum": 8, "maximum": 12}, ["8", "9", "10", "11", "12"]),
    "any": ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, ["true", "false", "null"]),
}


@pytest.mark.parametrize(
    "kind, limits",
    [("words", {}), ("numbers", {"top_k": 2}), ("any", {"top_k": 60, "top_p": 0.8})],
)
def test_a_token_is_drawn_from_the_ids_with_which_the_schema_continues(model, kind, limits):
    """Expected: by hand from all texts of the schema, with a tokenizer of one character a token."""
    pytest.importorskip("llguidance")
    schema, texts = SCHEMAS[kind]
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    text_of = {number: token for token, number in tokenizer.get_vocab().items()}
    plain = SamplingParams(max_tokens=9, stop_token_ids=ENDS)
    one = replace(plain, json_schema=json.dumps(schema), temperature=0.7, keeps_ids=True, **limits)
    prompts = random_prompts(20, seed=2)
    engine = embedded(model, num_slots=7, tokenizer=tokenizer)
    completions = run(engine, prompts, [one if i % 4 else plain for i in range(20)])
    for i, (prompt, done) in enumerate(zip(prompts, completions, strict=True)):
        if not i % 4:
            assert_logprobs(model, [prompt], [done])
            continue
        assert done.text in texts and done.token_ids[-1] in ENDS and done.finish_reason == "stop"
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + done.token_ids])).logits[0]
        for at, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
            seen = done.text[:at]
            nexts = {text[at] for text in texts if text.startswith(seen) and len(text) > at}
            allowed = {number for number, token in text_of.items() if token in nexts}
            allowed |= set(ENDS) if seen in texts else set()
            row = torch.full((VOCAB_SIZE,), -torch.inf)
            row[list(allowed)] = logits[len(prompt) - 1 + at][list(allowed)] / 0.7
            probs = expected_probs(row, **limits)
            assert logprob == pytest.approx(probs[token].log().item(), abs=1e-5)
            if limits:
                kept = {int(number) for number in done.kept_ids[at].split()}
                assert kept == set(probs.nonzero()[:, 0].tolist())


def test_masks_of_begun_texts_bound_spaces_and_have_no_added_tokens(model):
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    params = SamplingParams(max_tokens=9, json_schema=json.dumps(schema), stop_token_ids=ENDS)
    grammars = Grammars(tokenizer, VOCAB_SIZE)

    def allowed(begun):
        matcher = grammars.matcher(params, tokenizer.encode(begun, add_special_tokens=False))
        [row] = masked_logits(torch.zeros(1, VOCAB_SIZE), [matcher])
        return set(row.isfinite().nonzero()[:, 0].tolist())

    [newline, space, quote] = tokenizer.encode('\n "', add_special_tokens=False)
    assert allowed("{" + " " * 31) == {newline, space, quote}
    assert allowed("{" + " " * 32) == {quote}
    in_text = allowed('{"a": "x')
    assert len(in_text) > 80 and not in_text & tokenizer.added_tokens_decoder.keys()
    assert allowed('{"a": "x"}') - {newline, space} == set(ENDS)


def test_a_schema_that_cannot_be_enforced_is_an_error_of_its_request(model):
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    engine = embedded(model, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=9, stop_token_ids=ENDS)
    long = json.dumps({"description": "x" * (1 << 15)})
    endless = '{"$ref": "#"}'  # llguidance sees it at the first token.
    for schema, reason in ('{"type": "x"}', ""), (long, "it has 32,7"), (endless, "NoExtension"):
        with pytest.raises(ValueError, match=f"the JSON schema cannot be enforced: {reason}"):
            run(engine, [[9]], replace(params, json_schema=schema))
    with pytest.raises(ValueError, match="an end token"):
        run(engine, [[9]], SamplingParams(max_tokens=9, json_schema="{}"))
    assert run(engine, [[9]], SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward_with_fewer_slots_than_requests(any_model, temperature):
    model = load(any_model)
    prompts = random_prompts(30, seed=1)
    params = [SamplingParams(max_tokens=1 + i % 17, temperature=temperature) for i in range(30)]
    assert_logprobs(model, prompts, run(embedded(model, num_slots=7), prompts, params), temperature)


def test_rows_of_one_batch_have_temperatures_of_their_own(model):
    prompts = random_prompts(4, seed=4)
    temperatures = (1.0, 0.5, 1.0, 2.0)
    # The first row leaves first, and the last one moves into it.
    params = [
        SamplingParams(max_tokens=3 + 3 * i, temperature=t) for i, t in enumerate(temperatures)
    ]
    completions = run(embedded(model, num_slots=4), prompts, params)
    for prompt, completion, temperature in zip(prompts, completions, temperatures, strict=True):
        assert_logprobs(model, [prompt], [completion], temperature)


def test_rows_grow_beyond_the_positions_that_were_known_when_they_began(model):
    """A decode step keeps rotary positions; 256 at first."""
    prompts = [[3] * 10, [5] * 20]
    params = SamplingParams(max_tokens=260)
    engine = embedded(model, num_slots=2, max_context_tokens=300)
    assert_logprobs(model, prompts, run(engine, prompts, params))


def test_logprobs_equal_a_plain_forward_over_the_turns_of_a_session(any_model):
    model = load(any_model)
    engine = embedded(model, num_slots=3)

    async def converse(index: int):
        prompt, turns = random_prompts(1, seed=index)[0], []
        for turn in range(3):
            params = SamplingParams(max_tokens=5 + index % 4)
            completion = await engine.generate(
                prompt, params, seed=10 * index + turn, session=f"s{index}"
            )
            turns.append((prompt, completion))
            prompt = (
                prompt + completion.token_ids + random_prompts(1, seed=100 + index, longest=9)[0]
            )
        return turns

    async def converse_all():
        return await asyncio.gather(*(converse(i) for i in range(7)))

    for turns in asyncio.run(converse_all()):
        assert_logprobs(model, *zip(*turns, strict=True))


def test_a_sliding_window_is_honoured(tiny_model):
    config = AutoModelForCausalLM.from_pretrained(tiny_model).config
    config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], 6
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    prompts = random_prompts(6)
    completions = run(embedded(model), prompts, SamplingParams(max_tokens=12))
    assert_logprobs(model, prompts, completions)


def test_samples_do_not_depend_on_the_batch_or_slots(model):
    prompts, params = random_prompts(31, seed=2), SamplingParams(max_tokens=24)
    together = [c.token_ids for c in run(embedded(model, num_slots=31), prompts, params)]
    refilled = [c.token_ids for c in run(embedded(model, num_slots=4), prompts, params)]
    assert together == refilled
    alone = [
        run(embedded(model), prompts[i : i + 1], params, first_seed=i)[0].token_ids
        for i in (0, 13, 30)
    ]
    assert alone == [together[i] for i in (0, 13, 30)]


@pytest.mark.parametrize("limits", [{}, {"top_k": 8, "top_p": 0.7, "min_p": 0.1}])
def test_samples_follow_the_softmax_of_the_tokens_that_the_limits_leave(model, limits):
    """Chi-square over 3000 first tokens; six standard deviations is beyond chance."""
    prompt, temperature, count = [5, 17, 40], 1.5, 3000
    params = SamplingParams(max_tokens=1, temperature=temperature, **limits)
    completions = run(embedded(model, num_slots=500), [prompt] * count, params)
    with torch.no_grad():
        probs = expected_probs(model(torch.tensor([prompt])).logits[0, -1] / temperature, **limits)
    counts = torch.zeros(VOCAB_SIZE)
    for completion in completions:
        token = completion.token_ids[0]
        counts[token] += 1
        assert completion.logprobs[0] == pytest.approx(probs[token].log().item(), abs=1e-5)
    allowed = probs > 0
    assert counts[~allowed].sum() == 0
    expected = count * probs[allowed]
    chi_square = ((counts[allowed] - expected) ** 2 / expected).sum().item()
    freedom = int(allowed.sum()) - 1
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5 + 6, (chi_square, freedom)


@pytest.mark.parametrize("num_ids", [8192, 151_936, 50_257])
def test_a_large_vocabulary_is_sampled_by_its_running_sum(num_ids):
    """Half of the ids are excluded, and with them whole blocks."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, num_ids, generator=draw)
    logits[:, num_ids // 3 : num_ids // 3 + num_ids // 2] = -torch.inf
    uniforms = torch.rand(64, generator=draw)
    uniforms[:2] = torch.tensor([0, 1 - 2**-24])
    tokens, logprobs = sample_tokens(logits, uniforms, None).T
    cdf = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cdf, uniforms.double()[:, None], right=True)[:, 0]
    assert ((tokens - expected).abs()[2:] == 0).sum() >= 60  # Rounding may pick a neighbour.
    assert logprobs.isfinite().all()
    chosen = logits.log_softmax(-1).gather(-1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen, atol=1e-5, rtol=0)


def expected_probs(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The definition, one token at a time: top-k, top-p of the rest, min-p of the most
    likely."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token].item())[: top_k or None]
    probs = logits[ranked].softmax(0).tolist()
    kept, total = [], 0.0
    for token, prob in zip(ranked, probs, strict=True):
        if total >= top_p or prob < min_p * probs[0]:
            break
        kept.append(token)
        total += prob
    return torch.zeros_like(logits).index_copy_(0, torch.tensor(kept), logits[kept].softmax(0))


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_one_requests_limits_leave_the_others_alone(model, limit):
    prompts = random_prompts(3)
    plain = SamplingParams(max_tokens=10)
    alone = run(embedded(model), prompts, plain)
    mixed = [
        plain,
        SamplingParams(max_tokens=10, **limit),
        SamplingParams(max_tokens=10, temperature=0),
    ]
    first, narrow, greedy = run(embedded(model), prompts, mixed)
    assert first.token_ids == alone[0].token_ids
    assert first.logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)
    assert narrow.logprobs == pytest.approx([0.0] * 10, abs=1e-6)
    assert_logprobs(model, prompts[2:], [greedy])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompts[2] + greedy.token_ids])).logits[0]
    assert greedy.token_ids == logits[len(prompts[2]) - 1 : -1].argmax(-1).tolist()


# Cost


def test_a_group_prefills_its_prompt_once(model):
    prompts = [prompt for prompt in random_prompts(3, seed=5) for _ in range(8)]
    engine = embedded(model, num_slots=5)
    params = [SamplingParams(max_tokens=40 if i % 8 == 0 else 1 + i % 5) for i in range(24)]
    assert_logprobs(model, prompts, run(engine, prompts, params))
    assert engine.stats["prefill_tokens"] == sum(map(len, prompts[::8]))


def test_a_session_prefills_only_what_its_prompt_adds(model):
    engine, first = embedded(model), [3] * 20

    async def two_turns(second_of):
        params = SamplingParams(max_tokens=6)
        one = await engine.generate(first, params, seed=1, session="s")
        before = engine.stats["prefill_tokens"]
        second = second_of(one)
        two = await engine.generate(second, params, seed=2, session="s")
        assert_logprobs(model, [second], [two])
        engine.end_session("s")
        engine.end_session("never seen")
        return engine.stats["prefill_tokens"] - before

    # The last sampled token's keys were never computed.
    assert asyncio.run(two_turns(lambda one: first + one.token_ids + [7] * 5)) == 6
    assert asyncio.run(two_turns(lambda one: first + one.token_ids[:-1])) == 1
    assert asyncio.run(two_turns(lambda one: first[:12] + [9] * 4)) == 4
    assert asyncio.run(two_turns(lambda one: [9] * 4)) == 4


TRUNK = [*range(100)]
TAILS = [[99 - i, *range(i, i + 7)] for i in range(8)]


async def ask_branches(engine, params, adapter: str = "", tails=TAILS) -> list:
    """Completions of all branches of the trunk at once, each in a separate session."""
    asked = []
    for i, tail in enumerate(tails):
        more = {"seed": i, "session": f"branch {i}", "adapter": adapter}
        asked.append(engine.generate(TRUNK + tail, params, **more))
    return await asyncio.gather(*asked)


@pytest.mark.parametrize("trunk_is", ["new", "decoding", "parked"])
def test_branches_prefill_what_is_new_and_sample_what_they_would_alone(model, trunk_is):
    params = SamplingParams(max_tokens=12)
    engine = embedded(model, num_slots=9, max_context_tokens=200)

    async def talk():
        tasks = []
        if trunk_is != "new":
            most = SamplingParams(max_tokens=80 if trunk_is == "decoding" else 2)
            spoken = engine.generate(TRUNK, most, seed=0, session="trunk")
            tasks.append(asyncio.create_task(spoken))
            await has_decoded(engine, 1)
        before = engine.stats["prefill_tokens"]
        branches = await ask_branches(engine, params)
        num_new = engine.stats["prefill_tokens"] - before
        assert len(await asyncio.gather(*tasks)) == (trunk_is != "new")
        return branches, num_new

    branches, num_new = asyncio.run(talk())
    assert num_new == 8 * 8 + (len(TRUNK) if trunk_is == "new" else 0)
    prompts = [TRUNK + tail for tail in TAILS]
    assert_logprobs(model, prompts, branches)
    alone = [
        run(embedded(model, max_context_tokens=200), [prompt], params, first_seed=i)[0].token_ids
        for i, prompt in enumerate(prompts)
    ]
    assert [branch.token_ids for branch in branches] == alone


def test_a_trunk_stays_for_its_own_session_when_branches_begin_with_it(model):
    engine = embedded(model, num_slots=9, max_context_tokens=200)
    params = SamplingParams(max_tokens=4)

    async def talk():
        first = await engine.generate(TRUNK, params, seed=0, session="trunk")
        await ask_branches(engine, params)
        for i in range(8):
            engine.end_session(f"branch {i}")
        longer, before = TRUNK + first.token_ids + [5], engine.stats["prefill_tokens"]
        second = await engine.generate(longer, params, seed=1, session="trunk")
        return longer, second, engine.stats["prefill_tokens"] - before

    longer, second, num_new = asyncio.run(talk())
    assert num_new == 2
    assert_logprobs(model, [longer], [second])


def test_equal_prompts_with_an_unknown_trunk_are_prefilled_once(model):
    engine, params = embedded(model, num_slots=20), SamplingParams(max_tokens=3)
    prompts = [TRUNK[:70] + tail for tail in TAILS[:4] for _ in range(4)]
    assert_logprobs(model, prompts, run(engine, prompts, params))
    assert engine.stats["prefill_tokens"] == 70 + 4 * 8


def test_a_rewound_conversation_prefills_what_comes_after_the_turn(tiny_model):
    """Two replies, then another second question to the first."""
    chat = Chat(AutoTokenizer.from_pretrained(tiny_model))
    model = load(tiny_model)
    engine = embedded(model, max_context_tokens=400, tokenizer=chat.tokenizer)
    actor = Actor(name="bob", engine=engine, chat=chat, max_context_tokens=400, max_tokens=8)
    actor = actor.bind_episode(SamplingParams(max_tokens=8), 0, "episode")

    async def talk():
        reply = await actor.respond("how much is 1 + 2, and why? " * 4)
        first = reply.snapshot()
        await reply.respond("and 3 + 4?")
        branch, before = reply.fork(first), engine.stats["prefill_tokens"]
        return await branch.respond("and 5 + 6?"), engine.stats["prefill_tokens"] - before

    branch, num_new = asyncio.run(talk())
    # <|end|><|user|> and the letters of "and " are the same in both questions.
    assert num_new == len(branch.turns[1].new_ids) - 6
    first, second = branch.turns
    prompt = first.new_ids + first.completion.token_ids + second.new_ids
    assert_logprobs(model, [prompt], [second.completion])


@pytest.mark.parametrize("arch", ["mamba", "llama4_text"])
def test_uncuttable_caches_read_branches_from_their_start(arch, tmp_path):
    make_family(tmp_path, arch)
    model = load_plain(tmp_path)
    engine = embedded(model, num_slots=9, max_context_tokens=200)
    params = SamplingParams(max_tokens=4)

    async def talk():
        await engine.generate(TRUNK, params, seed=0, session="trunk")
        return await ask_branches(engine, params, tails=[*TAILS[:2], *TAILS[:2]])

    branches = asyncio.run(talk())
    prompts = [TRUNK + tail for tail in [*TAILS[:2], *TAILS[:2]]]
    assert engine.stats["prefill_tokens"] == len(TRUNK) * 3 + 16
    with torch.no_grad():
        for prompt, branch in zip(prompts, branches, strict=True):
            logits = model(torch.tensor([prompt])).logits[0, -1]
            expected = logits.log_softmax(-1)[branch.token_ids[0]].item()
            assert branch.logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_turns_of_unlike_lengths_go_together_up_to_the_end_of_the_context(model):
    """Beside a long addition to a short conversation, a short one to a conversation near the limit
    is padded past it."""
    engine, params = embedded(model, max_context_tokens=64), SamplingParams(max_tokens=1)
    first = [[1] * 10, [2] * 55]
    second = [[1] * 10 + [3] * 30, [2] * 55 + [4] * 8]

    async def turn(prompts):
        return await asyncio.gather(
            *(engine.generate(p, params, seed=0, session=str(p[0])) for p in prompts)
        )

    async def two_turns():
        await turn(first)
        return await turn(second)

    assert_logprobs(model, second, asyncio.run(two_turns()))
    assert engine.stats["prefill_tokens"] == 10 + 55 + 30 + 8


def test_full_slots_forget_the_oldest_session_first(model):
    engine, params = (
        embedded(model, num_slots=2, max_context_tokens=32),
        SamplingParams(max_tokens=2),
    )

    async def speak(name: str) -> int:
        before = engine.stats["prefill_tokens"]
        await engine.generate([ord(name)] * 20, params, seed=0, session=name)
        return engine.stats["prefill_tokens"] - before

    async def open_sessions():
        return [await speak(name) for name in "abcddcba"]

    assert asyncio.run(open_sessions()) == [20, 20, 20, 20, 0, 0, 0, 20]


def test_long_and_ragged_prompts_are_prefilled_in_bounded_pieces(model, monkeypatch):
    monkeypatch.setattr(rl_core.engines.embedded, "PREFILL_TOKENS", 32)
    prompts = [*random_prompts(9, seed=6, longest=30), [*range(100)]]
    widths = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _m, args, _o: widths.append(args[0].numel())
    )
    completions = run(embedded(model, num_slots=10), prompts, SamplingParams(max_tokens=5))
    handle.remove()
    assert max(widths) <= 32
    assert_logprobs(model, prompts, completions)


def test_late_requests_are_admitted_while_others_decode(model):
    engine = embedded(model, num_slots=8)

    async def join():
        slow = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=100), seed=0))
        await has_decoded(engine, 5)
        quick = await engine.generate([3, 4, 5], SamplingParams(max_tokens=3), seed=1)
        assert not slow.done()
        return await slow, quick

    slow, quick = asyncio.run(join())
    assert_logprobs(model, [[1, 2], [3, 4, 5]], [slow, quick])


def test_a_request_that_is_cancelled_before_it_has_a_slot_costs_nothing(model):
    engine, params = embedded(model, num_slots=1), SamplingParams(max_tokens=20)

    async def ask():
        prompts = [[1] * 5, [2] * 6, [3] * 7]
        tasks = [asyncio.create_task(engine.generate(p, params, seed=0)) for p in prompts]
        await has_decoded(engine, 3)
        tasks[1].cancel()
        await asyncio.wait(tasks)

    asyncio.run(ask())
    assert engine.stats["prefill_tokens"] == 5 + 7


# Its life


@pytest.mark.parametrize("is_moved", [False, True])
def test_new_weights_in_place_change_the_samples_and_drop_what_was_cached(model, is_moved):
    engine, prompt, params = embedded(model), [3] * 80, SamplingParams(max_tokens=8)

    async def before_and_after():
        old = await engine.generate(prompt, params, seed=1, session="s")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
                if is_moved:
                    parameter.data = parameter.clone()
        await engine.update(None, version=4)
        second = prompt + old.token_ids
        new = await engine.generate(second, params, seed=1, session="s")
        return old, second, new, await engine.generate(second, params, seed=1, session="branch")

    old, second, *new = asyncio.run(before_and_after())
    assert [c.policy_version for c in (old, *new)] == [0, 4, 4]
    assert_logprobs(model, [second] * 2, new)


async def interrupted(engine, prompts, params, at: list[int], change) -> list:
    """Completions of all prompts at once. After each number of decode steps in `at` the engine is
    paused, and `change` runs."""
    tasks = [asyncio.create_task(engine.generate(p, params, seed=i)) for i, p in enumerate(prompts)]
    for number, num_steps in enumerate(at):
        await has_decoded(engine, num_steps)
        await engine.pause()
        await engine.sleep()
        await change(number)
        await engine.resume()
    return await asyncio.gather(*tasks)


def test_a_pause_changes_nothing_that_is_sampled(model):
    prompts = [prompt for prompt in random_prompts(6) for _ in range(2)]
    params = SamplingParams(max_tokens=40)
    expected = run(embedded(model), prompts, params)

    async def nothing(number): ...

    paused = asyncio.run(
        interrupted(embedded(model, num_slots=5), prompts, params, [3, 30, 31, 70], nothing)
    )
    assert [c.token_ids for c in paused] == [c.token_ids for c in expected]
    for a, b in zip(paused, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0
        )
        assert a.policy_versions == b.policy_versions == [0] * len(b.token_ids)


def test_the_model_is_given_back_as_it_was(model):
    model.train()
    modes = [module.training for module in model.modules()]
    engine = embedded(model)
    seen = set()
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, *_: seen.add((module.training, model.config._attn_implementation))
    )

    async def generate():
        await engine.generate([1, 2], SamplingParams(max_tokens=3), seed=0)
        return [module.training for module in model.modules()], model.config._attn_implementation

    assert asyncio.run(generate()) == (modes, "sdpa")
    hook.remove()
    assert seen == {(False, "rl_core_slots")}
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()


def test_an_error_reaches_everybody_who_waits_and_the_engine_goes_on(model):
    """In a prefill, which several wait for, and in a decode step; some wait for a free slot."""
    engine, params = embedded(model, num_slots=4), SamplingParams(max_tokens=8)
    prompts = [prompt for prompt in random_prompts(3) for _ in range(3)]
    expected = run(engine, prompts, params)

    async def gather():
        calls = (engine.generate(p, params, seed=i) for i, p in enumerate(prompts))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    for is_decode in (False, True):

        def fail(_module, args, _out, is_decode=is_decode):
            if is_decode == (args[0].shape[1] == 1):
                raise ZeroDivisionError("broken layer")

        handle = model.model.embed_tokens.register_forward_hook(fail)
        assert [str(error) for error in asyncio.run(gather())] == ["broken layer"] * 9
        handle.remove()
        assert model.config._attn_implementation == "sdpa"
        assert [c.token_ids for c in asyncio.run(gather())] == [c.token_ids for c in expected]


def test_a_context_ends_where_the_models_positions_do():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_positions=32, n_embd=32, n_layer=1, n_head=2, vocab_size=VOCAB_SIZE
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    engine, prompt = embedded(model), [5] * 28
    result = run(engine, [prompt] * 3, SamplingParams(max_tokens=50))
    assert [(len(c.token_ids), c.finish_reason) for c in result] == [(4, "length")] * 3
    assert_logprobs(model, [prompt] * 3, result)
    with pytest.raises(ValueError, match="prompt of 40 tokens"):
        run(engine, [[5] * 40] * 3, SamplingParams(max_tokens=1))


def test_weights_that_are_nan_are_an_error_and_not_a_sample(model):
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        run(embedded(model), [[1, 2]], SamplingParams(max_tokens=3))


def double_logits(model):
    forward = model.forward

    def doubled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = doubled


def hide_head(model):
    model.get_output_embeddings = lambda: None


def drop_plan(model):
    forward = model.model.forward

    @functools.wraps(forward)
    def without(*args, slot_plan=None, **kwargs):
        return forward(*args, **kwargs)

    model.model.forward = without


@pytest.mark.parametrize(
    "change, kind",
    [(double_logits, "OwnHeadModel"), (hide_head, "OwnHeadModel"), (drop_plan, "RowModel")],
)
def test_a_model_that_slots_do_not_fit_samples_by_its_own_forward(model, change, kind):
    change(model)
    assert type(choose_sampler(model)).__name__ == kind
    engine, params, (prompt, other) = (
        embedded(model, sampler=choose_sampler),
        SamplingParams(max_tokens=5),
        random_prompts(2, seed=1),
    )

    async def talk():
        others = [asyncio.create_task(engine.generate(other, params, seed=n)) for n in range(3)]
        first = await engine.generate(prompt, params, seed=7, session="s")
        longer = [*prompt, *first.token_ids, 5]
        return (
            first,
            longer,
            await engine.generate(longer, params, seed=8, session="s"),
            await asyncio.gather(*others),
        )

    first, longer, second, others = asyncio.run(talk())
    assert_logprobs(model, [prompt, longer, *[other] * 3], [first, second, *others])


@pytest.mark.parametrize(
    "name, kind", [("llama", "SlotModel"), ("mamba", "RowModel"), ("llama4_text", "RowModel")]
)
def test_logits_are_not_rounded_to_the_dtype_of_the_model(name, kind, tmp_path):
    make_family(tmp_path, name)
    sampler = choose_sampler(load_plain(tmp_path).bfloat16())
    assert type(sampler).__name__ == kind
    with torch.inference_mode(), sampler.borrowed():
        hidden = sampler.forward(
            sampler.make_cache(1, 3), slice(0, 1), torch.tensor([[7, 8]]), None, 2
        )
        logits = sampler.logits(hidden[:, -1])
    assert (
        logits.dtype == torch.float32
        and torch.dist(logits, logits.bfloat16().float(), torch.inf) > 1e-4
    )


def test_closing_cancels_what_runs_and_sleeping_frees_the_cache(model):
    engine = embedded(model)

    async def close():
        task = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=100), seed=0))
        await has_decoded(engine, 3)
        await engine.close()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(close())
    assert not engine._cache.layers
    assert len(run(engine, [[1]], SamplingParams(max_tokens=3))[0].token_ids) == 3
    asyncio.run(engine.sleep())
    assert not engine._cache.layers


def test_a_conversation_keeps_its_cache_until_an_adapter_changes(tiny_model):
    configs = {name: peft.LoraConfig(**LORAS[name]).to_dict() for name in ("bob", "alice")}
    engine, models, weights = embedded(load(tiny_model), adapters=configs), {}, {}
    for seed, name in enumerate(configs):
        model = peft.get_peft_model(load(tiny_model), peft.LoraConfig(**LORAS[name]))
        for parameter in (p for n, p in model.named_parameters() if "lora_" in n):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
        weights[name] = {n: w.clone() for n, w in peft.get_peft_model_state_dict(model).items()}
        models[name] = model.merge_and_unload().eval()
        asyncio.run(engine.update(weights[name].items(), 1, adapter=name))

    async def talk(name: str, update_of: str, begun_by: str = "bob") -> tuple[int, list[int]]:
        """(tokens prefilled, prompt) of a conversation that `name` continues."""
        prompt, params = [7] * 20, SamplingParams(max_tokens=12)
        first = await engine.generate(prompt, params, seed=0, session="s", adapter=begun_by)
        if update_of:
            await engine.update(weights[update_of].items(), 2, adapter=update_of)
        longer, before = [*prompt, *first.token_ids, 5, 6], engine.stats["prefill_tokens"]
        second = await engine.generate(longer, params, seed=1, session="s", adapter=name)
        assert_logprobs(models[name], [longer], [second])
        return engine.stats["prefill_tokens"] - before, longer

    async def branch(name: str, update_of: str) -> int:
        """Tokens prefilled of branches by `name` of a trunk that bob has read."""
        params = SamplingParams(max_tokens=3)
        await engine.generate(TRUNK, params, seed=0, session="s", adapter="bob")
        if update_of:
            await engine.update(weights[update_of].items(), 2, adapter=update_of)
        before = engine.stats["prefill_tokens"]
        result = await ask_branches(engine, params, adapter=name)
        assert_logprobs(models[name], [TRUNK + tail for tail in TAILS], result)
        for session in ("s", *(f"branch {i}" for i in range(8))):
            engine.end_session(session)
        return engine.stats["prefill_tokens"] - before

    for name, update_of, is_reused in (
        ("bob", "", True),
        ("bob", "alice", False),
        ("bob", "bob", False),
        ("alice", "", False),
    ):
        num_new, longer = asyncio.run(talk(name, update_of))
        assert num_new == (3 if is_reused else len(longer)), (name, update_of)
        num_new = asyncio.run(branch(name, update_of))
        assert num_new == 64 + (0 if is_reused else len(TRUNK)), (name, update_of)
    num_new, longer = asyncio.run(talk("bob", "", begun_by=""))
    assert num_new == len(longer)


def test_decode_steps_wait_for_callers_that_score_a_reply_and_ask_again(tiny_model):
    """Eight callers with a slot each. Between two requests each needs six rounds of the event loop,
    as hooks do."""
    engine = embedded(load(tiny_model), num_slots=8)

    async def ask_again_and_again(index: int):
        for turn in range(4):
            await engine.generate(
                [5, 6, 7 + index], SamplingParams(max_tokens=4 + index % 3), seed=turn
            )
            for _ in range(6):
                await asyncio.sleep(0)

    async def ask_all():
        await asyncio.gather(*map(ask_again_and_again, range(8)))

    asyncio.run(ask_all())
    # Rows of a step, of 8.
    assert engine.stats["decode_tokens"] > 5.5 * engine.stats["decode_steps"]


def cache_bytes(engine) -> int:
    snapshots = [
        engine._cache.tensors,
        *(request.parked or [] for request in engine._parked.values()),
    ]
    return sum(tensor.nbytes for snapshot in snapshots for tensor in snapshot)


def test_the_memory_of_a_token_is_that_of_its_keys_and_values(model):
    config = model.config
    heads = config.num_key_value_heads * config.head_dim
    assert (
        bytes_per_token(SlotModel(model))
        == 2 * config.num_hidden_layers * heads * model.dtype.itemsize
    )


@pytest.mark.parametrize("rows, num_slots", [(0, 1), (4, 3), (12, 8), (40, 8)])
def test_slots_and_parked_sessions_fit_in_the_memory_that_the_flag_gives(model, rows, num_slots):
    """8 slots are wanted, and memory holds the weights and `rows` slots."""
    weights = sum(p.nbytes for p in model.parameters())
    of_token = bytes_per_token(SlotModel(model))
    memory = weights + (rows * 65 + 0.5) * of_token
    frac = memory / device_memory(torch.device("cpu"))
    engine = embedded(model, num_slots=8, max_context_tokens=64, memory_frac=frac)
    assert engine.capacity == num_slots
    note = f"policy: {num_slots} of 8 slots of 64 tokens fit next to the weights in "
    assert engine.shortage.startswith(note if num_slots < 8 else "") and bool(engine.shortage) == (
        num_slots < 8
    )

    async def speak(turn: int) -> list:
        calls = [([i + 1] * 30, SamplingParams(max_tokens=4), i, f"s{i}") for i in range(16)]
        asked = [
            engine.generate(ids * turn, params, seed=seed, session=s)
            for ids, params, seed, s in calls
        ]
        return await asyncio.gather(*asked)

    async def turns() -> None:
        await speak(1)
        one_slot = 65 * of_token
        assert cache_bytes(engine) <= max(memory - weights, one_slot) + of_token
        for i, second in enumerate(await speak(2)):
            assert_logprobs(model, [[i + 1] * 60], [second])

    asyncio.run(turns())


def test_a_run_with_little_memory_has_fewer_slots(tiny_model, tmp_path, capfd):
    (tmp_path / "env.py").write_text(
        'def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]\n'
        "def reward_fn(completion): return sum(map(ord, completion)) % 7\n"
    )
    flags = ["--model", tiny_model, "--env_path", tmp_path / "env.py"]
    sizes = "--tasks_per_step 2 --group_size 2 --max_tokens 8 --max_prompt_tokens 16 --num_steps 1"
    run_command(tmp_path / "run", words(*flags, sizes, "--engine_memory_frac 1e-6"))
    first = capfd.readouterr().out.splitlines()[:4]
    assert first[3].startswith("policy: 1 of 4 slots of 24 tokens fit next to the weights in ")
    assert metrics(tmp_path / "run")[0]["rollout/policy/failed"] == 0
