"""A shop whose prices the policy asks for with a tool, written for this package."""

from shop_records import RECORDS

from jaxrl_async import Environment, Step, Task


class Shop(Environment):
    tools = ("price",)

    def reset(self, record):
        self.record = record
        return record["question"]

    def price(self, item: str) -> float:
        """Return the price of an item.

        Args:
            item: its name.
        """
        return self.record["prices"][item]

    async def step(self, message):
        if message.get("tool_calls"):
            return await self.run_tools(message)
        right = message["content"].strip() == self.record["answer"]
        return Step(parts={"correct": float(right)})


shop = Task(records=RECORDS, environment=Shop)
