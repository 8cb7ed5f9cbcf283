"""Rules about training: terms of the loss that fit together, settings with which nothing, or only
noise, would be trained, adapters, and pairs.

Needs no JAX.
"""

from collections.abc import Iterator

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config, arguments_of, name_of
from jaxrl_async.config.userfile import is_own

rule = RuleBook()


# --- terms of the loss ---------------------------------------------------------------------------


@rule()
def an_offloaded_reference_is_looked_up_by_token(config: Config) -> Iterator[str]:
    """Require that only an offloaded reference's log-probs of sampled tokens are used."""
    if "reference" in config.trainer.offload and (
        config.algorithm.has_whole_kl or not config.holds_reference
    ):
        yield (
            "trainer.offload=reference needs a reference on the trainer's chips "
            "(algorithm.kl_coefficient above 0, or a pairs.loss that compares with it, without "
            "reference.teacher) with only its log-probs of sampled tokens in use "
            "(algorithm.kl other than full). Remove reference from trainer.offload, or change "
            "these settings."
        )


@rule()
def one_whole_distribution_is_compared(config: Config) -> Iterator[str]:
    """Require at most one comparison of whole distributions in a step."""
    if config.algorithm.has_whole_kl and config.distils_by_loss:
        yield (
            "algorithm.kl=full and teacher.form=loss each compare whole distributions, and a "
            "step allows one such comparison. Set algorithm.kl=k3 or teacher.form=advantage."
        )


@rule()
def masked_sampling_compares_no_whole_distribution(config: Config) -> Iterator[str]:
    """Refuse a comparison of whole distributions if sampling masks hide part of them."""
    kept = config.keeps_masks or config.algorithm.keep_sampling_mask
    if kept and config.compares_whole_distributions:
        s = config.sampler
        yield (
            f"sampler.top_k={s.top_k}, top_p={s.top_p:g} and min_p={s.min_p:g} with "
            "algorithm.keep_sampling_mask (null: kept if one of these excludes tokens) use some "
            "tokens of the vocabulary, and algorithm.kl=full or teacher.form=loss use all "
            "of them. Set algorithm.kl=k3 and teacher.form=advantage, or sample without top_k, "
            "top_p and min_p, or accept a biased ratio with keep_sampling_mask=false."
        )


# --- there is something to train on --------------------------------------------------------------


@rule(job="rl")
def answers_are_sampled_at_random(config: Config) -> Iterator[str]:
    """Require more than one token to sample from."""
    s = config.sampler
    if s.temperature == 0 or s.top_k == 1:
        yield (
            f"sampler.temperature ({s.temperature:g}) and sampler.top_k ({s.top_k}) leave one "
            "token to sample: all answers to a prompt would be the same, with log-probs that are "
            "not a policy's. Set temperature=1.0 and top_k=0; eval.temperature sets the "
            "temperature of the evaluation."
        )


@rule(job="rl")
def a_loss_of_whole_ratios_has_the_behavior_as_anchor(config: Config) -> Iterator[str]:
    """Refuse a proximal anchor for losses that weigh by the whole ratio of policy to behaviour."""
    a, name = config.algorithm, name_of(config.algorithm.loss)
    if a.anchor == "proximal" and name in facts.AGAINST_BEHAVIOR and config.pairs is None:
        yield (
            f"algorithm.loss={name} weighs an answer by its whole ratio to the policy that sampled "
            "it, but with algorithm.anchor=proximal ratios are relative to the policy at the start "
            "of the step: positive answers would not get the weight of its paper. Set "
            "algorithm.anchor=behavior, or another loss."
        )


@rule(job="rl")
def a_group_has_answers_to_compare(config: Config) -> Iterator[str]:
    """Require several answers per group, some of which may fail, for what compares them."""
    a, name = config.algorithm, name_of(config.algorithm.advantage)
    compares = name in facts.COMPARED_IN_GROUP and config.weighs_rewards and config.pairs is None
    if a.group_size == 1 and compares:
        yield (
            f"algorithm.advantage={name} compares the answers to one prompt, and "
            "algorithm.group_size=1 has one: all advantages would be 0. Raise group_size, or set "
            "algorithm.advantage=reinforce_pp; for distillation alone teacher.rewards=0."
        )
    comparing = {
        f"algorithm.advantage={name}": compares,
        "pairs.loss": config.pairs is not None,
        "algorithm.dynamic_sampling": a.dynamic_sampling,
    }
    setting = next((setting for setting, applies in comparing.items() if applies), None)
    if a.min_members == 1 < a.group_size and setting is not None:
        yield (
            f"{setting} compares the answers to one prompt, and algorithm.min_members=1 accepts a "
            "group with one answer, which has no training signal. Set min_members to at least "
            "2."
        )


