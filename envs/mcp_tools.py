"""The tools of any MCP server, called by the actor. Reward: 1 if its last reply is the answer and
nothing else.

    rl-core train --env_path envs/mcp_tools.py --model Qwen/Qwen3-0.6B --out runs/shop
    --max_prompt_tokens 1024 --max_tokens 256
    MCP_SERVER='npx -y some-server' MCP_PASS=SOME_API_KEY rl-core train --env_path envs/mcp_tools.py
    --data.train rows.jsonl ...

$MCP_SERVER is a command that speaks over stdio, started for each episode, or the URL of a server
(streamable HTTP), where each episode has a session: better for many at once. By default it is the
shop at the end of this file, which `python envs/mcp_tools.py 8000` serves at
http://127.0.0.1:8000/mcp. A command sees HOME, PATH and the like, and the variables that $MCP_PASS
names, with commas between. $MCP_TOKEN goes to a URL as a bearer token. Records hold neither.

Rows: a prompt and `answer`. Tools count towards --max_prompt_tokens. The actor reads text, and the
text of resources, and structured content that the text does not repeat; with MCP_IMAGES=1, for a
model that sees, also images. A note replaces audio, other resources, and the end of a text above
MAX_CHARS. The actor reads a tool's refusal (metric `refused`). A server that cannot be reached,
dies, or takes longer than CALL_S fails the episode, with the cause. Needs a GPU, not run.
"""

import json
import os
import random
import shlex
import sys
import tempfile
from contextlib import AsyncExitStack

try:
    import httpx2
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, TextContent
except ImportError:
    raise ImportError("mcp is missing: pip install 'rl_core[envs]'") from None

SERVER = os.environ.get("MCP_SERVER") or shlex.join([sys.executable, os.path.abspath(__file__)])
PASSED = {
    name: os.environ[name]
    for name in os.environ.get("MCP_PASS", "").split(",")
    if name in os.environ
}
SEES = os.environ.get("MCP_IMAGES") == "1"
CALL_S, NUM_EVAL, max_turns, TOKEN = 60.0, 50, 6, os.environ.get("MCP_TOKEN")
MAX_CHARS = 4000  # Longest text of a tool that the actor reads.
NAMES = random.Random(0).sample(
    [f"{a}{b}{c}o" for a in "bdfgklmnprstvz" for b in "aeiou" for c in "klmnrst"], 400
)
PRICES = {item: random.Random(item).randrange(2, 100) for item in NAMES}


def load_tasks(split):
    goods = NAMES[NUM_EVAL:] if split == "train" else NAMES[:NUM_EVAL]
    asked = "What do {} {}s cost? Reply with the number alone."
    return [
        {"prompt": asked.format(n, item), "answer": str(n * PRICES[item])}
        for item in goods
        for n in (1, 2, 5)
    ]


async def connect(stack, log):
    """A client of a new session, which ends with the stack."""
    if SERVER.startswith(("http://", "https://")):
        http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}, timeout=CALL_S
        )
        transport = streamable_http_client(
            SERVER, http_client=await stack.enter_async_context(http)
        )
    else:
        command, *args = shlex.split(SERVER)
        transport = stdio_client(
            StdioServerParameters(command=command, args=args, env=PASSED), errlog=log
        )
    return await stack.enter_async_context(Client(transport, read_timeout_seconds=CALL_S))


def public(text):
    """The text without what may be secret: it goes into records."""
    for secret in filter(None, (SERVER, TOKEN, *PASSED.values())):
        text = text.replace(secret, "***")
    left_out = len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[:MAX_CHARS]}\n[{left_out} characters left out]"


async def call(client, function):
    """(text of the tool, or parts with its images; True if the tool refused)."""
    arguments = function["arguments"]
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        result = await client.call_tool(function["name"], arguments)
    except (MCPError, ValueError) as error:
        if getattr(error, "code", None) in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            raise
        return public(f"error: {error}"), True
    blocks = [*result.content, *structured(result)]
    if SEES and any(block.type == "image" for block in blocks):
        return list(map(part_of, blocks)), bool(result.is_error)
    return public("\n".join(map(text_of, blocks)) or "[no content]"), bool(result.is_error)


def structured(result):
    """The structured content as a block of JSON text; nothing if the text blocks say the same."""
    value = result.structured_content
    # Servers wrap values other than objects as {"result": value}, and write a block for each item.
    inner = value["result"] if isinstance(value, dict) and value.keys() == {"result"} else value
    texts = [flat(getattr(block, "text", "")) for block in result.content]
    items = [flat(item) for item in inner] if isinstance(inner, list) else None
    if inner is None or flat(value) in texts or flat(inner) in texts or (texts and texts == items):
        return []
    return [TextContent(type="text", text=json.dumps(value, ensure_ascii=False))]


def flat(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(text.split())


def part_of(block):
    """A part of a message."""
    if block.type == "image":
        return {"type": "image", "data": block.data, "media_type": block.mime_type}
    return {"type": "text", "text": public(text_of(block)) + "\n"}


def text_of(block):
    """Text of a content block, or a note for a block that is not text."""
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        about = f": {block.description}" if block.description else ""
        return f"[resource {block.name}: {block.uri}{about}]"
    if block.type == "resource":
        resource = block.resource
        note = f"[resource {resource.uri} of type {resource.mime_type}, not shown]"
        return getattr(resource, "text", note)
    return f"[{block.type} of type {block.mime_type}, not shown]"


async def tools_of(client):
    """The tools of all pages of the server's list."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


async def play(client, task, actor):
    known = [(t.name, t.description, t.input_schema) for t in await tools_of(client)]
    tools = [
        {"type": "function", "function": {"name": n, "description": d, "parameters": p}}
        for n, d, p in known
    ]
    reply, refused = await actor.respond(task.messages, tools=tools), []
    for _ in range(actor.max_turns - 1):
        calls = reply.messages[-1].get("tool_calls")
        if not calls or reply.truncated:
            break
        answers = [(each["id"], *await call(client, each["function"])) for each in calls]
        refused += [is_refused for *_, is_refused in answers]
        await reply.respond(
            [{"role": "tool", "content": text, "tool_call_id": id} for id, text, _ in answers]
        )
    right = reply.answer.strip() == str(task.row["answer"]).strip()
    return [
        reply.trajectory(
            float(right), metrics={"called": float(len(refused)), "refused": float(sum(refused))}
        )
    ]


async def rollout(task, actors):
    [actor], failed = actors.values(), None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            async with AsyncExitStack() as stack:
                client = await connect(stack, log)
                try:
                    return await play(client, task, actor)
                except MCPError:
                    raise
                except Exception as error:  # the actor's, which the client would wrap in a group
                    failed = error
        except Exception as error:
            while getattr(error, "exceptions", None):  # a task group's
                error = error.exceptions[0]
            log.seek(0)
            cause = f"{type(error).__name__}: {error}; {log.read()[-300:].strip()}".removesuffix(
                "; "
            )
            failed = ConnectionError(f"the MCP server failed: {public(cause)}")
    raise failed


if __name__ == "__main__":
    from mcp.server import MCPServer

    def price(item: str) -> int:
        """Price of one item, in crowns."""
        return PRICES[item]

    shop = MCPServer("shop")
    shop.tool()(price)
    shop.run("streamable-http", port=int(sys.argv[1])) if sys.argv[1:] else shop.run("stdio")
