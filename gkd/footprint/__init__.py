"""How much memory each rank of a run needs, known before anything starts. Pure: no torch, ray, megatron, transformers.

footprint(config, config_json)   bytes by part, one of each kind of rank
check(footprints, card_bytes, config)   what does not fit, and which keys to change
"""

from gkd.footprint.estimate import footprint
from gkd.footprint.limits import check
from gkd.footprint.teacher import teacher_footprint
from gkd.footprint.types import RankFootprint

__all__ = ["RankFootprint", "check", "footprint", "teacher_footprint"]
