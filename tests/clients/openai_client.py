"""The `openai` package for Python against a running server: openai_client.py URL"""

import asyncio
import sys

import openai

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


def refusals(client):
    """Errors of the right classes."""
    for error, call in [
        (openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=CHAT)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model="demo", messages=[])),
        (openai.NotFoundError, lambda: client.embeddings.create(model="demo", input="x")),
        (openai.NotFoundError, lambda: client.models.retrieve("other")),
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
    completions(client)
    refusals(client)
asyncio.run(many(answer))
print("the Python client is content")
