"""Whether the trainer takes log-probs of exactly the distribution that tokens were drawn from."""

import logging

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.moe import id_dtype
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.token_columns import Routing

log = logging.getLogger(__name__)


def keeps_masks(config: Config) -> bool:
    """Whether sampling masks go with the tokens; says so where they are missed or not needed."""
    s, wanted = config.sampler, config.algorithm.keep_sampling_mask
    truncates = s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0
    if wanted and not truncates:
        log.info(
            "algorithm.keep_sampling_mask does nothing here: sampler.top_k, top_p and min_p leave "
            "the whole vocabulary to draw from"
        )
    if truncates and not wanted:
        log.warning(
            "sampler.top_k=%d, top_p=%g, min_p=%g cut the distribution that tokens are drawn from, "
            "while the trainer takes log-probs over the whole vocabulary: the ratio is biased, see "
            "mismatch/mean. Set algorithm.keep_sampling_mask=true.",
            s.top_k,
            s.top_p,
            s.min_p,
        )
    return wanted and truncates


def routing_of(spec: ModelSpec) -> Routing:
    """What the expert ids of a mixture of experts look like."""
    return Routing(spec.layers, spec.experts_per_token, id_dtype(spec.experts))


def check_routing(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where experts are to be kept of a model that has none."""
    if config.algorithm.keep_routing and not spec.experts:
        raise ConfigError(
            f"algorithm.keep_routing=true needs a mixture of experts, but the {spec.family} model "
            f"({config.model.path or 'model.architecture'}) is dense: its tokens are not routed. "
            "Set algorithm.keep_routing=false."
        )
