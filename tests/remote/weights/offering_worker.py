"""One of two processes of a trainer: offering_worker.py HOST:PORT INDEX LACKING.

Prints how it offers weights with remote.transfer=auto, as JSON, where JAX's transfer server cannot
start in process LACKING.
"""

import json
import logging
import sys

import jax
import jax.numpy as jnp

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights import device_transport, transport_choice
from jaxrl_async.run.lockstep import Lockstep


def main() -> None:
    """Offer one array on this process's device."""
    coordinator, index, lacking = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig()
    jax.distributed.initialize(coordinator, num_processes=2, process_id=index)
    lockstep, start = Lockstep(), device_transport.start_transfer_server

    def start_or_not(host: str) -> object:
        if index == lacking:
            raise WeightsError(f"JAX cannot serve in process {index}")
        return start(host)

    device_transport.start_transfer_server = start_or_not
    transport_choice._may_try_devices = lambda section, devices: True
    offering = transport_choice.make_offering(
        RemoteSection(transfer="auto"),
        run="two",
        local_samplers=False,
        separate_machines=True,
        all_agree=lambda has: all(lockstep.gather_json(has)),
    )
    array = jax.device_put(jnp.ones(8), jax.local_devices()[0])
    (holder,) = offering.offer(0, {"w": array})["holders"]
    print(json.dumps({name: holder[name] for name in ("device", "on_devices")}))
    lockstep.gather_json(None)  # neither ends before the other
    offering.close()


if __name__ == "__main__":
    main()
