"""EleutherAI's lm-evaluation-harness, through its models local-completions and
local-chat-completions."""

import json
import os
import tempfile
from pathlib import Path

from drive import drive

TASK = """
task: TASK
dataset_path: json
dataset_kwargs: {data_files: {test: RECORDS}}
test_split: test
doc_to_text: "{{question}}"
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
"""
TEXT = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 64}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    {
        "question": "The price of milk is",
        "choices": [" 3.5", " four", " nothing at all"],
        "label": 0,
    },
    {"question": "A user asked", "choices": [" a question", " the assistant"], "label": 1},
]
PRICE = [{"question": "What does milk cost?", "answer": "Milk costs 3.5."}]


def tasks(name, kind, records):
    from lm_eval.tasks import TaskManager

    folder = Path(tempfile.mkdtemp())
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = (TASK + kind).replace("TASK", name).replace("RECORDS", str(file))
    (folder / f"{name}.yaml").write_text(text)
    os.environ["HF_HOME"] = str(folder / "cache")
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(model, path, manager, task, **more):
    from lm_eval import simple_evaluate

    given = {
        "model": os.environ["JAXRL_MODEL"],
        "base_url": os.environ["OPENAI_BASE_URL"] + path,
        **more.pop("model_args", {}),
    }
    return simple_evaluate(
        model=model, model_args=given, tasks=[task], task_manager=manager, bootstrap_iters=0, **more
    )


def loglikelihood(batch_size=1):
    manager = tasks("prices", CHOICES, QUESTIONS)
    given = {"auth_token": os.environ["OPENAI_API_KEY"], "batch_size": batch_size}
    result = evaluated(
        "local-completions", "/completions", manager, "prices", model_args=given, log_samples=True
    )
    return [
        [*asked["gen_args_0"].values(), *resp[0]]
        if isinstance(asked, dict) and "gen_args_0" in asked
        else [*asked, *resp[0]]
        for sample in result["samples"]["prices"]
        for asked, resp in zip(arguments(sample), sample["resps"], strict=True)
    ]


def arguments(sample):
    given = sample["arguments"]
    return [list(a.values()) for a in given.values()] if isinstance(given, dict) else given


def loglikelihood_in_batches():
    return loglikelihood(3)


def completions():
    manager = tasks("answers", TEXT, PRICE)
    given = {"auth_token": os.environ["OPENAI_API_KEY"]}
    result = evaluated("local-completions", "/completions", manager, "answers", model_args=given)
    return result["results"]["answers"]["exact_match,none"]


def chat():
    manager = tasks("answers", TEXT, PRICE)
    result = evaluated(
        "local-chat-completions", "/chat/completions", manager, "answers", apply_chat_template=True
    )
    return result["results"]["answers"]["exact_match,none"]


MODES = {f.__name__: f for f in (loglikelihood, loglikelihood_in_batches, completions, chat)}
if __name__ == "__main__":
    drive("lm-eval", MODES)
