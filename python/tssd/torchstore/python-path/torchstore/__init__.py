"""The replacement for torchstore, if the parent folder is in PYTHONPATH."""

import sys

import tssd.torchstore

# `install` puts the replacement into `sys.modules`, and the import in progress returns it when it ends.
del sys.modules[__name__]
tssd.torchstore.install()
