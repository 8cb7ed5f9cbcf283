"""Three updates of GRPO on records and a reward of one's own."""

from start_task import MODEL, RECORDS, score

import jaxrl_async as jr


def right(completion, answer):
    return score(completion, answer)


run = jr.train(
    model=MODEL,
    data=RECORDS,
    reward=right,
    steps=3,
    group_size=4,
    groups_per_step=4,
    max_new_tokens=32,
)
