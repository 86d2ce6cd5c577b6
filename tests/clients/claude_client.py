"""A conversation as Claude Code has it, by the `anthropic` package against a scripted model: claude_client.py URL

The fields are those that it sends: blocks with `cache_control`, many tools, thinking, beta headers, streams, results of
two calls in one turn.
"""

import sys

import anthropic
from scripted import NEW, OLD, said

CACHED = {"cache_control": {"type": "ephemeral"}}


def tool(name, **properties):
    return {
        "name": name,
        "description": f"{name}: usage notes.\n- Use it with care.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {key: {"type": kind, "description": key} for key, kind in properties.items()},
            "required": list(properties)[:1],
            "additionalProperties": False,
        },
    }


TOOLS = [
    tool("Read", file_path="string", offset="number", limit="number"),
    tool("Grep", pattern="string", path="string", multiline="boolean"),
    tool("Edit", file_path="string", old_string="string", new_string="string", replace_all="boolean"),
    tool("Bash", command="string", timeout="number", run_in_background="boolean"),
    *(tool(f"mcp__server__tool_{at}", query="string") for at in range(20)),
]
ASK = {
    "model": "scripted",
    "max_tokens": 2000,
    "system": [
        {"type": "text", "text": "You are an agent in a terminal.", **CACHED},
        {"type": "text", "text": "# Environment\n" + "A line.\n" * 20, **CACHED},
    ],
    "tools": TOOLS,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "betas": ["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"],
}
OPENING = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>\nToday is Saturday.\n</system-reminder>"},
        {"type": "text", "text": "script claude: What does f return?", **CACHED},
    ],
}
RESULTS = {
    "Read": [{"type": "text", "text": "     1\tdef f():\n     2\t    return '</parameter>'\n"}],
    "Grep": "/tmp/a b.py:1:def f():",
    "Edit": "The file /tmp/a b.py has been updated.",
}


def result_of(call, last):
    """The block that answers a call."""
    block = {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.name]}
    return block | (CACHED if last else {"is_error": False})


def converse(client, streams):
    """Three calls, two of them in one turn, and the answer."""
    messages, kinds, texts, calls = [OPENING], [], [], []
    while True:
        if streams:
            with client.beta.messages.stream(messages=messages, **ASK) as stream:
                message = stream.get_final_message()
        else:
            message = client.beta.messages.create(messages=messages, **ASK)
        kinds.append([block.type for block in message.content])
        texts += [block.text for block in message.content if block.type == "text"]
        found = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if found else "end_turn"), message
        if not found:
            break
        calls += [(call.name, call.input) for call in found]
        messages.append({"role": "assistant", "content": message.content})
        results = [result_of(call, call is found[-1]) for call in found]
        messages.append({"role": "user", "content": results})
    assert kinds == [["thinking", "text", "tool_use", "tool_use"], ["tool_use"], ["text"]], kinds
    assert [text.strip() for text in texts] == ["I look at the file.", said("claude")[3]], texts
    assert calls == [
        ("Read", {"file_path": "/tmp/a b.py"}),
        ("Grep", {"pattern": "f\\(\\)", "path": "/tmp"}),
        ("Edit", {"file_path": "/tmp/a b.py", "old_string": OLD, "new_string": NEW}),
    ], calls
    counted = client.beta.messages.count_tokens(
        model="scripted", messages=messages, system=ASK["system"], tools=TOOLS, thinking=ASK["thinking"]
    )
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)
    assert usage.cache_read_input_tokens > 1000, usage


with anthropic.Anthropic(base_url=sys.argv[1], api_key="secret", max_retries=0) as client:
    converse(client, True)
    converse(client, False)
print("a conversation as Claude Code has it is served")
