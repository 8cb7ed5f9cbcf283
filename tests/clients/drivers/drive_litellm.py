"""LiteLLM, through the routes of OpenAI's and Anthropic's API."""

import json
import os

from drive import drive

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Return the price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}


def price(item: str) -> float:
    return {"milk": 3.5, "bread": 2.0}[item]


def chat():
    import litellm

    model = "openai/" + os.environ["JAXRL_MODEL"]
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        reply = litellm.completion(model=model, messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            content = str(price(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message.content


def loop(provider="openai", **more):
    import litellm

    model = f"{provider}/" + os.environ["JAXRL_MODEL"]
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        reply = litellm.completion(model=model, messages=messages, tools=[TOOL], **more)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            content = str(price(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def chat_stream():
    import litellm

    model = "openai/" + os.environ["JAXRL_MODEL"]
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        stream = litellm.completion(model=model, messages=messages, tools=[TOOL], stream=True)
        reply = litellm.stream_chunk_builder(list(stream), messages=messages)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for call in message.tool_calls:
            content = str(price(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def chat_settings():
    return loop(parallel_tool_calls=False, temperature=0.5, max_tokens=200, top_p=0.9, seed=3)


def chat_required():
    import litellm

    reply = litellm.completion(
        model="openai/" + os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "What does milk cost?"}],
        tools=[TOOL],
        tool_choice="required",
    )
    call = reply.choices[0].message.tool_calls[0]
    return [call.function.name, json.loads(call.function.arguments), call.id]


def hosted_vllm():
    return loop(
        "hosted_vllm",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )


def messages():
    return loop("anthropic", api_base=os.environ["ANTHROPIC_BASE_URL"], max_tokens=1024)


def structured():
    import litellm
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    reply = litellm.completion(
        model="openai/" + os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
        response_format=Quote,
    )
    return json.loads(reply.choices[0].message.content)


MODES = {
    f.__name__: f
    for f in (
        chat, chat_stream, chat_settings, chat_required, hosted_vllm, messages, structured,
    )
}  # fmt: skip
if __name__ == "__main__":
    drive("litellm", MODES)
