"""Predict the memory of each rank of a run before anything starts. Pure: no torch, ray, megatron, transformers.

footprint(config, models)              bytes by part, for each kind of rank
check(footprints, gpu_bytes, config)   what does not fit
"""

from gkd.memory.footprint.estimate import RankFootprint, footprint
from gkd.memory.footprint.fit import check

__all__ = ["RankFootprint", "check", "footprint"]
