"""The trainer's side of samplers in processes of their own: who joins, and what they are told.

    Hello ──checked──> Welcome ──> an end of the weight channel ──entered──> a seat of the router
      ^                                   │                                        │
      └── refused, with the reason        └── the session ends: the end leaves ────┴─ its seat is gone

The hub listens from the start of the run to its end; its address is in the run's folder.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_async.config.load import as_json
from jaxrl_async.config.schema import AxesSection, Config
from jaxrl_async.errors import JoinRefused, RolloutError
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.ports import Session
from jaxrl_async.sampler.remote.replica import RemoteReplica
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.wire.address import Address, advertised_address, write_join_file
from jaxrl_async.wire.hub import Hub
from jaxrl_async.wire.messages import Hello, Leave, Welcome
from jaxrl_async.wire.session import WireLimits
from jaxrl_async.wire.tls import read_tls

log = logging.getLogger(__name__)
