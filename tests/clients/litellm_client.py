"""The `litellm` package for Python, as a client of three interfaces: litellm_client.py URL"""

import sys

import litellm

URL = sys.argv[1]
CHAT = [{"role": "user", "content": "What is a vector?"}]
GREEDY = {"messages": CHAT, "max_tokens": 16, "temperature": 0, "api_key": "secret", "num_retries": 0}
OPENAI = {"model": "openai/demo", "api_base": URL + "/v1"}
ANTHROPIC = {"model": "anthropic/demo", "api_base": URL}
OLLAMA = {"model": "ollama_chat/demo", "api_base": URL, "extra_headers": {"Authorization": "Bearer secret"}}


def main():
    answers = []
    for interface in (OPENAI, ANTHROPIC, OLLAMA):
        whole = litellm.completion(**interface, **GREEDY)
        answers.append(whole.choices[0].message.content)
        assert whole.usage.completion_tokens == 16, (interface, whole)
        parts = litellm.completion(**interface, **GREEDY, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == answers[-1], (interface, text, answers[-1])
    assert answers[0] and answers[0] == answers[1] == answers[2], answers
    found = litellm.embedding(
        model="openai/demo", input=["A vector", "A trait"], api_base=URL + "/v1", api_key="secret"
    )
    assert len(found.data) == 2 and found.usage.prompt_tokens > 3, found.usage
    assert abs(sum(value**2 for value in found.data[0]["embedding"]) - 1) < 1e-3
    try:
        litellm.completion(**OPENAI, **{**GREEDY, "api_key": "wrong"})
    except litellm.AuthenticationError as error:
        assert error.status_code == 401, error
    else:
        raise AssertionError("a wrong key")
    print("the LiteLLM client is content")


main()
