"""The `anthropic` package for Python against a running server: anthropic_client.py URL"""

import sys

import anthropic

CHAT = [{"role": "user", "content": "What is a vector?"}]
# The package names no sampling parameters any more; the interface has them.
GREEDY = {"model": "demo", "max_tokens": 16, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "look_up",
    "description": "Looks up a type.",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"enum": ["struct", "trait"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    },
}


def texts(client):
    """A whole answer, the same one as a stream and by the package's helper, and its tokens."""
    whole = client.messages.create(messages=CHAT, **GREEDY)
    text = whole.content[0].text
    assert text and whole.role == "assistant" and whole.model == "demo", whole
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 16, whole
    counted = client.messages.count_tokens(model="demo", messages=CHAT)
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)
    events = list(client.messages.create(messages=CHAT, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type not in ("content_block_delta", "ping")]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ], kinds
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == text
    with client.messages.stream(messages=CHAT, system="Answer briefly.", **GREEDY) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == pieces and final.usage.output_tokens == 16, final
    blocks = client.messages.create(
        messages=[{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}],
        system=[{"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral"}}],
        **GREEDY,
    )
    assert blocks.content[0].text == pieces, blocks
    stop = text[3:5]
    ended = client.messages.create(messages=CHAT, stop_sequences=[stop], **GREEDY)
    assert ended.stop_reason == "stop_sequence" and ended.stop_sequence == stop, ended
    assert ended.content[0].text == text[: text.index(stop)], ended


def tools(client):
    """A tool that must be called, whole and as a stream, and the turn after it."""
    ask = {
        "model": "demo",
        "messages": CHAT,
        "max_tokens": 150,
        "extra_body": {"temperature": 0},
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
    }
    whole = client.messages.create(**ask)
    call = whole.content[0]
    assert whole.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "look_up", whole
    assert call.input["count"] in range(1, 10) and call.input["kind"] in ("struct", "trait"), call
    with client.messages.stream(**ask) as stream:
        again = stream.get_final_message().content[0]
    assert again.input == call.input, (again, call)
    turns = CHAT + [
        {"role": "assistant", "content": whole.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a type"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    after = client.messages.create(messages=turns, tools=[TOOL], **GREEDY)
    assert after.content and after.stop_reason in ("end_turn", "max_tokens"), after


def refusals(client):
    """Errors of the right classes, in the right form."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    for error, kind, call in [
        (anthropic.BadRequestError, "invalid_request_error", lambda c: c.messages.create(messages=[], **GREEDY)),
        (
            anthropic.BadRequestError,
            "invalid_request_error",
            lambda c: c.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY),
        ),
        (
            anthropic.AuthenticationError,
            "authentication_error",
            lambda c: c.copy(api_key="wrong").messages.create(messages=CHAT, **GREEDY),
        ),
    ]:
        try:
            call(client)
        except error as found:
            assert found.body["type"] == "error" and found.body["error"]["type"] == kind, found.body
        else:
            raise AssertionError(f"no {error.__name__}")


with anthropic.Anthropic(base_url=sys.argv[1], api_key="secret", max_retries=0) as client:
    texts(client)
    tools(client)
    refusals(client)
    assert "demo" in [model.id for model in client.models.list()]
print("the Anthropic client is content")
