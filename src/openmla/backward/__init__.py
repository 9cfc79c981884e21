"""Gradients of the dense form: the same flow as the forward pass, a module per step.

ops          the operators that autograd sees: `dense_train` and `dense_backward`
dispatch     the plan of a backward pass, and its launch
reference    the definition: float64, one query row at a time
operands     the tensors of one backward pass, bundled
problem      the same as plain data, for the planner (openmla.planning.backward)
"""
