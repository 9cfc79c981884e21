"""Plans of the CDNA4 kernels (gfx950, MI355X): what each takes of a compute unit.

dense          DenseBlock: what both dense blocks have
dense_fp8      DenseFP8: FP8, as the original's MlaPrefillV2
dense_16       Dense16: bf16 and fp16
sparse         MlaSparse16: latent prefill, over lists of rows or pages
latent_slot    where latent rows lie in LDS
shared_bases   address maps as bases, the form in which the compiler takes them
indexer        scores of the indexer
family         what the kernels serve
"""

from openmla.planning.cdna4.dense import LANE_REGISTERS, DenseBlock
from openmla.planning.cdna4.dense_16 import Dense16
from openmla.planning.cdna4.dense_fp8 import DenseFP8
from openmla.planning.cdna4.sparse import MlaSparse16

__all__ = ["LANE_REGISTERS", "Dense16", "DenseBlock", "DenseFP8", "MlaSparse16"]
