"""The official client of Anthropic."""

import os

from drive import drive

TOOL = {
    "name": "price",
    "description": "Return the price of an item.",
    "input_schema": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
    },
}


def price(item: str) -> float:
    return {"milk": 3.5, "bread": 2.0}[item]


def tools(**more):
    from anthropic import Anthropic

    client, model = Anthropic(), os.environ["JAXRL_MODEL"]  # address and key: from the environment
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        reply = client.messages.create(
            model=model, max_tokens=1024, messages=messages, tools=[TOOL], **more
        )
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": str(price(**b.input))}
            for b in reply.content
            if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return reply.content[-1].text


def tools_stream():
    from anthropic import Anthropic

    client, model = Anthropic(), os.environ["JAXRL_MODEL"]
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        with client.messages.stream(
            model=model, max_tokens=1024, messages=messages, tools=[TOOL]
        ) as stream:
            for _ in stream:
                pass
            reply = stream.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return reply.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": str(price(**b.input))}
            for b in reply.content
            if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def tool_choice(choice="any"):
    from anthropic import Anthropic

    name = {"name": "price"} if choice == "tool" else {}
    reply = Anthropic().messages.create(
        model=os.environ["JAXRL_MODEL"],
        max_tokens=1024,
        messages=[{"role": "user", "content": "What does milk cost?"}],
        tools=[TOOL],
        tool_choice={"type": choice, "disable_parallel_tool_use": True, **name},
    )
    (block,) = [b for b in reply.content if b.type == "tool_use"]
    return [block.name, block.input, block.id]


def tool_choice_named():
    return tool_choice("tool")


def thinking(kind=None):
    from anthropic import Anthropic

    reply = Anthropic().messages.create(
        model=os.environ["JAXRL_MODEL"],
        max_tokens=2048,
        messages=[{"role": "user", "content": "Think. What does milk cost?"}],
        thinking=kind or {"type": "enabled", "budget_tokens": 1024},
    )
    return [[b.type, getattr(b, "thinking", None) or getattr(b, "text", "")] for b in reply.content]


def thinking_adaptive():
    return thinking({"type": "adaptive"})


def thinking_tools():
    return tools(thinking={"type": "enabled", "budget_tokens": 1024})


def system_cached():
    return tools(
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        extra_body={"temperature": 0.7},  # as older versions of the client send it
        metadata={"user_id": "someone"},
    )


def tool_runner():
    from anthropic import Anthropic, beta_tool

    @beta_tool
    def price(item: str) -> str:
        """Return the price of an item.

        Args:
            item: its name
        """
        return str({"milk": 3.5, "bread": 2.0}[item])

    runner = Anthropic().beta.messages.tool_runner(
        model=os.environ["JAXRL_MODEL"],
        max_tokens=1024,
        tools=[price],
        messages=[{"role": "user", "content": "What does milk cost?"}],
    )
    return runner.until_done().content[-1].text


def parse():
    from anthropic import Anthropic
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    reply = Anthropic().messages.parse(
        model=os.environ["JAXRL_MODEL"],
        max_tokens=1024,
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
        output_format=Quote,
    )
    return reply.parsed_output.model_dump()


def count_tokens():
    from anthropic import Anthropic

    counted = Anthropic().messages.count_tokens(
        model=os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "What does milk cost?"}],
        tools=[TOOL],
    )
    return counted.input_tokens > 10


MODES = {
    f.__name__: f
    for f in (
        tools, tools_stream, tool_choice, tool_choice_named, thinking, thinking_adaptive,
        thinking_tools, system_cached, tool_runner, parse, count_tokens,
    )
}  # fmt: skip
if __name__ == "__main__":
    drive("anthropic", MODES)
