"""The `openai-agents` package against a scripted model: agents_client.py URL

The package runs the loop: it calls the functions that the model names and sends the results back.
"""

import asyncio
import sys

import agents
import openai
from scripted import said

CALLED = []


@agents.function_tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    CALLED.append(("get_weather", city, days))
    return f"It is 21 °C in {city}."


@agents.function_tool
def convert(celsius: float) -> str:
    """Degrees Fahrenheit."""
    CALLED.append(("convert", celsius))
    return str(celsius * 9 / 5 + 32)


@agents.function_tool
def list_cities() -> list[str]:
    """All cities."""
    CALLED.append(("list_cities",))
    return ["Zürich", "Genève"]


WANTED = [("convert", 21.5), ("get_weather", "Zürich", 2), ("list_cities",)]
TOOLS = [get_weather, convert, list_cities]
ANSWER = said("agents")[3]


async def whole(model):
    """Three calls, two of them at once, and the answer."""
    CALLED.clear()
    agent = agents.Agent(name="Weather", instructions="Use the tools.", model=model, tools=TOOLS)
    result = await agents.Runner.run(agent, "script agents: How warm is it?")
    assert result.final_output == ANSWER, result.final_output
    assert sorted(CALLED) == WANTED, CALLED
    kinds = [item.type for item in result.new_items]
    wanted = ["tool_call_item"] * 3 + ["tool_call_output_item"] * 3 + ["message_output_item"]
    assert sorted(kind for kind in kinds if kind != "reasoning_item") == sorted(wanted), kinds
    assert result.context_wrapper.usage.requests == 3, result.context_wrapper.usage
    again = await agents.Runner.run(
        agent, result.to_input_list() + [{"role": "user", "content": "Thank you, say it again."}]
    )
    assert again.final_output == ANSWER or again.final_output, again


async def streamed(model):
    """The same as a stream: the pieces are the answer."""
    CALLED.clear()
    agent = agents.Agent(name="Weather", instructions="Use the tools.", model=model, tools=TOOLS)
    result = agents.Runner.run_streamed(agent, "script agents: How warm is it?")
    pieces = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces += event.data.delta
    assert result.final_output == ANSWER and pieces.endswith(ANSWER), (result.final_output, pieces)
    assert sorted(CALLED) == WANTED, CALLED


async def handoff(model):
    """An agent hands over to another one."""
    poet = agents.Agent(name="Poet", instructions="Write poems.", model=model)
    desk = agents.Agent(name="Desk", instructions="Hand over.", model=model, handoffs=[poet])
    result = await agents.Runner.run(desk, "script handoff: a poem, please")
    assert result.last_agent.name == "Poet" and result.final_output == said("handoff")[1], result


async def main():
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="secret", max_retries=0)
    for model in [
        agents.OpenAIResponsesModel(model="scripted", openai_client=client),
        agents.OpenAIChatCompletionsModel(model="scripted", openai_client=client),
    ]:
        await whole(model)
        await streamed(model)
        await handoff(model)
    await client.close()


asyncio.run(main())
print("the agents of openai-agents are content")
