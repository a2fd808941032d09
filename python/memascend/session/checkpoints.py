"""The checkpoints in one store: generations that are kept under a name until they are deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import MemascendError, StoreError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memascend._memascend import Runtime
    from memascend.durability.commits import CommitLog
    from memascend.ranks.membership import Membership, OneProcess
    from memascend.streaming.streamer import Streamer


class Checkpoints:
    """Makes, lists and deletes the checkpoints of one session."""

    def __init__(
        self, runtime: Runtime, streamer: Streamer, commit_log: CommitLog, membership: Membership | OneProcess
    ) -> None:
        """Name generations in the store of `runtime`; on all ranks of its `membership` alike."""
        self._runtime = runtime
        self._streamer = streamer
        self._commit_log = commit_log
        self._membership = membership

    def all(self) -> list[tuple[str, int, int]]:
        """Return (tag, generation number, bytes) of each checkpoint, the oldest first."""
        return self._runtime.store.snapshots()

    def tags(self) -> list[str]:
        """Return the names of the checkpoints, the oldest first."""
        return [tag for tag, _, _ in self._runtime.store.snapshots()]

    def save(self, tag: str, keep_last: int | None = None) -> None:
        """Keep the present state under a name; see `memascend.save_checkpoint`."""
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least the checkpoint that is made is kept")
        if self._commit_log.period == 0:
            raise MemascendError(
                "with durability='none' weights and states are updated in place, so that no checkpoint can be kept "
                "beside them: use durability='step' or 'every:N', or write them elsewhere (save_pretrained, state_dict)"
            )
        with self._streamer.turns.take("save_checkpoint"):
            self._streamer.apply_updates()
            self._commit_log.keep()
            self._keep_under(tag)
        if keep_last is not None:
            self.delete(self.tags()[:-keep_last])

    def _keep_under(self, tag: str) -> None:
        """Keep the durable generation under a name; over ranks, on all of them or on none."""
        failure: StoreError | None = None
        try:
            self._runtime.store.snapshot(tag)
        except StoreError as error:
            failure = error
        text = "" if failure is None else first_line(failure)
        told = [text.strip() for text in self._membership.all_gather_object(f"keep checkpoint {tag}", text)]
        if any(told) and failure is None:
            self._runtime.store.delete_snapshot(tag)
            why = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
            failure = StoreError(None, f"the checkpoint {tag} could not be kept on every rank: {why}")
        if failure is not None:
            raise failure

    def delete(self, tags: Iterable[str]) -> None:
        """Delete checkpoints. Raises StoreError for a tag that the store does not have."""
        if self._membership.divides:
            # A manifest that is written before all ranks have the generation would take the one before away.
            self._commit_log.wait_committed()
        for tag in list(tags):
            self._runtime.store.delete_snapshot(tag)

    def check(self, tag: str) -> None:
        """Raise StoreError for a tag that the store does not have."""
        if tag not in self.tags():
            self._runtime.store.delete_snapshot(tag)  # Raises, naming the tag.

    def confirm(self, tag: str) -> None:
        """Discard the steps after the checkpoint that the run has gone back to."""
        self._runtime.store.confirm_snapshot(tag)
