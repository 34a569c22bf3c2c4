"""``disco-ds report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from disco_ds.report.page import write_report
from disco_ds.report.run_info import REPORT_FILE


@dataclass(frozen=True)
class ReportCommand:
    """Write one HTML file about a run, or about several runs side by side."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders; differences are shown against the first."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File to write; report.html in the run folder, or here for several runs, when not given."""

    def run(self) -> int:
        """Write it; returns the exit status."""
        if not self.runs:
            raise ValueError("disco-ds report: name at least one run folder")
        alone = len(self.runs) == 1
        output = self.output or (self.runs[0] / REPORT_FILE if alone else Path(REPORT_FILE))
        print(write_report(self.runs, output))  # noqa: T201
        return 0
