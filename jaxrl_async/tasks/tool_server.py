"""Run as a script: calls tools for the process that started it (tool_process.py). Needs no JAX."""

import asyncio
import inspect
import json
from typing import Any

from jaxrl_async.tasks.function_source import FunctionSource, load_function
from jaxrl_async.tasks.toolbox import checked_arguments, shown_error, text_of
from jaxrl_async.tasks.user_process import serve_requests


def reply_to(request: bytes) -> bytes:
    """Call a tool, or only load it where the arguments are null."""
    try:
        return json.dumps({"text": _text(json.loads(request))}).encode()
    except BaseException as error:  # every exception belongs to the call
        return json.dumps({"error": [type(error).__name__, shown_error(error)]}).encode()


def _text(message: Any) -> str:
    tool = load_function(FunctionSource(**message["source"]))
    if message["arguments"] is None:
        return ""
    result = tool(**checked_arguments(tool, message["arguments"]))
    return text_of(asyncio.run(_waited(result)) if inspect.isawaitable(result) else result)


async def _waited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    serve_requests(reply_to)
