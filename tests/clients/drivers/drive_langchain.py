"""LangChain's client of OpenAI, alone and as a LangGraph."""

import os

from drive import drive


def price(item: str) -> float:
    """Return the price of an item."""
    return {"milk": 3.5, "bread": 2.0}[item]


def llm(**more):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=os.environ["JAXRL_MODEL"], **more)


def bind_tools(**more):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=os.environ["JAXRL_MODEL"]).bind_tools([price], **more)
    reply = model.invoke("What does milk cost?")
    call = reply.tool_calls[0]
    return [call["name"], call["args"], call["id"]]


def bind_tools_any():
    return bind_tools(tool_choice="any", strict=True)


def bind_tools_stream():
    chunks = list(llm().bind_tools([price]).stream("What does milk cost?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    call = whole.tool_calls[0]
    return [call["name"], call["args"], call["id"]]


def structured(**more):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    model = ChatOpenAI(model=os.environ["JAXRL_MODEL"]).with_structured_output(Quote, **more)
    quote = model.invoke("Milk costs 3.5. Say it as JSON.")
    return quote.model_dump()


def structured_by_tool():
    return structured(method="function_calling")


def structured_json_mode():
    return structured(method="json_mode")


def graph(**more):
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model=os.environ["JAXRL_MODEL"], **more).bind_tools([price])
    flow = StateGraph(MessagesState)
    flow.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    flow.add_node("tools", ToolNode([price]))
    flow.add_edge(START, "model")
    flow.add_conditional_edges("model", tools_condition)
    flow.add_edge("tools", "model")
    state = flow.compile().invoke({"messages": [("user", "What does milk cost?")]})
    return state["messages"][-1].text


def graph_stream():
    return graph(streaming=True, stream_usage=True)


def graph_responses():
    return graph(use_responses_api=True)


MODES = {
    f.__name__: f
    for f in (
        bind_tools, bind_tools_any, bind_tools_stream, structured, structured_by_tool,
        structured_json_mode, graph, graph_stream, graph_responses,
    )
}  # fmt: skip
if __name__ == "__main__":
    drive("langchain-openai", MODES)
