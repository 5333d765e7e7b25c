"""The GPU kernel through Pallas' Mosaic GPU backend: Hopper's TMA copies, barriers and wgmma.

Both launches copy pages of K and V into a ring of blocks in shared memory, which
gpu_mosaic_ring.py tells of. They differ in what wgmma's 64 rows are: in gpu_mosaic_mixed.py the
query heads of a tile of tokens, in gpu_mosaic_decode.py, where a tile has few, the tokens of KV.
"""

from .gpu_mosaic_decode import decode as decode
from .gpu_mosaic_mixed import mixed as mixed
from .gpu_mosaic_mixed import tile_tokens as tile_tokens
from .gpu_mosaic_ring import block_tokens as block_tokens
