"""The same shop for verifiers (its version 1): a taskset, its tasks, and a server of tools.

`vf.SingleAgentEnv`, with a harness that knows MCP, plays it.
"""

import verifiers.v1 as vf
from shop_records import RECORDS

__all__ = ["ShopTaskset"]


class ShopData(vf.TaskData):
    prices: dict[str, float]
    answer: str


class ShopTools(vf.Toolset[vf.ToolsetConfig]):
    async def setup_task(self, task: ShopData) -> None:
        self.prices = task.prices

    @vf.tool
    async def price(self, item: str) -> float:
        """Return the price of an item."""
        return self.prices[item]


class ShopTask(vf.Task[ShopData]):
    @classmethod
    def toolsets(cls, config):
        return [ShopTools(vf.ToolsetConfig())]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class ShopTaskset(vf.Taskset[ShopTask]):
    def load(self):
        for record in RECORDS:
            columns = {"prompt": record["question"], "prices": record["prices"]}
            yield ShopTask(ShopData(**columns, answer=record["answer"]), self.config.task)


if __name__ == "__main__":
    ShopTools.run()
