"""Predict the memory of each rank of a run before anything starts. Pure: no torch, ray, megatron, transformers.

footprint(config, config_json)         bytes by part, for each kind of rank
check(footprints, gpu_bytes, config)   what does not fit, and which keys to change
"""

from gkd.memory.footprint.estimate import footprint
from gkd.memory.footprint.limits import check
from gkd.memory.footprint.rank import RankFootprint
from gkd.memory.footprint.teacher import teacher_footprint

__all__ = ["RankFootprint", "check", "footprint", "teacher_footprint"]
