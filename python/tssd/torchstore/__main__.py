"""Prints the PYTHONPATH entry for programs whose processes import torchstore: python -m tssd.torchstore."""

from pathlib import Path

print(Path(__file__).parent / "python-path")
