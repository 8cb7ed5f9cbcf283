"""Hugging Face's smolagents."""

import os

from drive import drive


def shop(kind, **more):
    import smolagents

    @smolagents.tool
    def price(item: str) -> float:
        """Return the price of an item.

        Args:
            item: its name
        """
        return {"milk": 3.5, "bread": 2.0}[item]

    model = smolagents.OpenAIModel(
        model_id=os.environ["JAXRL_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = getattr(smolagents, kind)(tools=[price], model=model, max_steps=4, **more)
    return agent.run("What does milk cost?")


def tool_calling():
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def price(item: str) -> float:
        """Return the price of an item.

        Args:
            item: its name
        """
        return {"milk": 3.5, "bread": 2.0}[item]

    model = OpenAIModel(
        model_id=os.environ["JAXRL_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    answer = ToolCallingAgent(tools=[price], model=model).run("What does milk cost?")
    return answer


def tool_calling_stream():
    return shop("ToolCallingAgent", stream_outputs=True)


def code():
    return shop("CodeAgent")


def code_stream():
    return shop("CodeAgent", stream_outputs=True)


def code_structured():
    return shop("CodeAgent", use_structured_outputs_internally=True)


MODES = {
    f.__name__: f
    for f in (tool_calling, tool_calling_stream, code, code_stream, code_structured)
}  # fmt: skip
if __name__ == "__main__":
    drive("smolagents", MODES)