@rule(job="rl")
def tokens_have_different_advantages(config: Config) -> Iterator[str]:
    """Require tokens that differ for advantages that compare tokens.

    All tokens are equal in an undiscounted answer that is rewarded as a whole.
    """
    a, name = config.algorithm, name_of(config.algorithm.advantage)
    kl_per_token = a.kl_coefficient and a.kl_in == "reward"
    own_rewards = any(is_own(function) for function in config.reward.weights)
    if (
        own_rewards
        or config.reward.process is not None
        or kl_per_token
        or not config.weighs_rewards
    ):
        return  # single tokens may be rewarded, or rewards are not used
    alone = a.group_size == 1 and (name == "discounted" or a.groups_per_step == 1)
    undiscounted = arguments_of(a.advantage).get("gamma", 1) == 1
    if alone and undiscounted and name in ("discounted", *facts.CENTERED_IN_STEP):
        where = "group" if name == "discounted" else "step"
        more = "" if name == "discounted" else " or groups_per_step"
        yield (
            f"algorithm.advantage={name} compares the tokens of a {where}, and all tokens of one "
            "answer with gamma=1 are alike: all advantages would be 0. Raise "
            f"algorithm.group_size{more}."
        )


@rule(job="rl")
def dynamic_sampling_selects_by_trained_rewards(config: Config) -> Iterator[str]:
    """Require rewards in the loss if dynamic sampling selects groups by them."""
    dynamic = config.algorithm.dynamic_sampling
    if dynamic and not config.weighs_rewards:
        yield (
            "algorithm.dynamic_sampling drops groups by their rewards, which teacher.rewards=0 "
            "ignores. Set dynamic_sampling=false, or teacher.rewards above 0."
        )


@rule(job="rl")
def demonstrations_are_trained_at_temperature_1(config: Config) -> Iterator[str]:
    """Require temperature 1 with a supervised term in the loss."""
    temperature = config.sampler.temperature
    if config.algorithm.mixes and temperature != 1.0:
        which = "supervised_coefficient" if config.algorithm.supervised_coefficient else "losses"
        yield (
            f"algorithm.{which} trains at sampler.temperature ({temperature}), and demonstrations "
            "need temperature 1. Set the temperature to 1, or leave them out."
        )


# --- teachers by name


@rule(job="rl")
def teachers_are_those_of_the_source(config: Config) -> Iterator[str]:
    """Require teachers exactly if teacher.source=teachers; the reference's is no teacher of
    records."""
    teacher, names = config.teacher, ", ".join(config.distilling)
    uses = teacher is not None and teacher.source == "teachers"
    if config.distilling and not uses:
        yield (
            f"teachers ({names}) have no effect without teacher.source=teachers. Set "
            "teacher={source: teachers}, or leave teachers out."
        )
    elif uses and not config.distilling:
        yield (
            "teacher.source=teachers, and the section teachers is empty. Name them there: "
            "{NAME: {url: ..., model: ...}} or {NAME: {path: ...}}."
        )


@rule()
def a_named_teacher_has_one_source(config: Config) -> Iterator[str]:
    """Require exactly one of url, path and policy, on chips that this process has."""
    for name, teacher in config.named_teachers.items():
        if sum(source is not None for source in (teacher.url, teacher.path, teacher.policy)) != 1:
            yield f"teachers.{name}: set exactly one of url, path and policy."
        elif (own := teacher.policy) and (own.average is None) == (own.every is None):
            yield f"teachers.{name}.policy: set exactly one of average and every."
        elif teacher.url is not None and teacher.model is None:
            yield f"teachers.{name}.url needs the name of the model there: set model next to it."
        if teacher.chips == "sampler" and (config.mesh.remote or config.sampler.engine != "native"):
            yield (
                f"teachers.{name}.chips=sampler computes in this process, and the sampler's chips "
                f"belong to others (mesh.samplers_in={config.mesh.samplers_in}, "
                f"sampler.engine={config.sampler.engine}). Serve it and give its url, or set "
                "chips=trainer."
            )


@rule()
def unmatched_tokens_are_those_of_one_tokenizer(config: Config) -> Iterator[str]:
    """Require one other tokenizer whose tokens the policy may lack, if these are compared."""
    weight = 0.0 if config.teacher is None else config.teacher.unmatched_weight
    tokenizers = {teacher.tokenizer for teacher in config.distilling.values()}
    others = {name for name in tokenizers if name is not None}
    if weight and not others:
        yield (
            f"teacher.unmatched_weight ({weight:g}) has no effect without a teacher with another "
            "tokenizer. Set teachers.NAME.tokenizer, or leave it out."
        )
    elif weight and len(others) > 1:
        yield (
            f"teacher.unmatched_weight ({weight:g}) compares with the tokens of one tokenizer, and "
            f"teachers have {', '.join(sorted(others))}. Choose teachers with one tokenizer, or "
            "leave it out."
        )


