"""The base under adapters: brought once, whatever is published meanwhile."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from transport_rig import host_tree, on_trainer, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import CheckpointError, WeightsError
from jaxrl_async.remote.weights.base_delivery import BaseLoader
from jaxrl_async.remote.weights.protocols import BASE
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering

WAYS = ("tcp", "shared_memory", "folder")
TREE = host_tree()
TARGET = target_of(TREE)
ADAPTER = {"layers": {"w_lora_a": np.ones((3, 4), np.float32)}}


@pytest.fixture(params=WAYS)
def offered(request: Any, tmp_path: Any) -> Iterator[Any]:
    """A trainer that has offered a base and some versions, and what makes a sampler's base."""
    section = RemoteSection(transfer=request.param, folder=str(tmp_path))
    offering = make_offering(section, run="base")
    fetchings = []

    def base(read: Any = None) -> BaseLoader:
        fetchings.append(make_fetching(section, target_of({"head": TREE["head"]})))
        return BaseLoader(fetchings[-1].for_base(TARGET), read)

    yield {"base": offering.offer(BASE, on_trainer(TREE))}, base
    for one in (*fetchings, offering):
        one.close()


def load(base: BaseLoader, where: Any) -> int:
    return base.load(where, (), threading.Event())


def test_it_is_loaded_once_and_merged_with_each_adapter_until_the_sampler_has_begun(
    offered: Any,
) -> None:
    where, make = offered
    base = make()
    assert load(base, where) == sum(x.nbytes for x in jax.tree.leaves(TREE))
    assert load(base, {}) == 0, "it is here"
    whole = base.merge({"layers": {"w_lora_a": 1}})
    assert whole["layers"].pop("w_lora_a") == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole), TREE)
    base.release()
    assert base.merge(ADAPTER) is ADAPTER and load(base, {}) == 0


def test_one_that_is_read_here_is_taken_if_it_is_the_trainers(offered: Any) -> None:
    where, make = offered
    same = jax.device_put(TREE)
    base = make(lambda: same)
    assert load(base, where) == 0
    assert base.merge(ADAPTER)["head"] is same["head"]
    other = {**TREE, "head": TREE["head"] + 1}
    assert load(make(lambda: jax.device_put(other)), where) > 0, "other weights: fetched"

    def broken() -> Any:
        raise CheckpointError("half a file")

    assert load(make(broken), where) > 0


def test_impossible_offers_are_errors(offered: Any) -> None:
    where, make = offered
    with pytest.raises(WeightsError, match="without its base weights"):
        load(make(), {})
    renamed = [[f"other/{name}", *rest] for name, *rest in where["base"]["arrays"]]
    with pytest.raises(WeightsError, match="'head': published nothing; the sampler expects"):
        load(make(), {"base": {**where["base"], "arrays": renamed}})
