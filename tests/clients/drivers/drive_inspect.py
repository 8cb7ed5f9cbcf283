"""Inspect, the evaluation framework of the UK's AI Security Institute."""

import os
import tempfile

from drive import drive


def evaluate(**more):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def price():
        async def execute(item: str) -> str:
            """Return the price of an item.

            Args:
                item: its name
            """
            return str({"milk": 3.5, "bread": 2.0}[item])

        return execute

    os.environ["JAXRL_API_KEY"] = os.environ["OPENAI_API_KEY"]
    (log,) = eval(
        Task(
            dataset=[Sample(input="What does milk cost?", target="3.5")],
            solver=[use_tools(price()), generate()],
            scorer=includes(),
        ),
        model="openai-api/jaxrl/" + os.environ["JAXRL_MODEL"],
        model_base_url=os.environ["OPENAI_BASE_URL"],
        display="none",
        log_dir=tempfile.mkdtemp(),
        **more,
    )
    if log.status != "success":
        raise RuntimeError(log.error.message if log.error else log.status)
    (sample,) = log.samples
    return [sample.output.completion, sample.scores["includes"].value]


def evaluate_with_settings():
    return evaluate(
        temperature=0.7, max_tokens=500, seed=3, logprobs=True, top_logprobs=3, max_connections=2
    )


MODES = {f.__name__: f for f in (evaluate, evaluate_with_settings)}
if __name__ == "__main__":
    drive("inspect-ai", MODES)
