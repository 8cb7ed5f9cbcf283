"""The same with TRL."""

from datasets import Dataset
from start_task import MODEL, RECORDS, score
from trl import GRPOConfig, GRPOTrainer


def right(completions, answer, **kwargs):
    return [score(text, a) for text, a in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=right,
    train_dataset=Dataset.from_list([{"prompt": r["question"], **r} for r in RECORDS]),
    args=GRPOConfig(
        max_steps=3,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=32,
        logging_steps=1,
        use_cpu=True,
    ),
)
trainer.train()
