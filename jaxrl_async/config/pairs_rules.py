"""Rules about training on pairs of the policy's own answers (the section `pairs`). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config, name_of

rule = RuleBook()


@rule(job="rl")
def pairs_have_two_answers(config: Config) -> Iterator[str]:
    """Require at least two answers in each group for pairs."""
    a = config.algorithm
    if config.pairs is None:
        return
    if a.group_size < 2:
        yield (
            "pairs.loss compares answers to one prompt, and algorithm.group_size=1 samples one. "
            "Raise it to at least 2."
        )
    elif a.min_members == 1:
        yield (
            "pairs.loss compares answers to one prompt, and algorithm.min_members=1 accepts a "
            "group with one answer. Set min_members to at least 2."
        )


@rule(job="rl")
def pairs_are_learnt_in_one_update(config: Config) -> Iterator[str]:
    """Require one update per step: each update needs the log-probs of its weights beforehand."""
    a = config.algorithm
    if config.pairs is not None and a.epochs * a.minibatches > 1:
        yield (
            f"pairs.loss trains on a step's pairs in one update, and algorithm.epochs ({a.epochs}) "
            f"times minibatches ({a.minibatches}) is {a.epochs * a.minibatches}: later updates "
            "would use the answers' log-probs from before the first. Set both to 1; for more "
            "updates lower algorithm.groups_per_step and raise run.steps, or use buffer.reuse."
        )


@rule(job="rl")
def pairs_hold_the_reference_in_their_loss(config: Config) -> Iterator[str]:
    """Refuse a KL that would change which answer is better, or that needs whole distributions of a
    reference whose log-probs are computed per token."""
    a = config.algorithm
    if config.pairs is None or not a.kl_coefficient:
        return
    if a.kl_in == "reward":
        yield (
            "algorithm.kl_in=reward subtracts a KL from the rewards of tokens, and pairs.loss "
            "uses only which answer is better. Set kl_in=loss, or leave algorithm.kl_coefficient "
            "out: the beta of pairs.loss limits the distance from the reference."
        )
    if name_of(a.kl) in facts.WHOLE_VOCABULARY:
        yield (
            f"algorithm.kl={name_of(a.kl)} compares whole distributions, and with pairs.loss only "
            "the reference's log-probs of tokens are computed. Set algorithm.kl=k3, or leave "
            "algorithm.kl_coefficient out."
        )


@rule(job="rl")
def pairs_have_no_teacher_in_their_advantages(config: Config) -> Iterator[str]:
    """Refuse a teacher in the advantages, and one that leaves pairs without weight."""
    teacher = config.teacher
    if config.pairs is None or teacher is None:
        return
    if teacher.form == "advantage":
        yield (
            "teacher.form=advantage adds to advantages, and pairs.loss has none. Set "
            "teacher.form=loss, or teacher=null."
        )
    elif not teacher.rewards:
        yield "teacher.rewards=0 gives pairs.loss no weight. Raise it, or set pairs=null."


@rule(job="rl")
def pairs_are_of_whole_answers(config: Config) -> Iterator[str]:
    """Refuse continuations from pivots: they would be paired with answers from the prompt."""
    pivots = config.algorithm.pivots
    if config.pairs is not None and pivots is not None:
        yield (
            "pairs.loss compares whole answers, and algorithm.pivots.continuations "
            f"({pivots.continuations}) adds ends of answers to their group. Set "
            "algorithm.pivots=null, or pairs=null."
        )
