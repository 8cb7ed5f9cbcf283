"""OLMo 2 and 3: norms only after attention and MLP, queries and keys normalised over all heads."""

from jaxrl_async.model.families.family import NORMS_AFTER, Family, all_but_every

OLMO2 = Family(
    model_type="olmo2",
    classes="Olmo2",
    heads=("SequenceClassification",),
    names=NORMS_AFTER,
    norms="after",
    norm_eps=1e-5,
    qk_norm="whole",
    biases="configured",
)
OLMO3 = Family(
    model_type="olmo3",
    classes="Olmo3",
    heads=("SequenceClassification",),
    names=NORMS_AFTER,
    norms="after",
    norm_eps=1e-5,
    qk_norm="whole",
    biases="configured",
    theta=5e5,
    window_rope="unscaled",
    window=4096,
    lists_layers=True,
    windowed=all_but_every(4),
)
