"""A client that puts a model, and a client that gets it, with a separate daemon."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import tssd
from daemon import daemon
from model import Model, State, expect_same, zero_tensors
from peer import KEY


class ClientPair:
    """A writer and a reader, each with its own connection, from `start` to `stop`."""

    def __init__(self, model: Model, into: State) -> None:
        self.model, self.into = model, into
        #: The result of the last get, as views of the store.
        self.views: State = {}

    def __enter__(self) -> ClientPair:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        with ExitStack() as stack:
            # More memory than ever needed: the limit must not affect the measurement.
            url = stack.enter_context(daemon(8 * self.model.nbytes + (256 << 20)))
            self.writer = stack.enter_context(tssd.Store(url))
            self.reader = stack.enter_context(tssd.Store(url))
            self.stack = stack.pop_all()

    def restart(self) -> None:
        """Stops, and starts with a new daemon."""
        self.stop()
        self.start()

    def stop(self) -> None:
        self.drop_views()
        self.stack.close()

    def put(self) -> None:
        self.writer.put_state_dict(self.model.state, KEY)

    def get_into(self, verify: bool = True) -> None:
        self.reader.get_state_dict(KEY, self.into, verify=verify)

    def get_views(self, verify: bool = True) -> None:
        self.views = self.reader.get_state_dict(KEY, verify=verify)

    def drop_views(self) -> None:
        """Drops the views, which retain their version. Otherwise three versions would exist at the next put."""
        self.views = {}

    def put_and_get_into(self) -> None:
        self.put()
        self.get_into()

    def put_and_get_views(self) -> None:
        self.put()
        self.get_views()

    def warm_up(self) -> None:
        """Puts three versions. Two exist at a time, so from the third on, all memory is warm."""
        for _ in range(3):
            self.put_and_get_into()

    def clear_and_put(self) -> None:
        """Clears the tensors that a get fills, and puts a new version."""
        zero_tensors(self.into)
        self.put()

    def check_filled(self, *_: object) -> None:
        """Raises an error unless the last get in place returned the values that were put."""
        expect_same(self.into, self.model.state)

    def check_views(self, *_: object) -> None:
        """Raises an error unless the last views have the values that were put."""
        expect_same(self.views, self.model.state)

    def check_put(self, *_: object) -> None:
        """Raises an error unless a get returns the values of the last put."""
        zero_tensors(self.into)
        self.get_into()
        self.check_filled()
