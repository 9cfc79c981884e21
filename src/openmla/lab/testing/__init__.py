"""What openmla is tested with, for its own tests and for yours.

    cases.py     one seeded generator of calls          compare.py   the acceptance rule
    memory/      NaN in everything that is not used, unmapped pages, rows past element 2^31
    isolate.py   cases in child processes               fuzz.py      all of it, at random
    simulate/    another chip's Gluon kernels, in the simulator

Imports torch and openmla, and gluon-sim where kernels are simulated; nothing in openmla imports it
but the command line.
"""
