"""The `ollama` package for Python against a running server: ollama_client.py URL"""

import sys

import ollama

CHAT = [{"role": "user", "content": "What is a vector?"}]
OPTIONS = {"num_predict": 16, "temperature": 0}


def main():
    client = ollama.Client(host=sys.argv[1], headers={"Authorization": "Bearer secret"})
    whole = client.chat("demo", CHAT, options=OPTIONS)
    text = whole.message.content
    assert text and whole.done and whole.done_reason in ("stop", "length"), whole
    assert 0 < whole.eval_count <= 16 and whole.eval_duration > 0, whole
    parts = list(client.chat("demo", CHAT, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == text, parts
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    found = client.generate("demo", "The borrow checker", raw=True, options=OPTIONS)
    parts = client.generate("demo", "The borrow checker", raw=True, options=OPTIONS, stream=True)
    assert "".join(part.response for part in parts) == found.response
    told = client.chat("demo", CHAT, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert "".join(token.token for token in told.logprobs) == told.message.content == text, told
    assert all(len(token.top_logprobs) == 2 for token in told.logprobs), told
    first = client.generate("demo", "What is a vector?", options=OPTIONS)
    after = client.generate("demo", "Why?", options=OPTIONS, context=first.context)
    said = first.eval_count - (first.done_reason == "stop")
    assert after.prompt_eval_count > len(first.context) == first.prompt_eval_count + said, first
    embedded = client.embed("demo", ["A vector", "A trait"])
    assert [round(sum(value**2 for value in one), 4) for one in embedded.embeddings] == [1, 1], embedded
    assert len(client.embeddings("demo", "A vector").embedding) == len(embedded.embeddings[0])
    assert [model.model for model in client.list().models] == ["demo"]
    shown = client.show("demo")
    assert shown.details.family == shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == client.ps().models[0].context_length
    assert client.ps().models[0].digest == client.list().models[0].digest
    print("the Ollama client is content")


main()
