"""Counts what a shop has."""

from stock.store import Store
from stock.text import parse_line, table

__all__ = ["Store", "parse_line", "table"]
