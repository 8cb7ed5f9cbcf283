"""A harness of the library verifiers whose loop runs in this process: asks, calls tools, asks."""

import json

import mcp
import openai
import verifiers.v1 as vf

__all__ = ["ToolsHarness"]


class ToolsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        (url,) = mcp_urls.values()
        messages = [{"role": "user", "content": data.prompt_text}]
        async with (
            openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client,
            mcp.Client(url) as tools,
        ):
            known = [
                {"type": "function", "function": {"name": t.name, "description": t.description}}
                for t in (await tools.list_tools()).tools
            ]
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=known
                )
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said.tool_calls:
                    name, arguments = call.function.name, json.loads(call.function.arguments)
                    result = await tools.call_tool(name, arguments)
                    text = "".join(part.text for part in result.content)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
