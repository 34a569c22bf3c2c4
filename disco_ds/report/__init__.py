"""One self-contained HTML file about one run, or about several side by side."""

from disco_ds.report.page import write_report
from disco_ds.report.run_info import finish_run, record_start, refresh_report, reported

__all__ = ["finish_run", "record_start", "refresh_report", "reported", "write_report"]
