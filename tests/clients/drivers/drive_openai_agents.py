"""OpenAI's Agents SDK, through both of OpenAI's APIs."""

import os

from drive import drive

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"


def agent(api, **more):
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool
    from openai import AsyncOpenAI

    @function_tool
    def price(item: str) -> float:
        """Return the price of an item."""
        return {"milk": 3.5, "bread": 2.0}[item]

    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = kind(model=os.environ["JAXRL_MODEL"], openai_client=AsyncOpenAI())
    return Agent(name="shop", instructions="Be brief.", tools=[price], model=model, **more)


def chat():
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI

    @function_tool
    def price(item: str) -> float:
        """Return the price of an item."""
        return {"milk": 3.5, "bread": 2.0}[item]

    model = OpenAIChatCompletionsModel(model=os.environ["JAXRL_MODEL"], openai_client=AsyncOpenAI())
    shop = Agent(name="shop", instructions="Be brief.", tools=[price], model=model)
    result = Runner.run_sync(shop, "What does milk cost?")
    return result.final_output


async def responses():
    from agents import Runner

    return (await Runner.run(agent("responses"), "What does milk cost?")).final_output


async def streamed(api):
    from agents import Runner

    result = Runner.run_streamed(agent(api), "What does milk cost?")
    async for _ in result.stream_events():
        pass
    return result.final_output


def chat_stream():
    return streamed("chat")


def responses_stream():
    return streamed("responses")


async def typed(api):
    from agents import Runner
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    shop = agent(api, output_type=Quote)
    shop.tools = []
    result = await Runner.run(shop, "Milk costs 3.5. Say it as JSON.")
    return result.final_output.model_dump()


def chat_typed():
    return typed("chat")


def responses_typed():
    return typed("responses")


async def required():
    from agents import ModelSettings, Runner

    shop = agent("chat", model_settings=ModelSettings(tool_choice="required"))
    return (await Runner.run(shop, "What does milk cost?")).final_output


async def handoff():
    from agents import Agent, Runner

    shop = agent("chat")
    desk = Agent(name="desk", instructions="Hand over.", handoffs=[shop], model=shop.model)
    result = await Runner.run(desk, "What does milk cost?")
    return [result.final_output, result.last_agent.name]


MODES = {
    f.__name__: f
    for f in (
        chat, chat_stream, responses, responses_stream, chat_typed, responses_typed, required,
        handoff,
    )
}  # fmt: skip
if __name__ == "__main__":
    drive("openai-agents", MODES)
