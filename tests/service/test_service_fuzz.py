"""8,000 malformed, forged, replayed and unauthenticated requests: each gets the status of a table,
nothing ends, and an episode plays afterwards."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc import StatusCode
from test_service import COUNTER, TOKEN, Service, post, serving

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.wire import CODES, ENVIRONMENTS, HUB, METHODS, REQUESTS

OK, NOT_FOUND, WRONG = StatusCode.OK, StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT
ENDED, EXISTS, LOST = (
    StatusCode.FAILED_PRECONDITION,
    StatusCode.ALREADY_EXISTS,
    StatusCode.DATA_LOSS,
)
NOT_JSON = [
    "",
    "{",
    "nul",
    "'x'",
    "[1,]",
    '{"a": NaN}',
    "[Infinity]",
    "[" * 100_000,
    "1" * 5_000,
    "\x00",
    '"\ud7ff',
]
NOT_ROWS = [
    *NOT_JSON[1:],
    "[]",
    "3",
    '"x"',
    "null",
    "{}",
    '{"prompt": 3}',
    '{"messages": "x"}',
    '{"messages": []}',
]
NOT_ROWS += ['{"prompt": "x", "a": NaN}', '{"prompt": "x", "a": [-Infinity]}']
NOT_MESSAGES = [
    *NOT_JSON[1:],
    "{}",
    "3",
    "null",
    '["x"]',
    '[{"role": "assistant"}]',
    '[{"content": "x"}]',
    "[[]]",
    "[]",
]
NOT_MESSAGES += ['[{"role": 3, "content": "x"}]', '[{"role": "assistant", "content": 3}]']
# An interaction ends in the assistant's message.
NOT_SAID = [*NOT_MESSAGES, "", '[{"role": "user", "content": "x"}]']
ASKER = """
async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    return [reply.trajectory(len(reply.text))]
"""
HUGE = [2**31 - 1, 2**32 - 1]


class Fuzz:
    """Requests, each with the status that it must get. Some are about four sessions: one to
    interact with, which has had one interaction, one that has ended, one of a worker that nobody
    knows, and one whose rollout() waits for an actor."""

    def __init__(self, seed: int, open_now: str, ended: str, asking: str):
        self.random, self.open, self.ended, self.asking = (
            random.Random(seed),
            open_now,
            ended,
            asking,
        )
        self.kinds: list[Callable[[], tuple[pb.Request, set[StatusCode]]]] = [
            getattr(self, name) for name in sorted(vars(Fuzz)) if name.startswith("of_")
        ]

    def text(self, most: int = 40) -> str:
        letters = string.printable + "äß\u2028😀\x00"
        return "".join(self.random.choices(letters, k=self.random.randint(0, most)))

    def hex(self, num: int) -> str:
        return f"{self.random.getrandbits(4 * num):0{num}x}"

    def pick(self, *choices):
        return self.random.choice(choices)

    def in_session(self, session: str) -> pb.Request:
        text = pb.Said(
            messages=self.text(), completion=self.text(), actor=self.text(), trajectory=self.text()
        )
        fields = {"session": session, "number": self.random.getrandbits(64), "said": text}
        cancel = pb.CancelRequest(session=session, status=self.pick(2**31 - 1, -1, 0, 7))
        score = pb.ScoreRequest(**fields, hooks=[self.text()])
        return self.pick(
            pb.Request(interact=pb.InteractRequest(**fields)),
            pb.Request(score=score),
            pb.Request(cancel=cancel),
        )

    def one(
        self, number: int, text: str = '[{"role": "assistant", "content": "x"}]', **of_said
    ) -> pb.Request:
        of_said = {"messages": text, **of_said}
        return pb.Request(
            interact=pb.InteractRequest(session=self.open, number=number, said=pb.Said(**of_said))
        )

    # Each gives a request and what may come of it.

    def of_nothing(self):
        return pb.Request(timeout_s=self.pick(0.0, -1.0, float("nan"), float("inf"), 1e300)), {
            WRONG
        }

    def of_odd_names(self):
        name = self.pick(
            self.text(),
            self.text(3000),
            self.hex(12),
            self.hex(12) + ".",
            self.open.upper() + "0",
            "../../x",
        )
        return self.in_session(name), {NOT_FOUND}

    def of_lost_workers(self):
        return self.in_session(f"{self.hex(12)}.{self.hex(16)}"), {LOST}

    def of_sessions_that_never_were(self):
        return self.in_session(f"{self.open[:12]}.{self.hex(16)}"), {NOT_FOUND}

    def of_an_ended_session(self):
        request = self.one(self.random.randint(0, 9))
        request.interact.session = self.ended
        return request, {ENDED}

    def of_unknown_environments(self):
        env = "x" + self.text()
        verb = self.pick("start", "tasks", "call", "describe")
        return pb.Request(**{verb: REQUESTS[verb](env=env)}), {NOT_FOUND}

    def of_unknown_tasks(self):
        id = self.pick(
            "train/999", "train/-1", "train/", "/", self.text(), "train/" + "9" * 5000, "train/²"
        )
        return pb.Request(start=pb.StartRequest(env="counter", task_id=id)), {NOT_FOUND}

    def of_bad_rows(self):
        return pb.Request(start=pb.StartRequest(env="counter", row=self.pick(*NOT_ROWS))), {WRONG}

    def of_bad_messages(self):
        text = self.pick(*NOT_MESSAGES)
        return pb.Request(start=pb.StartRequest(env="counter", row="{}", messages=text)), {WRONG}

    def of_bad_words(self):
        return self.one(2, self.pick(*NOT_SAID)), {WRONG}

    def of_too_many_kept(self):
        return self.one(2, keep=self.pick(*HUGE, 1000)), {WRONG}

    def of_trajectories(self):
        text = self.pick(
            "{", "[]", '{"turns": 3}', '{"turns": [3]}', '{"player": {}}', '{"nothing": 1}'
        )
        return self.one(2, trajectory=text), {WRONG}

    def of_replays(self):
        return self.one(1), {OK}

    def of_changed_replays(self):
        return self.one(1, json.dumps([{"role": "assistant", "content": "y" + self.text()}])), {
            EXISTS
        }

    def of_later_numbers(self):
        return self.one(self.pick(3, 4, 2**63, 2**64 - 1)), {ENDED}

    def of_unknown_rewards(self):
        request = pb.ScoreRequest(session=self.open, number=2, hooks=["x" + self.text()])
        return pb.Request(score=request), {WRONG}

    def answer(self, number: int, call: int = 1, **spoken) -> pb.Request:
        """To what rollout() asks."""
        spoken = {"ask": 1, "messages": '[{"role": "assistant", "content": "x"}]', **spoken}
        fields = {
            "session": self.asking,
            "number": number,
            "call": call,
            "answers": [pb.Spoken(**spoken)],
        }
        return pb.Request(answer=pb.AnswerRequest(**fields))

    def of_bad_casts(self):
        cast = self.pick(
            "",
            "{}",
            "[3]",
            "[[]]",
            '[{"name": "a", "x": 1}]',
            "[{}]",
            '[{"params": []}]',
            *NOT_JSON[1:],
        )
        return pb.Request(start=pb.StartRequest(env="asker", row='{"prompt": "x"}', cast=cast)), {
            WRONG
        }

    def of_bad_answers(self):
        return self.answer(2, messages=self.pick(*(text for text in NOT_SAID if text != "[]"))), {
            WRONG
        }

    def of_bad_turns(self):
        turn = self.pick(
            "[]", "{}", '{"completion": 3}', '{"completion": {}}', '{"x": 1}', *NOT_JSON[1:]
        )
        return self.answer(2, turn=turn), {WRONG}

    def of_answers_to_nothing(self):
        return self.answer(2, ask=self.pick(0, 2, 2**64 - 1)), {NOT_FOUND}

    def of_answers_of_other_calls(self):
        return self.answer(2, call=self.pick(2, 3, 2**64 - 1)), {ENDED}

    def of_later_answers(self):
        return self.answer(self.pick(3, 2**64 - 1)), {ENDED}

    def of_runs(self):
        number, hook = self.pick(
            (1, "rollout"), (1, "other" + self.text()), (2, "rollout"), (3, "rollout")
        )
        request = pb.RunRequest(session=self.asking, number=number, hook=hook)
        return pb.Request(run=request), {
            OK if number == 1 and hook == "rollout" else EXISTS if number == 1 else ENDED
        }

    def of_runs_of_nothing(self):
        request = pb.RunRequest(
            session=self.open, number=2, hook=self.pick("turns", "rollout", "x" + self.text())
        )
        return pb.Request(run=request), {WRONG}

    def of_renewals(self):
        return pb.Request(
            renew=pb.RenewRequest(sessions=[self.text() for _ in range(self.random.randint(0, 20))])
        ), {OK}

    def of_tasks(self):
        first, split = self.random.getrandbits(64), self.pick("train", "eval", self.text())
        ask = pb.TasksRequest(env="counter", split=split, first=first, count=self.pick(*HUGE))
        return pb.Request(tasks=ask), {OK if split in ("train", "eval") else WRONG}

    def of_calls(self):
        hook = self.pick("interact", "reward_fn", "advantage_fn", "turns", "__init__", self.text())
        return pb.Request(
            call=pb.CallRequest(env="counter", hook=hook, given=self.pick("{}", *NOT_JSON))
        ), {WRONG}

    def of_odd_timeouts(self):
        timeout_s = self.pick(float("nan"), float("-inf"), float("inf"), -1.0, 1e300)
        return pb.Request(timeout_s=timeout_s, workers=pb.WorkersRequest()), {OK}

    def requests(self, num: int) -> Iterator[tuple[pb.Request, set[StatusCode]]]:
        for n in range(num):
            yield self.kinds[n % len(self.kinds)]()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("envs")
    (folder / "counter.py").write_text(COUNTER)
    (folder / "asker.py").write_text(ASKER)
    flags = ["--port", "0", "--http_port", "0", "--workers", "2", "--heartbeat_s", "0.8"]
    with serving(*folder.glob("*.py"), *flags, token=TOKEN) as service:
        pids = {worker.pid for worker in service.workers(2)}
        yield service
        assert (
            service.process.poll() is None and {worker.pid for worker in service.workers(2)} == pids
        )
        assert (
            "Traceback" not in service.text()
            and "INTERNAL" not in service.text()
            and TOKEN not in service.text()
        )


@pytest.fixture
def fuzz(service):
    """Fuzz of a seed; an episode plays once its requests were answered."""
    made = []

    def make(seed: int) -> Fuzz:
        open_now, ended = service.start(), service.start()
        assert service.interact(open_now, 1, "x") == "1"
        service.call("cancel", session=ended)
        asking = service.call(
            "start", env="asker", row='{"prompt": "x"}', cast='[{"name": "policy"}]'
        ).session
        assert len(service.call("run", session=asking, number=1, hook="rollout").asked.asks) == 1
        made.append((open_now, asking))
        return Fuzz(seed, open_now, ended, asking)

    yield make
    for session, asking in made:
        text = [pb.Spoken(ask=1, messages='[{"role": "assistant", "content": "x"}]')]
        result = service.call("answer", session=asking, number=2, call=1, answers=text).run
        assert json.loads(result.value)[0]["reward"] == 1.0
        assert service.interact(session, 2, "x") == "2"
        assert service.call("score", session=session, number=3).scores[0].reward == 2.0


def code_of(call: Callable[[], object]) -> StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return OK


def test_requests_of_a_stream_get_their_status(service, fuzz):
    made, stream, wrong, seen = fuzz(1), service.stream(), [], Counter()
    waiting = dict(enumerate(made.requests(6_000), 1))
    ids = list(waiting)
    for first in range(0, len(ids), 500):
        batch = ids[first : first + 500]
        for id in batch:
            waiting[id][0].id = id
        stream.say(*(waiting[id][0] for id in batch))
        for id, reply in stream.hear(len(batch)).items():
            request, allowed = waiting.pop(id)
            seen[CODES[reply.code]] += 1
            if CODES[reply.code] not in allowed:
                wrong.append((str(request)[:300], CODES[reply.code], reply.error[:200], allowed))
    assert not wrong and not waiting, (len(wrong), wrong[:3])
    assert seen.keys() == {OK, NOT_FOUND, WRONG, ENDED, EXISTS, LOST}


def raw(service: Service, method: str, metadata: list | None = None):
    """The method, of bytes."""
    options = {"timeout": 30, "metadata": service.metadata() if metadata is None else metadata}
    if method in ("Stream", "Join"):
        call = service.channel().stream_stream(
            f"/{HUB if method == 'Join' else ENVIRONMENTS}/{method}"
        )
        return lambda *data: [bytes(reply) for reply in call(iter(data), **options)]
    call = service.channel().unary_unary(f"/{ENVIRONMENTS}/{method}")
    return lambda data: call(data, **options)


def is_message(kind: type, data: bytes) -> bool:
    from google.protobuf.message import DecodeError

    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


def test_bytes_that_are_no_message_are_refused(service, fuzz):
    made = fuzz(2)
    methods = {METHODS[verb]: (raw(service, METHODS[verb]), REQUESTS[verb]) for verb in REQUESTS}
    methods["Stream"] = raw(service, "Stream"), pb.Requests
    names, num, tried = sorted(methods), 700, Counter()
    while sum(tried.values()) < num:
        request, _ = made.kinds[tried.total() % len(made.kinds)]()
        data = bytearray(request.SerializeToString() or b"\x0a")
        for _ in range(made.random.randint(1, 8)):
            data[made.random.randrange(len(data))] = made.random.randrange(256)
        data = bytes(data[: made.random.randint(1, 2000)])
        name = made.pick(*names)
        ask, kind = methods[name]
        if is_message(kind, data):
            continue
        tried[name] += 1
        assert code_of(lambda ask=ask, data=data: ask(data)) == WRONG, (name, data[:100])
    assert tried.keys() == methods.keys()


def test_no_request_passes_without_the_token(service, fuzz):
    made = fuzz(3)
    methods = [*(METHODS[verb] for verb in REQUESTS), "Stream", "Join"]
    for n in range(400):
        request, _ = made.kinds[n % len(made.kinds)]()
        tokens = [
            f"Bearer {made.hex(8)}",
            "Bearer",
            f"bearer {TOKEN}",
            TOKEN,
            f"Bearer {TOKEN}{made.hex(1)}",
            "Basic eDp5",
        ]
        ask = raw(
            service,
            methods[n % len(methods)],
            made.pick([], *([("authorization", token)] for token in tokens)),
        )
        data = request.SerializeToString()
        assert code_of(lambda ask=ask, data=data: ask(data)) == StatusCode.UNAUTHENTICATED


def test_forged_workers_are_refused_or_answered_for(service, fuzz):
    made, join = fuzz(4), raw(service, "Join")
    for _ in range(200):
        name = made.pick("", made.text(), made.hex(11), made.hex(13), made.hex(12).upper() + "G")
        message = pb.FromWorker(
            hello=pb.Hello(worker=name),
            heartbeat=pb.Worker(name=made.text(), silent_s=float("nan")),
        )
        message = made.pick(message, pb.FromWorker(), pb.FromWorker(replies=[pb.Reply(id=1)]))
        assert code_of(lambda message=message: join(message.SerializeToString())) == WRONG
    # A separate environment, no room, replies that nobody asked for, and then nonsense.
    for n in range(200):
        name = made.hex(12)
        hello = pb.FromWorker(
            hello=pb.Hello(worker=name, replaces=made.text(), envs=[pb.Environment(name="forged")])
        )
        hello.heartbeat.loads.add(
            env="counter", sessions=made.pick(*HUGE), capacity=made.pick(0, 5)
        )
        replies = [
            pb.Reply(id=made.random.getrandbits(64), code=made.pick(-1, 0, 999), error=made.text())
            for _ in range(5)
        ]
        frames = [hello.SerializeToString(), pb.FromWorker(replies=replies).SerializeToString()]
        frames += [b"\xff\xff"] if n % 2 else []
        assert code_of(lambda frames=frames: join(*frames)) == (WRONG if n % 2 else OK)


def test_a_worker_that_answers_with_something_else_is_an_internal_error(service, fuzz):
    import queue
    import threading

    made, out = fuzz(5), queue.SimpleQueue()
    hello = pb.FromWorker(hello=pb.Hello(worker=made.hex(12), envs=[pb.Environment(name="forged")]))
    hello.heartbeat.loads.add(env="forged", capacity=1000)
    out.put(hello.SerializeToString())
    call = service.channel().stream_stream(f"/{HUB}/Join")(
        iter(out.get, None), metadata=service.metadata(), timeout=60
    )
    answers = [
        pb.Reply(),
        pb.Reply(interact=pb.InteractReply()),
        pb.Reply(code=999),
        pb.Reply(code=-3),
        pb.Reply(code=2**31 - 1),
    ]

    def worker() -> None:
        num = 0
        for data in call:
            for request in pb.ToWorker.FromString(data).requests:
                reply = pb.Reply()
                reply.CopyFrom(answers[num % len(answers)])
                reply.id, num = request.id, num + 1
                out.put(
                    pb.FromWorker(replies=[pb.Reply(id=12345), reply, reply]).SerializeToString()
                )

    thread = threading.Thread(target=worker, daemon=True)
    thread.start()
    try:
        for _ in range(20):
            code, text = service.refused("start", env="forged", row="{}")
            assert code == StatusCode.INTERNAL and text.endswith(
                "answered start with a reply of another type"
            )
    finally:
        out.put(None)
        thread.join(30)


def test_http_refuses_json_of_another_kind(service, fuzz):
    made, wrong = fuzz(6), []
    fields = {
        verb: [field.name for field in kind.DESCRIPTOR.fields] for verb, kind in REQUESTS.items()
    }
    for n in range(300):
        verb = made.pick(*REQUESTS)
        body = made.pick(
            *(text.encode("utf-8", "surrogatepass") for text in NOT_JSON[1:]),
            b"\xff\xfe",
            b"[]",
            b'"x"',
        )
        if n % 2 and fields[verb]:
            body = {made.pick("nothing", *fields[verb]): made.pick([3], {"a": {"b": 1}}, [None])}
        status, reply = post(service, verb, body)
        if (status, reply["code"]) != (400, "INVALID_ARGUMENT"):
            wrong.append((verb, str(body)[:100], status, str(reply)[:200]))
    assert not wrong, (len(wrong), wrong[:5])
