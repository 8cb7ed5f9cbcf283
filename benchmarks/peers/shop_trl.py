"""The same shop for TRL: a class for `environment_factory`, a reward function, a data set.

GRPOTrainer(..., train_dataset=DATASET, reward_funcs=correct, environment_factory=Shop)
"""

from datasets import Dataset
from shop_records import RECORDS


class Shop:
    def reset(self, **record):
        self.prices = record["prices"]

    def price(self, item: str) -> float:
        """Return the price of an item.

        Args:
            item: its name.
        """
        return self.prices[item]


def correct(completions, answer, **kwargs):
    texts = [completion[-1]["content"] for completion in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]


def with_prompt(record):
    return {**record, "prompt": [{"role": "user", "content": record["question"]}]}


DATASET = Dataset.from_list([with_prompt(record) for record in RECORDS])
