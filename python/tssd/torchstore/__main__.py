"""Prints the PYTHONPATH entry for programs that import torchstore: python -m tssd.torchstore."""

from pathlib import Path

print(Path(__file__).parent / "python-path")
