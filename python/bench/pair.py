"""A client that puts a model and one that gets it, with a daemon of their own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import tssd
from daemon import daemon
from model import Model, State, clear, expect_same
from peer import KEY


class Pair:
    """Writer and reader, each with a connection: they are there from start to stop."""

    def __init__(self, model: Model, into: State) -> None:
        self.model, self.into = model, into
        #: What was got last as views of the store.
        self.views: State = {}

    def __enter__(self) -> Pair:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        with ExitStack() as stack:
            # More than what is there at any time: no limit is measured here.
            url = stack.enter_context(daemon(8 * self.model.nbytes + (256 << 20)))
            self.writer = stack.enter_context(tssd.Store(url))
            self.reader = stack.enter_context(tssd.Store(url))
            self.stack = stack.pop_all()

    def restart(self) -> None:
        """With a daemon that is new."""
        self.stop()
        self.start()

    def stop(self) -> None:
        self.drop()
        self.stack.close()

    def put(self) -> None:
        self.writer.put_state_dict(self.model.state, KEY)

    def get_into(self, verify: bool = True) -> None:
        self.reader.get_state_dict(KEY, self.into, verify=verify)

    def get_views(self, verify: bool = True) -> None:
        self.views = self.reader.get_state_dict(KEY, verify=verify)

    def drop(self) -> None:
        """Views of a version keep it: else three versions would be there at the next put."""
        self.views = {}

    def put_and_get_into(self) -> None:
        self.put()
        self.get_into()

    def put_and_get_views(self) -> None:
        self.put()
        self.get_views()

    def warm(self) -> None:
        """Two versions are there at once: from the third on all memory is warm."""
        for _ in range(3):
            self.put_and_get_into()

    def put_anew(self) -> None:
        """And nothing is left in the tensors that a get fills."""
        clear(self.into)
        self.put()

    def expect_filled(self, *_: object) -> None:
        """Fails unless the last get in place has brought what was put."""
        expect_same(self.into, self.model.state)

    def expect_viewed(self, *_: object) -> None:
        """Fails unless the last views are of what was put."""
        expect_same(self.views, self.model.state)

    def expect_put(self, *_: object) -> None:
        """Fails unless what was put last can be got."""
        clear(self.into)
        self.get_into()
        self.expect_filled()
