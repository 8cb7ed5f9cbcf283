"""A taskset of the library verifiers: turn a text round, in one turn or again after a reply.

Written as its documentation has it: a Taskset, a Task with rewards, and a Harness whose loop runs
in this process. Imported by name, as users install theirs.
"""

import openai
import verifiers.v1 as vf

__all__ = ["ReverseHarness", "ReverseTaskset"]


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=2.0)
    async def share(self, trace: vf.Trace) -> float:
        """The share of the answer's characters that are in their places."""
        said = trace.last_reply
        return sum(a == b for a, b in zip(said, self.data.answer, strict=False)) / len(
            self.data.answer
        )

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReverseConfig(vf.TasksetConfig):
    words: int = 40
    split: str = "train"


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        for number in range(self.config.words):
            text = f"{number:03d}{self.config.split[0]}"
            yield ReverseTask(
                ReverseData(
                    prompt=f"Turn round: {text}", system_prompt="Be brief.", answer=text[::-1]
                ),
                self.config.task,
            )


class ReverseHarnessConfig(vf.HarnessConfig):
    turns: int = 1


class ReverseHarness(vf.Harness[ReverseHarnessConfig]):
    """Asks, and asks again as often as it is told to."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [{"role": m.role, "content": m.content} for m in prompt or []]
        )
        async with openai.AsyncOpenAI(base_url=f"{endpoint}", api_key=secret) as client:
            for turn in range(self.config.turns):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": f"Again, {turn}."},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
