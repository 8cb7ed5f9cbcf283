"""Settings of the load balance of a mixture's experts: model.balance. Needs no JAX."""

from pydantic import Field

from jaxrl_async.config.section import Section


class BalanceSection(Section):
    """Spread tokens evenly over the experts of a mixture. Both ways are off by default: a
    pre-trained model's routers are balanced, and a loss on them distracts from the rewards."""

    loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balance loss, experts * sum_e (share of the tokens sent to e) * (mean
    probability of e), over an update's tokens without padding: transformers' for all layers
    together (Switch Transformer, arXiv:2101.03961, eq. 4). Where the load is even it is
    experts per token. The model's own router_aux_loss_coef (config.json) is not read: it is the
    coefficient of its pre-training, 0.001 by transformers' defaults."""
    each_layer: bool = False
    """Balance each layer separately, and take the mean of their losses: over all layers together,
    an overloaded expert of one layer is hidden by an idle one of another."""
    bias_rate: float = Field(0.0, ge=0)
    """Step by which each update moves the correction of a router that has one (glm4_moe): up for
    experts with fewer tokens than the mean, down for those with more. No loss, no gradient
    (arXiv:2408.15664; DeepSeek-V3 took 0.001)."""
