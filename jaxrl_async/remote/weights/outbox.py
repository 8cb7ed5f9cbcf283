"""The trainer's side of weight transfer to other processes: a thread that offers the newest
version.

    publish ──private copy──> pending ──Offering.offer──> kept ──Offer──> samplers
    trainer's thread             │ a newer one replaces it     this thread

The trainer never waits: a newly published version replaces one that was not offered yet.
transfers.py decides which sampler is offered which version; this module is independent of the
transport.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_async.codec import Encoded
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.run import Clock
from jaxrl_async.remote.weights.protocols import BASE, Offering
from jaxrl_async.remote.weights.transfers import RETRY_S, TRIES, DueOffer, Recipient, Transfers
from jaxrl_async.remote.wire.messages import Offer, Staged
from jaxrl_async.types import FloatArray, VersionedParams
from jaxrl_async.weights.manifest import Manifest, Sums, manifest_of
from jaxrl_async.weights.remote_port import Traffic

if TYPE_CHECKING:  # which imports this file
    from jaxrl_async.remote.weights.remote_link import RemoteEnd

log = logging.getLogger(__name__)

MOST_FALLBACKS = 1000
"""Maximum number of fallbacks counted from one report of a sampler."""
CLOSE_S = 10.0
"""Maximum wait for the thread on close, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptVersion:
    """The data that samplers need to fetch a version."""

    where: Encoded
    where_with_base: Encoded  # for a sampler without the base
    probe_logprobs: FloatArray | None