@rule()
def a_teacher_can_be_the_reference(config: Config) -> Iterator[str]:
    """Require of reference.teacher a model that says how likely the policy's own tokens are."""
    section = config.reference_settings
    if section.teacher is None:
        return
    where = f"reference.teacher={section.teacher}"
    teacher = config.named_teachers.get(section.teacher)
    if teacher is None:
        names = ", ".join(config.named_teachers) or "none"
        yield f"{where} is not in teachers ({names}). Correct the name, or add it there."
        return
    if not teacher.is_queried:
        yield (
            f"{where} computes on the trainer's chips. Give its path as reference.path, or set "
            f"teachers.{section.teacher}.chips=sampler."
        )
    if unused := [name for name in ("path", "refresh_every", "ema") if section.is_set(name)]:
        yield f"{where} stays as it is: reference.{unused[0]} has no effect. Leave one of them out."
    if unused := [name for name in ("context", "tokenizer", "weight") if teacher.is_set(name)]:
        yield (
            f"{where} is compared with the policy token by token: "
            f"teachers.{section.teacher}.{unused[0]} has no effect. Leave it out."
        )
    if config.algorithm.has_whole_kl:
        yield (
            f"{where} gives the log-probs of sampled tokens, and algorithm.kl=full compares all. "
            "Set algorithm.kl=k3, or reference.path."
        )
    if config.sampler.truncates and config.keeps_masks:
        s = config.sampler
        yield (
            f"{where} gives log-probs over the whole vocabulary, and the policy's are over the "
            f"tokens that top_k={s.top_k}, top_p={s.top_p:g} and min_p={s.min_p:g} leave. Sample "
            "without them, or set reference.path."
        )


@rule()
def servers_give_what_the_loss_compares(config: Config) -> Iterator[str]:
    """Require a loss over some of the likeliest tokens, at the temperature of the servers."""
    teacher = config.teacher
    teachers = config.named_teachers
    served = {name: server for name, server in teachers.items() if server.url is not None}
    if teacher is not None and teacher.source != "teachers":
        teacher = None
    if teacher is not None and teacher.form == "loss" and not teacher.top_k:
        yield (
            "teacher.form=loss with teacher.source=teachers compares the likeliest tokens, and "
            "teacher.top_k=0 asks for none. Set teacher.top_k, such as 16."
        )
    if teacher is not None and teacher.top_k_of == "student":
        yield (
            "teacher.top_k_of=student needs the teacher's log-probs of the policy's likeliest "
            "tokens, which teacher.source=teachers does not ask for. Leave it out."
        )
    if served and config.sampler.temperature != 1.0:
        yield (
            f"teachers ({', '.join(served)}) give log-probs at temperature 1, and "
            f"sampler.temperature is {config.sampler.temperature:g}: the two distributions would "
            "differ even between equal models. Set sampler.temperature=1."
        )
    for name, server in served.items():
        compared = name in config.distilling and teacher is not None and teacher.form == "loss"
        if server.protocol == "echo" and compared:
            yield (
                f"teachers.{name}.protocol=echo gives no token ids of likely tokens, which "
                "teacher.form=loss compares. Set protocol=completions, or teacher.form=advantage."
            )


# --- adapters, and the balance of experts --------------------------------------------------------


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


# --- pairs of the policy's own answers -----------------------------------------------------------


@rule(job="rl")
def pairs_fit_the_algorithm(config: Config) -> Iterator[str]:
    """Require groups, updates, a KL and a teacher that pairs of whole answers can be used with."""
    a, teacher = config.algorithm, config.teacher
    if config.pairs is None:
        return
    if a.group_size < 2:
        yield (
            "pairs.loss compares answers to one prompt, and algorithm.group_size=1 samples one. "
            "Raise it to at least 2."
        )
    if a.epochs * a.minibatches > 1:
        yield (
            f"pairs.loss trains on a step's pairs in one update, and algorithm.epochs ({a.epochs}) "
            f"times minibatches ({a.minibatches}) is {a.epochs * a.minibatches}: later updates "
            "would use the answers' log-probs from before the first. Set both to 1; for more "
            "updates lower algorithm.groups_per_step and raise run.steps, or use buffer.reuse."
        )
    if a.kl_coefficient > 0 and a.kl_in == "reward":
        yield (
            "algorithm.kl_in=reward subtracts a KL from the rewards of tokens, and pairs.loss uses "
            "only which answer is better. Set kl_in=loss, or leave algorithm.kl_coefficient out: "
            "the beta of pairs.loss limits the distance from the reference."
        )
    if a.has_whole_kl:
        yield (
            f"algorithm.kl={name_of(a.kl)} compares whole distributions, and with pairs.loss only "
            "the reference's log-probs of tokens are computed. Set algorithm.kl=k3, or leave "
            "algorithm.kl_coefficient out."
        )
    if teacher is not None and not config.distils_by_loss:
        yield (
            "teacher.form=advantage adds to advantages, and pairs.loss has none. Set "
            "teacher.form=loss, or teacher=null."
        )
    if config.distils_by_loss and not config.weighs_rewards:
        yield "teacher.rewards=0 gives pairs.loss no weight. Raise it, or set pairs=null."
    if a.pivots is not None:
        yield (
            "pairs.loss compares whole answers, and algorithm.pivots adds ends of answers to their "
            "group. Set algorithm.pivots=null, or pairs=null."
        )
