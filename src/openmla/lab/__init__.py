"""The laboratory: openmla is tested, compiled for absent chips, predicted and timed here.

    testing/      cases, the float64 acceptance rule, poisons, fuzz, kernels simulated and executed
    compiling/    every kernel compiled without its GPU, and the compiler's reports
    bench/        races against named peers
    prediction.py how long a kernel would take on a chip, from its simulated timeline

It is for openmla's developers and for users who check a machine (`openmla check`, `validate`,
`bench`, `compile`, `explain`). The library never imports it: only the command line does.
"""
