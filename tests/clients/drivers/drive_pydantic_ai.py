"""Pydantic AI, through three APIs."""

import os

from drive import drive


def shop(model, **more):
    from pydantic_ai import Agent

    agent = Agent(model, instructions="Be brief.", **more)

    @agent.tool_plain
    def price(item: str) -> float:
        """Return the price of an item."""
        return {"milk": 3.5, "bread": 2.0}[item]

    return agent


def chat_model():
    from pydantic_ai.models.openai import OpenAIChatModel

    return OpenAIChatModel(os.environ["JAXRL_MODEL"])


def chat():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(os.environ["JAXRL_MODEL"]), instructions="Be brief.")

    @agent.tool_plain
    def price(item: str) -> float:
        """Return the price of an item."""
        return {"milk": 3.5, "bread": 2.0}[item]

    result = agent.run_sync("What does milk cost?")
    return result.output


async def chat_stream():
    async with shop(chat_model()).run_stream("What does milk cost?") as result:
        return await result.get_output()


async def responses():
    from pydantic_ai.models.openai import OpenAIResponsesModel

    model = OpenAIResponsesModel(os.environ["JAXRL_MODEL"])
    return (await shop(model).run("What does milk cost?")).output


async def messages():
    from pydantic_ai.models.anthropic import AnthropicModel

    model = AnthropicModel(os.environ["JAXRL_MODEL"])
    return (await shop(model).run("What does milk cost?")).output


async def typed(kind):
    from pydantic import BaseModel
    from pydantic_ai import Agent

    class Quote(BaseModel):
        item: str
        price: float

    agent = Agent(chat_model(), output_type=kind(Quote))
    return (await agent.run("Milk costs 3.5. Say it as JSON.")).output.model_dump()


def typed_by_tool():
    return typed(lambda quote: quote)


def typed_natively():
    from pydantic_ai import NativeOutput

    return typed(NativeOutput)


MODES = {
    f.__name__: f
    for f in (chat, chat_stream, responses, messages, typed_by_tool, typed_natively)
}  # fmt: skip
if __name__ == "__main__":
    drive("pydantic-ai-slim", MODES)
