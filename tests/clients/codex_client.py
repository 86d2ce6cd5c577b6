"""A conversation as Codex has it, by the `openai` package against a scripted model: codex_client.py URL

The fields and tools are those that Codex sends: functions, a custom tool with a grammar, a search of the web, reasoning
items, streams. Codex sends the whole conversation each time; the second part continues with `previous_response_id`.
"""

import json
import sys

import openai
from scripted import PATCH, said

GRAMMAR = 'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?\nhunk: /[^*][^\\n]*/ LF\n%import common.LF\n'
TOOLS = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a shell command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}, "description": "The command"},
                "workdir": {"type": "string"},
                "timeout_ms": {"type": "number"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {
        "type": "function",
        "name": "update_plan",
        "description": "Updates the plan.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "plan": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                        "required": ["step", "status"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": ["plan"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use this tool to edit files. This is a FREEFORM tool.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False},
]
OPENING = [
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions instructions>read-only</permissions instructions>"}],
    },
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"}],
    },
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "script codex: Change the tag."}],
    },
]
ASK = {
    "model": "scripted",
    "instructions": "You are a coding agent.",
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-7f",
    "text": {"verbosity": "medium"},
    "stream": True,
}


def stream(client, **fields):
    """The finished items of one response, checked against its events."""
    items, deltas, last = [], {}, None
    for event in client.responses.create(**ASK, **fields):
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        if event.type == "response.output_item.done":
            items.append(event.item)
        last = event
    assert last.type == "response.completed", last
    response = last.response
    assert [item.id for item in response.output] == [item.id for item in items], response
    for item in items:
        text = {
            "reasoning": lambda: item.content[0].text,
            "message": lambda: item.content[0].text,
            "function_call": lambda: item.arguments,
            "custom_tool_call": lambda: item.input,
        }[item.type]()
        assert deltas[item.id] == text, (deltas, item)
    usage = response.usage
    thinks = any(item.type == "reasoning" for item in items)
    assert (usage.output_tokens_details.reasoning_tokens > 0) == thinks, usage
    assert response.prompt_cache_key == ASK["prompt_cache_key"], response
    assert [tool.name for tool in response.tools if tool.type != "web_search"] == ["shell", "update_plan", "apply_patch"]
    return items, response


def result_of(item):
    """What Codex sends back for a call."""
    if item.type == "function_call":
        assert item.name == "shell" and json.loads(item.arguments) == {"command": ["ls", "-la", "src"]}, item
        return {"type": "function_call_output", "call_id": item.call_id, "output": '{"output": "größe.rs\\n"}'}
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCH), item
    return {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Success. Updated src/größe.rs"}


def converse(client, continues):
    """Both calls and the answer. `continues`: the server keeps the conversation."""
    turn, history, previous = OPENING, [], {}
    kinds = []
    while turn:
        history += turn
        sent = {"input": turn, "store": True} | previous if continues else {"input": history, "store": False}
        items, response = stream(client, **sent)
        kinds += [item.type for item in items]
        history += [item.model_dump(exclude_none=True) for item in items]
        turn = [result_of(item) for item in items if item.type.endswith("_call")]
        previous = {"previous_response_id": response.id}
    assert kinds == ["reasoning", "function_call", "message", "custom_tool_call", "reasoning", "message"], kinds
    assert response.output_text == said("codex")[2].split("\n\n")[1], response.output_text


with openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="secret", max_retries=0) as client:
    converse(client, False)
    converse(client, True)
print("a conversation as Codex has it is served")
