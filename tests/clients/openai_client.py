"""The `openai` package for Python against a running server: openai_client.py URL"""

import asyncio
import json
import sys
import typing

import openai
import pydantic

URL = sys.argv[1] + "/v1"
CHAT = [{"role": "user", "content": "What is a vector?"}]
GREEDY = {"model": "demo", "max_tokens": 16, "temperature": 0}


def chat(client):
    """A whole answer, its log-probabilities, and the same one as a stream."""
    whole = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    choice = whole.choices[0]
    text = choice.message.content
    assert text and choice.finish_reason in ("stop", "length"), whole
    assert "".join(token.token for token in choice.logprobs.content) == text
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    pieces, reasons, usage = [], [], None
    for chunk in client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        usage = chunk.usage or usage
        for part in chunk.choices:
            pieces.append(part.delta.content or "")
            reasons += [part.finish_reason] if part.finish_reason else []
    assert "".join(pieces) == text, (pieces, text)
    assert reasons == [choice.finish_reason]
    assert usage.completion_tokens == whole.usage.completion_tokens
    return text


def responses(client, text):
    """The newer interface gives the same answer, whole and as events."""
    ask = {"model": "demo", "input": CHAT, "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**ask)
    assert whole.output_text == text and whole.status in ("completed", "incomplete"), whole
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert events[-1].type == "response." + whole.status, events[-1]
    assert "".join(deltas) == text and final.output_text == text
    assert final.usage.total_tokens == whole.usage.total_tokens


def stored(client):
    """A response is kept, continued, and deleted; a custom tool is called with a text."""
    ask = {"model": "demo", "max_output_tokens": 16, "temperature": 0}
    first = client.responses.create(input="What is a vector?", metadata={"run": "7"}, **ask)
    assert first.metadata == {"run": "7"} and first.usage.output_tokens_details.reasoning_tokens == 0, first
    whole = client.responses.create(
        input=CHAT + [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Why?"}], **ask
    )
    again = client.responses.create(input="Why?", previous_response_id=first.id, **ask)
    assert again.output_text == whole.output_text and again.previous_response_id == first.id, again
    assert client.responses.retrieve(again.id).output_text == again.output_text
    client.responses.delete(again.id)
    for call in (
        lambda: client.responses.retrieve(again.id),
        lambda: client.responses.create(input="Why?", previous_response_id=again.id, **ask),
    ):
        try:
            call()
        except openai.NotFoundError as found:
            assert again.id in found.body["message"], found
        else:
            raise AssertionError("no NotFoundError")
    ask |= {"input": CHAT, "max_output_tokens": 60, "tool_choice": {"type": "custom", "name": "note"}}
    ask["tools"] = [{"type": "web_search"}, {"type": "custom", "name": "note", "description": "Notes."}]
    item = client.responses.create(**ask).output[0]
    assert item.type == "custom_tool_call" and item.name == "note" and item.input, item
    with client.responses.stream(**ask) as stream:
        inputs = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(inputs) == item.input, inputs


def completions(client):
    """Texts, several at once, with seeds, stop strings and the prompt's log-probabilities."""
    texts = client.completions.create(
        model="demo", prompt=["A vector", "A trait"], n=2, max_tokens=8, temperature=0.9, seed=5, echo=True
    )
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert [choice.text[:7] for choice in texts.choices] == ["A vecto"] * 2 + ["A trait"] * 2
    told = client.completions.create(model="demo", prompt="A vector", max_tokens=1, echo=True, logprobs=1)
    likely = told.choices[0].logprobs
    assert likely.token_logprobs[0] is None and all(p < 0 for p in likely.token_logprobs[1:]), likely
    ended = client.completions.create(prompt="A vector is", stop=["e"], seed=1, **GREEDY)
    assert "e" not in ended.choices[0].text


def embeddings(client):
    """Of length 1, and the same as numbers and in the form that the package asks for itself."""
    texts = ["A vector", "A trait"]
    packed = client.embeddings.create(model="demo", input=texts)
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert abs(sum(value**2 for value in one.embedding) - 1) < 1e-5, one
        assert all(abs(a - b) < 1e-7 for a, b in zip(one.embedding, other.embedding, strict=True))
    assert packed.usage.total_tokens == packed.usage.prompt_tokens > 3, packed.usage


class Answer(pydantic.BaseModel):
    """What a text is held to."""

    model_config = pydantic.ConfigDict(extra="forbid")
    title: str = pydantic.Field(max_length=24)
    count: int = pydantic.Field(ge=1, le=99)
    kind: typing.Literal["struct", "trait"]


def structured(client):
    """A text that is valid against a schema, by the package's own helpers."""
    ask = {"model": "demo", "temperature": 0.8, "seed": 2}
    parsed = client.chat.completions.parse(messages=CHAT, response_format=Answer, max_tokens=150, **ask)
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer) and parsed.choices[0].finish_reason == "stop", parsed
    parsed = client.responses.parse(model="demo", input=CHAT, text_format=Answer, max_output_tokens=150)
    assert isinstance(parsed.output_parsed, Answer), parsed
    plain = client.chat.completions.create(
        messages=CHAT, response_format={"type": "json_object"}, max_tokens=8, **ask
    )
    assert plain.choices[0].message.content.startswith("{") and plain.choices[0].finish_reason, plain


TOOL = {
    "name": "look_up",
    "description": "Looks up a type.",
    "parameters": {
        "type": "object",
        "properties": {"kind": {"enum": ["struct", "trait"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    },
}


def tools(client):
    """A tool that must be called: whole, as a stream put together by the package, and in the newer interface."""
    ask = {
        "model": "demo",
        "messages": CHAT,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "max_tokens": 150,
        "seed": 4,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
    call = whole.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "look_up" and arguments["count"] in range(1, 10), call
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        again = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert again.function.arguments == call.function.arguments, (again, call)
    turns = CHAT + [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "a type"}]
    after = client.chat.completions.create(messages=turns, tools=ask["tools"], **GREEDY)
    assert after.choices[0].message.content, after
    ask = {
        "model": "demo",
        "input": CHAT,
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 150,
        "extra_body": {"seed": 4},
    }
    items = client.responses.create(**ask).output
    assert items[0].type == "function_call" and json.loads(items[0].arguments), items
    with client.responses.stream(**ask) as stream:
        final = stream.get_final_response()
    assert final.output[0].arguments == items[0].arguments, final


def refusals(client):
    """Errors of the right classes."""
    for error, call in [
        (openai.BadRequestError, lambda: client.chat.completions.create(model="demo", messages=[])),
        (openai.NotFoundError, lambda: client.models.retrieve("other")),
        (openai.BadRequestError, lambda: client.completions.create(prompt="A", extra_body={"grammar": "("}, **GREEDY)),
        (openai.AuthenticationError, lambda: client.copy(api_key="wrong").completions.create(prompt="A", **GREEDY)),
    ]:
        try:
            call()
        except error as found:
            assert found.body["message"], found
        else:
            raise AssertionError(f"no {error.__name__}")


async def many(text):
    """Eight at once, half of them background work: each is the answer that it is alone."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="secret") as client:
        ask = [
            client.chat.completions.create(messages=CHAT, extra_body={"priority": at % 2}, **GREEDY)
            for at in range(8)
        ]
        for answer in await asyncio.gather(*ask):
            assert answer.choices[0].message.content == text, answer


with openai.OpenAI(base_url=URL, api_key="secret", max_retries=0) as client:
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = chat(client)
    responses(client, answer)
    stored(client)
    completions(client)
    embeddings(client)
    structured(client)
    tools(client)
    refusals(client)
asyncio.run(many(answer))
print("the Python client is content")
