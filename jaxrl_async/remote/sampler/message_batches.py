"""Batches records into messages of bounded size."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar

import numpy as np

from jaxrl_async.errors import ConfigError
from jaxrl_async.remote.wire.session_port import Session

MESSAGE_BYTES = 16 << 20
"""Bytes of arrays after which a new message begins."""
MESSAGE_RECORDS = 1024
"""Maximum number of records in one message."""

Item = TypeVar("Item")


def send_all(
    session: Session, records: Sequence[Item], message: Callable[[tuple[Item, ...]], object]
) -> list[tuple[Item, ConfigError]]:
    """Send records, many per message. Returns the records that are too large to send, each with its
    error. Raises Disconnected.

    message: Returns the message that holds these records.
    """
    refused: list[tuple[Item, ConfigError]] = []
    batches = deque(split_records(records))
    while batches:
        batch = batches.popleft()
        try:
            session.send(message(batch))
        except ConfigError as error:
            if len(batch) == 1:
                refused.append((batch[0], error))
            else:
                middle = len(batch) // 2
                batches.extendleft((batch[middle:], batch[:middle]))
    return refused


def split_records(records: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Split records, in order, into batches of one message each."""
    batch: list[Item] = []
    size = 0
    for record in records:
        more = num_bytes(record)
        if batch and (size + more > MESSAGE_BYTES or len(batch) == MESSAGE_RECORDS):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(record)
        size += more
    if batch:
        yield tuple(batch)


def num_bytes(record: object) -> int:
    """Return the bytes of all arrays in a record."""
    if isinstance(record, np.ndarray):
        return record.nbytes
    if is_dataclass(record):
        return sum(num_bytes(getattr(record, f.name)) for f in fields(record))
    return 0
