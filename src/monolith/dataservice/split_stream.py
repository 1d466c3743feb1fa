"""`SplitStream`: a split that is read ahead, batch by batch, for one trainer that may ask twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from monolith.data.prefetch import PrefetchQueue
from monolith.dataservice.batch_frames import arrays_of
from monolith.dataservice.kinds import SplitReader
from monolith.dataservice.messages import MAX_POSITION, ReadPart
from monolith.errors import InvalidArgumentError
from monolith.features import Batch
from monolith.transport.calls import Answer

__all__ = ["END", "SplitStream", "WAIT", "position_of"]

END = Answer(text=ReadPart(state="end").model_dump_json())
WAIT = Answer(text=ReadPart(state="wait").model_dump_json())

_Read = tuple[str, Answer]
"""A batch as it is sent, and the position behind it."""


class SplitStream:
    """A thread that reads, and the answer to the last question, in case it got lost.

    Example:
        >>> from monolith.dataservice.dataset import DatasetConfig, Split
        >>> from monolith.dataservice.kinds import open_split
        >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 1, "batch_size": 2, "users": 9})
        >>> stream = SplitStream(lambda: open_split(dataset, Split(number=0)), "")
        >>> first = stream.answer("", wait=60)
        >>> stream.answer("", wait=60) is first  # the same question
        True
        >>> stream.answer(json.loads(first.text)["position"], wait=60) == END
        True
    """

    def __init__(
        self, open_reader: Callable[[], SplitReader], position: str, *, read_ahead: int = 4, max_bytes: int = 2**28
    ) -> None:
        self._at = position
        self._before: str | None = None
        """The position of the last question that was answered with a batch."""
        self._last: Answer | None = None
        self._failure: BaseException | None = None
        self._turn = threading.Lock()
        self._queue: PrefetchQueue[_Read] = PrefetchQueue(read_ahead)
        threading.Thread(
            target=_read, args=(open_reader, position, self._queue, max_bytes), name="monolith-split", daemon=True
        ).start()

    def answer(self, position: str, *, wait: float) -> Answer | None:
        """The batch behind `position`, waited for so many seconds; None if the stream is at another position."""
        with self._turn:
            if position == self._before:
                return self._last
            if position != self._at:
                return None
            if self._failure is not None:
                raise self._failure
            try:
                behind, answer = self._queue.get(timeout=wait)
            except TimeoutError:
                return WAIT
            except StopIteration:
                return END
            except BaseException as error:
                self._failure = error
                raise
            self._before, self._at, self._last = position, behind, answer
            return answer

    def close(self) -> None:
        """Let the thread end as soon as its read returns."""
        self._queue.close(drop=True)


def _read(open_reader: Callable[[], SplitReader], position: str, queue: PrefetchQueue[_Read], max_bytes: int) -> None:
    try:
        reader = open_reader()
        for batch in reader:
            behind = position_of(reader)
            if behind == position:
                # Asked for what is behind it, nobody could tell this batch from the next.
                raise InvalidArgumentError(f"{type(reader).__name__}: its state_dict did not change with a batch")
            position = behind
            if not queue.put((behind, _answer(batch, behind, max_bytes))):
                return
        queue.close()
    except BaseException as error:
        queue.close(error)


def position_of(reader: SplitReader) -> str:
    """The place of `reader` as JSON, which is what travels and is kept."""
    try:
        position = json.dumps(reader.state_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{type(reader).__name__}: expected a state_dict of plain values, which go into JSON; {error}"
        ) from None
    if len(position) > MAX_POSITION:
        raise InvalidArgumentError(
            f"{type(reader).__name__}: its state_dict has {len(position):,} characters, more than {MAX_POSITION:,}"
        )
    return position


def _answer(batch: Batch, behind: str, max_bytes: int) -> Answer:
    heads, arrays = arrays_of(batch)
    size = sum(array.nbytes for array in arrays)
    if size > max_bytes:
        raise InvalidArgumentError(f"a batch has {size:,} bytes, more than {max_bytes:,}; give a smaller batch_size")
    return Answer(
        text=ReadPart(state="batch", position=behind, columns=tuple(heads)).model_dump_json(), arrays=tuple(arrays)
    )