class WeightOutbox:
    """Makes the newest weights available, and offers them to each sampler. A
    weights.channel.WeightChannel uses it as its RemoteSamplers."""

    may_join = True

    def __init__(
        self,
        copy: Callable[[Params], Params],
        offering: Offering,
        section: RemoteSection,
        *,
        checksum: bool = True,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create an outbox; its thread starts with the first publish.

        Args:
            copy: makes a private copy in the trainer's shardings (weights.local.PrivateCopy).
            offering: the transport.
            section: fanout, transfer_timeout_s and wait_s.
            checksum: send the arrays' checksums, so samplers also compare the arrays on their
                devices; every transport already compares what arrives on the host. Not done for
                arrays that span several processes, or if both are the same arrays.
            count: called with the name of each fault (metrics.fault_counts).
            clock: monotonic, seconds.
        """
        self._copy, self._offering, self._section = copy, offering, section
        self._checksum, self._count, self._clock = checksum, count, clock
        self._transfers = Transfers(fanout=section.fanout, timeout_s=section.transfer_timeout_s)
        self._ends: dict[Recipient, RemoteEnd] = {}
        self._changed = threading.Condition()
        self._pending: VersionedParams | None = None  # on the trainer's devices
        self._base: Params | None = None  # until offered
        self._base_where: dict[str, Any] | None = None
        self._kept: dict[int, _KeptVersion] = {}
        self._traffic = Traffic()
        self._manifest: Manifest | None = None
        self._must_check = self._closed = False  # the thread must check again; must end
        self._failures, self._retry_s = 0, 0.0  # consecutive failures of offering; no retry before
        self._error: WeightsError | None = None
        self._thread: threading.Thread | None = None

    # ---- the trainer's thread

    def begin(self, base: Params) -> None:
        """Also offer the base of the published adapters, from the first publish on, once to each
        sampler. Its arrays must not change."""
        assert self._thread is None, "before the first publish"
        self._base = base

    def publish(self, update: VersionedParams) -> None:
        """Copy the trainer's weights and return immediately; the samplers get the newest copy.

        Raises WeightsError if earlier weights could not be offered after several attempts.
        """
        if self._error is not None:
            raise self._error
        with self._changed:
            self._pending = None  # frees memory for this version
        copied = self._copy(update.params)
        if self._manifest is None:
            self._manifest = manifest_of(copied)
        with self._changed:
            self._pending = replace(update, params=copied)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
                self._thread.start()
            self._wake()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the samplers' weights. Raises WeightsError before the first publish."""
        if self._manifest is None:
            raise WeightsError("no weights have been published yet: call WeightChannel.begin first")
        return self._manifest

    # ---- any thread

    def join(self, name: str, address: str, end: "RemoteEnd") -> Recipient:
        """Add a sampler, and offer it the newest version. address: its data address."""
        recipient = Recipient(name=name, address=address)
        with self._changed:
            self._transfers.join(recipient)
            self._ends[recipient] = end
            self._wake()
        return recipient

    def leave(self, recipient: Recipient) -> None:
        """Remove a sampler. Idempotent."""
        with self._changed:
            self._transfers.leave(recipient)
            self._ends.pop(recipient, None)
            self._wake()

    def staged(self, recipient: Recipient, report: Staged) -> bool:
        """Record that a sampler has a version; return True if this is new. Raises WeightsError if
        it is impossible."""
        numbers = (report.version, report.num_bytes, report.seconds, report.base_bytes)
        if not all(0 <= number < 2**63 for number in (*numbers, report.fallbacks)):
            raise WeightsError(f"{recipient.name} reports an impossible number: {report}")
        with self._changed:
            is_new = self._transfers.staged(recipient, report.version)
            if is_new:
                for _ in range(min(report.fallbacks, MOST_FALLBACKS)):
                    self._count("transfer_fallbacks")
                relayed = self._transfers.relays(report.source)
                traffic = self._traffic
                self._traffic = replace(
                    traffic,
                    transfers=traffic.transfers + 1,
                    transfer_s=traffic.transfer_s + report.seconds,
                    sent_bytes=traffic.sent_bytes + (0 if relayed else report.num_bytes),
                    passed_bytes=traffic.passed_bytes + (report.num_bytes if relayed else 0),
                    base_bytes=traffic.base_bytes + report.base_bytes,
                )
            self._wake()
            return is_new

    def torn(self, recipient: Recipient, version: int, error: str) -> None:
        """Record that a transfer to a sampler has failed; the sampler is offered the newest
        version."""
        with self._changed:
            if self._transfers.torn(recipient, version, self._clock()):
                self._count("torn_transfers")
                self._repeat(recipient, f"the transfer of version {version} failed: {error}")
            self._wake()

    def live(self, recipient: Recipient, version: int, enter: Callable[[int], bool]) -> None:
        """Record that a sampler generates with a version. Raises WeightsError if this is
        impossible.

        enter: counts the sampler from now on; returns False if its version is too old. It is then
        offered a newer version, and the live version waits for it.
        """
        with self._changed:
            self._transfers.live(recipient, version, enter)
            if recipient.late:
                self._traffic = replace(self._traffic, late=self._traffic.late + 1)
            self._wake()

    def joined(self) -> None:
        """Count a sampler that has entered."""
        with self._changed:
            self._traffic = replace(self._traffic, joins=self._traffic.joins + 1)

    def traffic(self) -> Traffic:
        """Return a consistent snapshot."""
        return self._traffic

    @property
    def transfer_limit_s(self) -> float:
        """Time after which a sampler has new weights or was given up, seconds."""
        return TRIES * self._section.transfer_timeout_s

    @property
    def wait_s(self) -> float:
        """Maximum wait while there are no samplers, seconds."""
        return self._section.wait_s

    @property
    def num_bytes(self) -> int:
        """Bytes sent to one sampler per version. Raises WeightsError before the first publish."""
        return self.manifest.num_bytes

    def close(self) -> None:
        """Stop the thread and withdraw everything. Idempotent."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._pending = None
            self._changed.notify_all()
        if thread is not None:
            thread.join(CLOSE_S)
        self._offering.close()

    # ---- its own thread

    def _run(self) -> None:
        while True:
            with self._changed:
                next_s = self._next_s()
                wait_s = None if next_s is None else max(next_s - self._clock(), 0.0)
                self._changed.wait_for(lambda: self._must_check or self._closed, wait_s)
                if self._closed:
                    return
                self._must_check = False
            self._step()

    def _step(self) -> None:
        """Handle everything that is due now."""
        with self._changed:
            for recipient in self._transfers.expired(self._clock()):
                self._repeat(recipient, f"not done within {self._section.transfer_timeout_s:g} s")
            released = [self._ends[r] for r in self._transfers.hold_expired(self._clock())]
            for end in released:
                end.release()
            withdrawn = self._transfers.outdated()
            self._transfers.drop(withdrawn)
            update, before = self._next_kept()
            self._transfers.drop(before)
        for end in released:
            end.report_live()
        for version in (*withdrawn, *before):
            self._kept.pop(version, None)
            self._offering.withdraw(version)
        if update is not None:
            self._keep(update)
        with self._changed:
            offers = self._transfers.due(self._clock(), self._offering.address)
            ends = [self._ends[offer.recipient] for offer in offers]
            for offer, end in zip(offers, ends, strict=True):
                offer.recipient.sending = True
                if offer.recipient.held_until_s is not None:
                    end.hold(offer.version)
            self._must_check = self._must_check or bool(offers) or update is not None
        for offer, end in zip(offers, ends, strict=True):
            self._send(offer, end)

    def _next_kept(self) -> tuple[VersionedParams | None, list[int]]:
        """Take the pending version, if there is room for it, and the versions to withdraw first."""
        update = self._pending
        if update is None or self._clock() < self._retry_s:
            return None, []
        before = self._transfers.blocking(update.version)
        if before is None:
            return None, []
        self._pending = None
        return update, before

    def _keep(self, update: VersionedParams) -> None:
        """Make a version available; after a failure, retry unless there is a newer version."""
        try:
            kept = self._make_available(update)
        except Exception as error:
            self._offering.withdraw(update.version)
            self._count("transfer_retries")
            log.warning("version %d could not be offered: %s", update.version, error)
            with self._changed:
                self._retry_s = self._clock() + backoff_s(RETRY_S, self._failures)
                self._failures += 1
                if self._failures >= TRIES:
                    self._error = WeightsError(
                        f"version {update.version} could not be offered to the samplers in {TRIES} "
                        f"attempts: {error}. Check this machine's memory and remote.transfer."
                    )
                elif self._pending is None:
                    self._pending = update
            return
        self._failures = 0
        self._kept[update.version] = kept
        with self._changed:
            self._transfers.keep(update.version)

    def _make_available(self, update: VersionedParams) -> _KeptVersion:
        if self._base is not None:
            self._base_where = self._where(BASE, self._base)
            self._base = None
        probe = update.probe_logprobs
        where = self._where(update.version, update.params)
        encoded = with_base = Encoded(where)
        if self._base_where is not None:
            with_base = Encoded({**where, "base": self._base_where})
        return _KeptVersion(
            where=encoded,
            where_with_base=with_base,
            probe_logprobs=None if probe is None else np.asarray(probe, np.float32),
        )

    def _where(self, version: int, params: Params) -> dict[str, Any]:
        """Offer arrays; return their locations and checksums."""
        whole = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
        needed = self._checksum and whole and not self._offering.compares(params)
        sums = Sums(params) if needed else None
        where = dict(self._offering.offer(version, params))
        if sums is not None:
            numbers = sums.read()
            if numbers is None:
                raise WeightsError("copies of one array differ between the trainer's devices")
            where["sums"] = numbers.tolist()
        return where

    def _send(self, offer: DueOffer, end: "RemoteEnd") -> None:
        kept = self._kept[offer.version]
        message = Offer(
            version=offer.version,
            where=kept.where_with_base if offer.recipient.staged is None else kept.where,
            sources=offer.sources,
            probe_logprobs=kept.probe_logprobs,
        )

        def sent() -> None:
            with self._changed:
                self._transfers.sent(offer.recipient)
                self._wake()

        end.send(message, sent)
        end.report_live()

    def _repeat(self, recipient: Recipient, why: str) -> None:
        """Count a failed transfer; give up the sampler after several. Needs the lock."""
        self._count("transfer_retries")
        self._traffic = replace(self._traffic, repeats=self._traffic.repeats + 1)
        if recipient.failures < TRIES:
            log.warning("retrying the transfer of weights to %s: %s", recipient.name, why)
            return
        self._count("transfers_given_up")
        self._transfers.leave(recipient)
        end = self._ends.pop(recipient, None)
        reason = f"the weights did not reach {recipient.name} in {TRIES} attempts, last: {why}"
        log.error("%s; its session ends, and it may join again", reason)
        if end is not None:
            end.give_up(reason)

    def _wake(self) -> None:
        """Wake the thread. Needs the lock."""
        self._must_check = True
        self._changed.notify_all()

    def _next_s(self) -> float | None:
        """Return the time of the thread's next check; None: only when notified."""
        now_s = self._clock()
        retry_s = self._retry_s if self._pending is not None and self._retry_s > now_s else None
        times = [t for t in (self._transfers.next_s(now_s), retry_s) if t is not None]
        return min(times, default=None)
