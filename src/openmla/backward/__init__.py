"""Gradients of the dense and the sparse form, planned and launched as calls of attention are.

ops          the operators that autograd sees: `dense_train` and `dense_backward`
given        `with_expanded_gradients`: gradients for an output that another form computed
reference    the definition: float64, one query row at a time
operands     the tensors of one backward pass, bundled
sparse_…     likewise for the sparse form: gradients of queries and of the rows that lists name
problem      the same as plain data, for the planner: its form is dense_backward or
             sparse_backward
"""
