"""Predict the memory of each rank of a run before anything starts. Pure: no torch, ray, megatron, transformers.

footprint(config, config_json)         bytes by part, for each kind of rank
check(footprints, gpu_bytes, config)   what does not fit, and which keys to change
"""

from gkd.footprint.estimate import footprint
from gkd.footprint.limits import check
from gkd.footprint.rank import RankFootprint
from gkd.footprint.teacher import teacher_footprint

__all__ = ["RankFootprint", "check", "footprint", "teacher_footprint"]
