"""Rules about adapters (model.lora) and balancing experts (model.balance). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config

rule = RuleBook()


@rule(job="rl")
def an_adapter_reaches_our_samplers(config: Config) -> Iterator[str]:
    """Require samplers that can load an adapter: only the adapter is sent to them."""
    if config.model.lora is not None and config.sampler.engine != "native":
        yield (
            f"model.lora (rank {config.model.lora.rank}) sends only an adapter, which "
            f"sampler.engine={config.sampler.engine} cannot load. Set model.lora=null, or "
            "sampler.engine=native."
        )


@rule()
def the_base_of_an_adapter_stays_as_it_was_loaded(config: Config) -> Iterator[str]:
    """Refuse a warm start of a loaded model: it trains all weights, and an adapter is used because
    training them does not fit in memory."""
    trained = config.warm_start.steps > 0 and config.run.job != "sft"
    if config.model.lora is not None and config.model.path is not None and trained:
        yield (
            f"warm_start.steps ({config.warm_start.steps}) would train all weights of model.path, "
            f"but model.lora (rank {config.model.lora.rank}) only an adapter. Train the records "
            "by run.job=sft with the adapter first and set its policy as model.path, or set "
            "warm_start.steps=0."
        )


@rule(job="rl")
def trainer_and_samplers_share_a_quantised_base(config: Config) -> Iterator[str]:
    """Refuse different quantisations of the base in samplers and trainer."""
    lora, dtype = config.model.lora, config.weights.eight_bits
    if lora is not None and lora.base != "full" and dtype:
        yield (
            f"weights.dtype={dtype} quantises only the samplers' weights, and "
            f"model.lora.base={lora.base} the weights of trainer and samplers. Leave weights.dtype "
            "out, or set model.lora.base=full."
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
