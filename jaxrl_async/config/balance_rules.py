"""Rules about balancing experts (model.balance). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config

rule = RuleBook()


@rule()
def an_adapter_leaves_routers_as_they_are(config: Config) -> Iterator[str]:
    """Refuse to balance experts with frozen routers."""
    balance, lora = config.model.balance, config.model.lora
    for name, value in (("loss", balance.loss), ("bias_rate", balance.bias_rate)):
        if lora is not None and value:
            yield (
                f"model.balance.{name} ({value:g}) changes routers, which an adapter "
                f"(model.lora.rank={lora.rank}) keeps frozen. Set {name}=0, or train all "
                "weights (model.lora=null)."
            )


@rule()
def a_correction_is_not_rounded_away(config: Config) -> Iterator[str]:
    """Refuse bias updates that bfloat16 rounds away."""
    rate, rounding = config.model.balance.bias_rate, config.trainer.rounding
    if rate and config.model.param_dtype == "bfloat16" and rounding == "nearest":
        yield (
            f"model.balance.bias_rate ({rate:g}) is below the resolution of bfloat16, and "
            "trainer.rounding=nearest loses it. Set rounding=masters or stochastic, or "
            "model.param_dtype=float32."
        )
