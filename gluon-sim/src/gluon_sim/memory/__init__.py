"""What is read and written: shared, tensor and global memory.

| file | what |
|---|---|
| views.py | allocations on the chip and their views |
| placement.py | the place of every element, for layouts given by bases |
| tiles.py | the same for other layouts: what views of one buffer must agree about |
| lanes.py | the lanes of tensor memory that a 64-row product takes |
| global_memory.py | tensor arguments with bounds and write counts, TMA descriptors |
| unreserved.py | memory that spans far more than the machine has |
"""
