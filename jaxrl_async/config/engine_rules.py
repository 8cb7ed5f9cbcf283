"""Rules about samplers of other engines (sampler.engine). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config, each_of, name_of

rule = RuleBook()


@rule(job="rl")
def an_engine_has_devices_of_its_own(config: Config) -> Iterator[str]:
    """Require servers to be external, since the run gives them no devices and starts none, and
    engines in this process to be its threads."""
    engine, where = config.sampler.engine, config.mesh.samplers_in
    if engine == "jetstream" and where != "threads":
        yield (
            f"sampler.engine=jetstream samples in threads of this process, and mesh.samplers_in="
            f"{where}. Set mesh.samplers_in=threads."
        )
    if engine == "vllm" and where != "external":
        yield (
            f"sampler.engine={engine} samples on its own devices, and with mesh.samplers_in="
            f"{where} the run would provide them. Set mesh.samplers_in=external."
        )


@rule(job="rl")
def an_engine_supports_the_settings(config: Config) -> Iterator[str]:
    """Refuse what only our own sampler does or gives, and weights that an engine cannot read."""
    engine, model, algorithm = config.sampler.engine, config.model, config.algorithm
    transfer = config.remote_settings.transfer
    if engine == "native":
        return
    keeps = config.keeps_masks or algorithm.keep_sampling_mask
    required = (
        (
            model.decoder is not None,
            f"model.decoder={model.decoder} needs a sampler that runs your own layers",
            "Set model.decoder=null with a family",
        ),
        (
            model.lora is not None,
            "model.lora needs a sampler that loads adapters: nothing else is sent to it",
            "Set model.lora=null",
        ),
        (
            algorithm.pivots is not None,
            "algorithm.pivots needs our sampler's branches",
            "Set algorithm.pivots=null",
        ),
        (
            keeps,
            "algorithm.keep_sampling_mask (null: true with sampler.top_k, top_p or min_p) needs "
            "the sampling mask of each token",
            "Set top_k=0, top_p=1 and min_p=0, accept a biased ratio with keep_sampling_mask=false",
        ),
        (
            algorithm.keep_routing,
            "algorithm.keep_routing needs the experts of each token",
            "Set it to false",
        ),
        (
            config.weights.eight_bits,
            f"weights.dtype={config.weights.dtype} is a format of our sampler",
            "Leave it null, set bfloat16",
        ),
        (
            config.sampler.slots is None,
            "sampler.slots=null needs a sampler whose memory the run knows",
            "Set the number of concurrent requests of a server",
        ),
    )
    for _, needs, remedy in (need for need in required if need[0]):
        yield (
            f"{needs}, which sampler.engine={engine} does not have. {remedy}, or set "
            "sampler.engine=native."
        )
    if engine == "vllm" and transfer not in ("auto", "folder"):
        yield (
            f"remote.transfer={transfer} does not reach sampler.engine={engine}, "
            "which reads weights from files. Leave it out, or set folder and remote.folder."
        )


@rule(job="rl")
def an_engines_tokens_are_corrected(config: Config) -> Iterator[str]:
    """Require a correction for losses without a ratio: the engine's log-probs are not ours."""
    algorithm, engine = config.algorithm, config.sampler.engine
    if engine != "vllm" or name_of(algorithm.loss) not in facts.WITHOUT_RATIO:
        return
    if algorithm.correction is None or algorithm.anchor != "proximal":
        yield (
            f"algorithm.loss={name_of(algorithm.loss)} has no ratio to correct for the other "
            f"numerics and kernels of sampler.engine={engine}. Set "
            "algorithm.correction=tis and algorithm.anchor=proximal, or another loss."
        )


@rule(job="rl")
def jetstream_samples_in_one_way(config: Config) -> Iterator[str]:
    """Refuse features that JetStream's interface lacks: it takes prompts, and gives tokens."""
    sampler, algorithm = config.sampler, config.algorithm
    if sampler.engine != "jetstream":
        return
    why = "which sampler.engine=jetstream does not have: its interface"
    if sampler.on_new_weights != "continue":
        yield (
            f"sampler.on_new_weights={sampler.on_new_weights} needs to take running sequences out "
            f"of their slots, {why} keeps them. Set on_new_weights=continue."
        )
    if algorithm.correction is not None and name_of(each_of(algorithm.correction)[0]) != "none":
        yield (
            "algorithm.correction needs the log-probs of the engine, "
            f"{why} returns only tokens. The trainer's own log-probs are used instead: "
            "each token has an importance weight of 1. Set correction=null."
        )
    if config.staleness.adapt == "ess":
        yield (
            "staleness.adapt=ess needs importance weights, and so the log-probs of the engine, "
            f"{why} returns only tokens. Set adapt=none."
        )
    same = config.eval.temperature == sampler.temperature and not sampler.truncates
    for name, own in config.named_evals.items():
        if own.temperature != sampler.temperature or own.top_p < 1 or own.top_k:
            yield (
                f"evals.{name} samples differently from training, and an engine of JetStream's "
                "interface samples all requests in the same way. Give it sampler.temperature "
                "without top_p and top_k."
            )
    if config.eval.every and not same:
        yield (
            f"eval.temperature ({config.eval.temperature:g}) samples differently from training "
            "(sampler.temperature, top_k, top_p, min_p), and an engine of JetStream's "
            "interface samples all requests in the same way. Set eval.temperature to "
            "sampler.temperature without top_k, top_p and min_p, or eval.every=0."
        )
