"""What openmla is tested with, for its own tests and for yours.

    cases.py     one seeded generator of calls          compare.py   the acceptance rule
    poison.py    NaN in everything that is not used     guard.py     tensors against unmapped pages
    margin.py    tensors between strips of poison       isolate.py   cases in child processes
    fuzz.py      all of it, at random                   simulate.py  another chip's Gluon kernels

Imports torch and openmla, and gluon-sim where kernels are simulated; nothing in openmla imports it
but the command line.
"""
