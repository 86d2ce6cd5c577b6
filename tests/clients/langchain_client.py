"""LangChain's packages for OpenAI's and Ollama's interface: langchain_client.py URL"""

import sys

import langchain_ollama
import langchain_openai
import pydantic

URL = sys.argv[1]
ASK = "What is a vector?"
OPENAI = {"model": "demo", "base_url": URL + "/v1", "api_key": "secret", "max_retries": 0}
OLLAMA = {"model": "demo", "base_url": URL, "client_kwargs": {"headers": {"Authorization": "Bearer secret"}}}


class LookUp(pydantic.BaseModel):
    """Looks up a type."""

    name: str = pydantic.Field(max_length=12)


def main():
    chat = langchain_openai.ChatOpenAI(**OPENAI, temperature=0, max_tokens=16)
    answer = chat.invoke(ASK)
    assert answer.content and answer.usage_metadata["output_tokens"] == 16, answer
    assert "".join(part.content for part in chat.stream(ASK)) == answer.content
    assert [one.content for one in chat.batch([ASK, ASK])] == [answer.content] * 2
    other = langchain_ollama.ChatOllama(**OLLAMA, temperature=0, num_predict=16)
    assert other.invoke(ASK).content == answer.content
    assert "".join(part.content for part in other.stream(ASK)) == answer.content

    longer = langchain_openai.ChatOpenAI(**OPENAI, temperature=0, max_tokens=120)
    called = longer.bind_tools([LookUp], tool_choice="LookUp", strict=True).invoke(ASK)
    assert called.tool_calls[0]["name"] == "LookUp" and "name" in called.tool_calls[0]["args"], called
    structured = longer.with_structured_output(LookUp, method="json_schema").invoke(ASK)
    assert isinstance(structured, LookUp), structured

    texts = ["A vector", "A trait", "A vector"]
    # Lengths are the server's to check: its tokens are not those of OpenAI's models.
    openai = langchain_openai.OpenAIEmbeddings(**OPENAI, check_embedding_ctx_length=False)
    found = openai.embed_documents(texts)
    assert len(found) == 3 and found[0] == found[2] != found[1], found
    ollama = langchain_ollama.OllamaEmbeddings(**OLLAMA)
    same = ollama.embed_documents(texts)
    assert all(abs(a - b) < 1e-6 for a, b in zip(found[0], same[0], strict=True))
    print("the LangChain clients are content")


main()
