"""Compressed rows: one row for several tokens, as DeepSeek-V4 and V4.1 cache them.

Every token has a value and a gate of the same width. A row is the mean of its tokens' values,
weighted column by column by the softmax of their gates:

    ratio 128       tokens 128j … 128j+127, with a bias for each place             DeepSeek-V4, HCA
    ratio 4         tokens 4j-4 … 4j+3: two values and gates per token, `overlap`   DeepSeek-V4, CSA
    ratio 2         tokens 2j, 2j+1                                                 DeepSeek-V4.1
    ratio 1         token j, without a gate                                         DeepSeek-V4.1
    ratio 4         tokens 4p … 4p+3, of the indexer's keys                         GLM-5.3-Flash

Norm and rope come after it, and are the model's.
"""

from openmla.compressor.api import compress_rows

__all__ = ["compress_rows"]
