"""Run by test_layouts.py in a process of its own: meshes through the real TPU compiler.

    python tpu_layouts.py < CASES

CASES is JSON: a list of {"topology": "v5e:4x4", "hosts_of": [2, 4] or null, "axes": {...},
"take": ...}; take says which devices the mesh has: all, half (of each host's), upper (the other
halves), host0 (those of the first host), first (the first half of the hosts). With "mesh", a
section of the configuration, mesh.make_slices cuts them. Prints a list of what mesh says: null, or
its error.
"""

import json
import sys
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_async.config import schema
from jaxrl_async.errors import MeshError
from jaxrl_async.mesh import check_collective, make_mesh, make_slices


def devices_of(topology: str, host: list[int] | None) -> list[list[jax.Device]]:
    """Devices of each host."""
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology[:2] == "v4" else {}
    if host is not None:
        options["chips_per_host_bounds"] = (*host, 1)
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    numbers = sorted({d.process_index for d in found})
    return [[d for d in found if d.process_index == n] for n in numbers]


def taken(hosts: list[list[jax.Device]], how: str) -> list[jax.Device]:
    halves = {"half": slice(None, len(hosts[0]) // 2), "upper": slice(len(hosts[0]) // 2, None)}
    if how in halves:
        return [d for host in hosts for d in host[halves[how]]]
    if how == "first":
        hosts = hosts[: len(hosts) // 2]
    return hosts[0] if how == "host0" else [d for host in hosts for d in host]


def answer(case: dict[str, Any]) -> str | None:
    devices = taken(devices_of(case["topology"], case["hosts_of"]), case["take"])
    section = schema.AxesSection(**case["axes"] or {"fsdp": len(devices)})
    try:
        if "mesh" in case:
            make_slices(schema.MeshSection(**case["mesh"]), devices)
        else:
            assert section.num_devices == len(devices), (case, len(devices))
            check_collective(make_mesh(section, devices), "mesh.trainer")
    except MeshError as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
