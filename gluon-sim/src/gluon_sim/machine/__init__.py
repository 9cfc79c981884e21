"""What runs: clusters of CTAs, their partitions and barriers, and the scheduler that lets them run.

| file | what |
|---|---|
| clusters.py | the grid, its clusters and CTAs, and what they allocate |
| scheduler.py | which partition, or which operation in flight, goes on next |
| async_units.py | copies and matrix products in flight |
| barriers.py | mbarriers and named barriers |
| clocks.py | what happens before what, and races |
| warps.py | what the warps of one partition know of one another |
| context.py | the partition that runs now, and its line of the kernel |
"""
