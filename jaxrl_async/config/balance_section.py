"""Settings of how evenly a mixture's experts are used: model.balance. Needs no JAX."""

from pydantic import Field

from jaxrl_async.config.section import Section


class BalanceSection(Section):
    """Spread tokens evenly over the experts of a mixture. Both are off by default: a trained
    model's routers are balanced, and a loss on them is not what rewards ask for."""

    loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balance loss, experts * sum_e (share of the tokens sent to e) * (mean
    probability of e), over an update's tokens without padding: transformers' for all layers
    together (Switch Transformer, arXiv:2101.03961, eq. 4). Where the load is even it is
    experts per token. The model's own router_aux_loss_coef (config.json) is not read: it is what
    its pre-training took, 0.001 by transformers' defaults."""
    each_layer: bool = False
    """Balance each layer by itself, and take the mean of their losses: in the layers together, one
    layer's busy expert is hidden by another's idle one."""
    bias_rate: float = Field(0.0, ge=0)
    """How far each update moves the correction of a router that has one (glm4_moe): up for experts
    with fewer tokens than the mean, down for those with more. No loss, no gradient
    (arXiv:2408.15664; DeepSeek-V3 took 0.001)."""
