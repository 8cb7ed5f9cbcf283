"""The official client of OpenAI."""

import json
import os

from drive import drive

TOOL = {
    "name": "price",
    "description": "Return the price of an item.",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
        "additionalProperties": False,
    },
    "strict": True,
}


def price(item: str) -> float:
    return {"milk": 3.5, "bread": 2.0}[item]


def chat(**more):
    from openai import OpenAI

    client, model = OpenAI(), os.environ["JAXRL_MODEL"]  # address and key: from the environment
    tools = [{"type": "function", "function": TOOL}]
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        reply = client.chat.completions.create(model=model, messages=messages, tools=tools, **more)
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            content = str(price(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message.content


def chat_stream():
    from openai import OpenAI

    client, model = OpenAI(), os.environ["JAXRL_MODEL"]
    tools = [{"type": "function", "function": TOOL}]
    messages = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            content = str(price(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def chat_usual_fields():
    return chat(
        temperature=0.7,
        top_p=0.9,
        seed=3,
        max_completion_tokens=200,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        reasoning_effort="low",
        parallel_tool_calls=False,
        logprobs=True,
        top_logprobs=5,
        logit_bias={"5": -1},
        stop=["\n\nUser:"],
        user="someone",
    )


def chat_required(choice="required"):
    from openai import OpenAI

    reply = OpenAI().chat.completions.create(
        model=os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "What does milk cost?"}],
        tools=[{"type": "function", "function": TOOL}],
        tool_choice=choice,
    )
    call = reply.choices[0].message.tool_calls[0]
    return [call.function.name, json.loads(call.function.arguments), call.id]


def chat_named():
    return chat_required({"type": "function", "function": {"name": "price"}})


def chat_parse():
    from openai import OpenAI
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    reply = OpenAI().chat.completions.parse(
        model=os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
        response_format=Quote,
    )
    quote = reply.choices[0].message.parsed
    return quote.model_dump()


def chat_parse_stream():
    from openai import OpenAI
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    with OpenAI().chat.completions.stream(
        model=os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
        response_format=Quote,
    ) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message.parsed.model_dump()


def chat_json_object():
    from openai import OpenAI

    reply = OpenAI().chat.completions.create(
        model=os.environ["JAXRL_MODEL"],
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
        response_format={"type": "json_object"},
    )
    return json.loads(reply.choices[0].message.content)


def responses():
    from openai import OpenAI

    client, model = OpenAI(), os.environ["JAXRL_MODEL"]
    items = [{"role": "user", "content": "What does milk cost?"}]
    while True:
        reply = client.responses.create(
            model=model, input=items, tools=[{"type": "function", **TOOL}]
        )
        items += reply.output
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            output = str(price(**json.loads(call.arguments)))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )
    return reply.output_text


def responses_stream():
    from openai import OpenAI

    client, model = OpenAI(), os.environ["JAXRL_MODEL"]
    items, previous = [{"role": "user", "content": "What does milk cost?"}], None
    while True:
        with client.responses.stream(
            model=model,
            input=items,
            tools=[{"type": "function", **TOOL}],
            **({"previous_response_id": previous} if previous else {}),
        ) as stream:
            for _ in stream:
                pass
            reply = stream.get_final_response()
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        previous = reply.id
        items = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(price(**json.loads(call.arguments))),
            }
            for call in calls
        ]


def responses_required():
    from openai import OpenAI

    reply = OpenAI().responses.create(
        model=os.environ["JAXRL_MODEL"],
        input="What does milk cost?",
        tools=[{"type": "function", **TOOL}],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
    )
    call = next(item for item in reply.output if item.type == "function_call")
    return [call.name, json.loads(call.arguments), call.call_id]


def responses_parse():
    from openai import OpenAI
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    reply = OpenAI().responses.parse(
        model=os.environ["JAXRL_MODEL"],
        input="Milk costs 3.5. Say it as JSON.",
        text_format=Quote,
    )
    quote = reply.output_parsed
    return quote.model_dump()


def completions():
    from openai import OpenAI

    reply = OpenAI().completions.create(
        model=os.environ["JAXRL_MODEL"], prompt=["Milk", "Bread"], max_tokens=8, n=2
    )
    return [[choice.index, choice.text] for choice in reply.choices]


def models():
    from openai import OpenAI

    client = OpenAI()
    first = next(iter(client.models.list()))
    return client.models.retrieve(first.id).id == first.id


MODES = {
    f.__name__: f
    for f in (
        chat, chat_stream, chat_usual_fields, chat_required, chat_named, chat_parse,
        chat_parse_stream, chat_json_object, responses, responses_stream, responses_required,
        responses_parse, completions, models,
    )
}  # fmt: skip
if __name__ == "__main__":
    drive("openai", MODES)
