"""Masks on a GPU of which a step assumes what they are as a rule. They are looked at later: no step waits for
them."""

import collections
from typing import Any

import torch

from .errors import invalid


class Unread:
    """The masks of steps of one row, each after a step whose mask is known. Such a step takes its mask for
    the one before, and 1 for its own position. The GPU checks that; the result is looked at when it is there.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None  # a copy of the mask of the step before, on its device
        self._results: collections.deque[Any] = collections.deque()  # functions that look at one

    def known(self, mask: torch.Tensor | None) -> None:
        """Notes a mask, bool [batch, positions], that has been read."""
        self._last = None if mask is None or mask.device.type == "cpu" else mask.clone()

    def take(self, mask: torch.Tensor | None) -> bool:
        """Whether the mask of a step of one row need not be read now."""
        self.check()
        last = self._last
        if mask is None or last is None or mask.device != last.device or (
                mask.shape != (last.shape[0], last.shape[1] + 1)):
            return False
        past = last.shape[1]
        self._results.append(later(mask.narrow(1, 0, past).eq(last).all() & mask.narrow(1, past, 1).all()))
        self._last = mask.clone()
        return True

    def again(self, mask: torch.Tensor) -> bool:
        """Whether the mask of other layers of this step need not be read: it is taken for the last one."""
        last = self._last
        if last is None or mask.device != last.device or mask.shape != last.shape:
            return False
        self._results.append(later(mask.eq(last).all()))
        return True

    def check(self, wait: bool = False) -> None:
        """Raises InvalidArgument if a mask was not what its step took it for. wait: for all results."""
        while self._results:
            found = self._results[0](wait)
            if found is None:
                return
            self._results.popleft()
            if not found:
                raise invalid("attention_mask", "of a step before differs for positions that are in the "
                              "cache or between layers, or hides the new position of a member",
                              "in a step of one row on a GPU the mask before it, and 1 for each member")


def later(value: torch.Tensor) -> Any:
    """A function that returns the value of a bool on a GPU, or None if it is not there yet; its argument says
    whether to wait for it."""
    here = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    here.copy_(value, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))

    def look(wait: bool) -> bool | None:
        if wait:
            event.synchronize()
        return bool(here) if event.query() else None

    return look
