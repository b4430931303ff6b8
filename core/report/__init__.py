"""A run directory -> one self-contained HTML page. No torch, no script in the page, no request from it."""

from isthmus.core.report.write import write_report

__all__ = ["write_report"]
