"""Records from another process whose fields hold something else than their types say."""

from dataclasses import fields, make_dataclass, replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from typing_extensions import TypeAliasType

from jaxrl_async.remote.wire import messages
from jaxrl_async.remote.wire.messages import MESSAGES, Answers, Beat, Live, Offer, Start
from jaxrl_async.remote.wire.validation import check_fits
from jaxrl_async.types import Completion, Partial, Request, StopReason

REQUEST = Request(
    request_id="g1/m0/t0", token_ids=np.zeros(3, np.int32), max_new_tokens=8, key=(1, 2)
)
COMPLETION = Completion(
    request_id="g1/m0/t0",
    token_ids=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    versions=np.zeros(2, np.int32),
    stop=StopReason.EOS,
)
PARTIAL = Partial(
    request=REQUEST,
    token_ids=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    versions=np.zeros(2, np.int32),
    seed=0,
    kv=np.zeros((1, 2, 5, 1, 4), ml_dtypes.bfloat16),
)


@pytest.mark.parametrize(
    "message",
    [
        Start(requests=(REQUEST, PARTIAL)),
        Answers(completions=(COMPLETION,)),
        Beat(stats={"tokens": 3, "rate": 0.5}, places=4),
        Offer(version=1, where={"any": [1, "thing"]}, probe_logprobs=np.zeros(3, np.float32)),
        messages.Leaving(reason="", partials=(PARTIAL,)),
    ],
)
def test_what_fits_passes(message: Any) -> None:
    check_fits(message)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (Live(version="1"), "Live.version is a str, not a int"),  # type: ignore[arg-type]
        (Live(version=True), "Live.version is a bool, not a int"),
        (Start(requests=[REQUEST]), "Start.requests is a list, not a tuple"),  # type: ignore[arg-type]
        (
            Start(requests=(REQUEST, replace(REQUEST, key=(1,)))),
            r"Start.requests\[1\].key has 1 entries, not 2",
        ),
        (
            Start(requests=(replace(REQUEST, token_ids=np.zeros(2, np.float32)),)),
            r"Start.requests\[0\].token_ids is an array of float32",
        ),
        (Beat(stats={"a": "b"}, places=4), r"Beat.stats\['a'\] is a str"),  # type: ignore[dict-item]
        (
            Answers(completions=(replace(COMPLETION, stop="eos"),)),  # type: ignore[arg-type]
            r"completions\[0\].stop is a str, not a StopReason",
        ),
        (
            Answers(completions=(replace(COMPLETION, versions=[3]),)),  # type: ignore[arg-type]
            r"completions\[0\].versions is a list, not a ndarray",
        ),
    ],
)
def test_what_does_not_fit_is_named(message: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        check_fits(message)


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if fields(kind)])
def test_every_message_can_be_checked(kind: type) -> None:
    with pytest.raises((ValueError, AttributeError)):
        check_fits(object.__new__(kind))


def test_a_type_may_be_an_alias_by_name() -> None:
    """As NumPy 2.5 has NDArray on Python 3.12 and later: then no sampler could join."""
    scalar = TypeVar("scalar", bound=np.generic)
    array = np.ndarray[Any, np.dtype[scalar]]
    Named: Any = TypeAliasType("Named", array, type_params=(scalar,))
    Plain: Any = TypeAliasType("Plain", int)
    Record: Any = make_dataclass("Record", [("ids", Named[np.int32] | None), ("count", Plain)])
    check_fits(Record(np.zeros(2, np.int64), 3))
    check_fits(Record(None, 3))
    with pytest.raises(ValueError, match=r"Record\.ids"):
        check_fits(Record(np.zeros(2, np.float32), 3))
    with pytest.raises(ValueError, match=r"Record\.count is a str, not a int"):
        check_fits(Record(None, "3"))
