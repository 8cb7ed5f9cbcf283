"""Rules about samplers of other engines (sampler.engine), and in separate processes
(mesh.samplers_in, remote). Needs no JAX."""

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
def an_engine_has_layers_of_the_policy(config: Config) -> Iterator[str]:
    """Refuse the user's own layers: other engines have only their own model families."""
    engine, decoder = config.sampler.engine, config.model.decoder
    if engine != "native" and decoder is not None:
        yield (
            f"model.decoder={decoder} is a class for this package, and sampler.engine={engine} "
            "cannot run its layers. Set sampler.engine=native, or model.decoder=null with a family."
        )


@rule(job="rl")
def an_engine_can_give_what_is_kept(config: Config) -> Iterator[str]:
    """Refuse to keep data that an engine's answers lack, and weights that it cannot read."""
    engine, algorithm = config.sampler.engine, config.algorithm
    transfer = config.remote_settings.transfer
    if engine == "native":
        return
    if config.keeps_masks or algorithm.keep_sampling_mask:
        yield (
            "algorithm.keep_sampling_mask (null: true with sampler.top_k, top_p or min_p) needs "
            f"the sampling mask of each token, which sampler.engine={engine} does not provide. Set "
            "top_k=0, top_p=1 and min_p=0, or accept a biased ratio with keep_sampling_mask=false."
        )
    if algorithm.keep_routing:
        yield (
            "algorithm.keep_routing needs the experts of each token, which "
            f"sampler.engine={engine} does not provide. Set it to false."
        )
    if config.weights.eight_bits:
        yield (
            f"weights.dtype={config.weights.dtype} is a format of our sampler, which "
            f"sampler.engine={engine} does not read. Leave it null, or set bfloat16."
        )
    if config.sampler.slots is None:
        yield (
            f"sampler.slots=null has no meaning for sampler.engine={engine}, whose memory the run "
            "does not know. Set the number of concurrent requests of a server."
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
def jetstream_draws_in_one_way(config: Config) -> Iterator[str]:
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
    if config.run.replay_schedule is not None:
        yield (
            "run.replay_schedule prescribes the order of each sampler's events, which "
            "sampler.engine=jetstream does not record. Leave it out."
        )


# --- separate processes ---------------------------------------------------------------------------


@rule(job="rl")
def a_replay_has_its_samplers_in_threads(config: Config) -> Iterator[str]:
    """Require the samplers of a replay in this process: other processes are not recorded."""
    if config.run.replay_schedule is not None and config.mesh.remote:
        yield (
            f"run.replay_schedule prescribes the order of each sampler's events, which samplers of "
            f"mesh.samplers_in={config.mesh.samplers_in} cannot follow. Set it to threads; at "
            "staleness.max_staleness=0 the numbers are the same, bit for bit."
        )


@rule(job="rl")
def the_least_number_of_samplers_is_started(config: Config) -> Iterator[str]:
    """Require the run to start as many processes as it waits for."""
    mesh, least = config.mesh, config.remote_settings.min_samplers
    if mesh.samplers_in == "processes" and least > mesh.samplers:
        yield (
            f"remote.min_samplers ({least}) is more than the {mesh.samplers} processes that "
            "mesh.samplers starts: the run would never begin. Lower it, or raise mesh.samplers."
        )
