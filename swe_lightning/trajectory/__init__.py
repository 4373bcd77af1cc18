"""Model calls -> rows. Light: numpy only."""

from swe_lightning.trajectory.limits import apply_limits
from swe_lightning.trajectory.merge import merge
from swe_lightning.trajectory.report import RowsReport, rows_of
from swe_lightning.trajectory.supersede import supersede

__all__ = ["RowsReport", "apply_limits", "merge", "rows_of", "supersede"]
