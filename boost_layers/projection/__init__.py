"""The three tensor-parallel strategies. One block serves all of them: they differ in how its
projections are sharded and in what is communicated, which is what this package holds."""

from boost_layers.projection.btp import BtpProjections
from boost_layers.projection.full_rank import FullRankProjections
from boost_layers.projection.vanilla import VanillaProjections

Projections = BtpProjections | FullRankProjections | VanillaProjections

__all__ = ["BtpProjections", "FullRankProjections", "Projections", "VanillaProjections"]
